"""Carry objects between processes: pickled, in shared memory, or as a call."""
