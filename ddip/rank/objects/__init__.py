"""The variables of a rank: sent, received, wrapped for DDP, and restored after a failed iteration."""
