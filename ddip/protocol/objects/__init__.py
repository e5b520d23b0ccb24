"""Objects on their way between processes: pickled, in shared memory, and as a call."""
