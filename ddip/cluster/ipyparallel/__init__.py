"""The ipyparallel cluster that connects a group's engines."""
