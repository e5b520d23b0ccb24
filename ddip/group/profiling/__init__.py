"""Profiles of all ranks, merged into one."""
