"""Sizes for people. It imports nothing: `ddip doctor` prints some before it knows what can be imported."""

from __future__ import annotations


def size_text(size: float | None) -> str:
    """Bytes for people: ``1.5 GB``; empty for None."""
    if size is None:
        return ""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
