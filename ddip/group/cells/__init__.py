"""Cells on ranks: queue, state machine, history, and differences after a fault."""
