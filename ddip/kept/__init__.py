"""Groups that outlive the notebook's kernel: a keeper process owns the group, and kernels attach to it in turn."""
