"""Profile a cell on one rank."""
