"""Hosts that the engines of an existing ipyparallel cluster reach."""
