"""Other hosts: agents, relays and Slurm jobs."""
