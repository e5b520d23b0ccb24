"""State of a training by rank, also of sharded models: kept and brought back, and shown; it needs only torch."""
