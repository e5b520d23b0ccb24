"""Several hosts, on one machine: their network, and what ddip does in it."""
