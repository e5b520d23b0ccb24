"""Models whose parameters are divided among the ranks: kept and brought back, and shown; it needs only torch."""
