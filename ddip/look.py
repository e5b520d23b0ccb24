"""How the cells of a group are shown."""

from __future__ import annotations

from dataclasses import dataclass

STYLES = ("auto", "tabs", "labels", "grouped")


@dataclass(frozen=True)
class Look:
    """What a user may choose."""

    style: str = "auto"
    """Of several ranks: ``tabs``, ``labels`` or ``grouped``; ``auto`` is tabs in a notebook and labels elsewhere."""
    limit: int = 400_000
    """Characters of text that a rank may show in one cell; above it the middle is left out."""
    tell_after: float = 10.0
    """Seconds after which a cell says where it ran and how long it took."""
