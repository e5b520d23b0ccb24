"""Manage the process of a rank: its libraries, devices, threads, settings and errors."""
