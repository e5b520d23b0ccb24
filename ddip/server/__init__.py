"""Tools for MCP servers of Jupyter; they run in the Jupyter server, and call ``notebook/for_programs.py``."""
