"""The profile of a cell on one rank."""
