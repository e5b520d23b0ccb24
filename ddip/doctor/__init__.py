"""``python -m ddip doctor``: find what keeps ddip from working on this machine, and suggest remedies."""
