"""Processes on this host and on others. A group uses them only through the interface in ``cluster_api.py``."""
