"""HTML and MIME bundles for a notebook page."""
