"""Profiles of all ranks, merged."""
