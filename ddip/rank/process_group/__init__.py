"""The process group on a rank: joining, noting collectives, releasing and leaving."""
