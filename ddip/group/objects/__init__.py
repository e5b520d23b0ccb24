"""Transfer of objects and modules between the notebook and its ranks."""
