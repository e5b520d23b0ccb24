"""How the cells of a group are shown."""

from __future__ import annotations

from dataclasses import dataclass

from ddip.settings import DEFAULTS

STYLES = ("auto", "tabs", "labels", "grouped")


@dataclass(frozen=True)
class DisplayOptions:
    """What a user may choose."""

    style: str = DEFAULTS.style
    """Of several ranks: ``tabs``, ``labels`` or ``grouped``; ``auto`` is tabs in a notebook and labels elsewhere."""
    max_output_chars: int = DEFAULTS.max_output_chars
    """Characters of text that a rank may show in one cell; above it the middle is left out."""
    report_after: float = DEFAULTS.report_after
    """Seconds after which a cell says where it ran and how long it took."""
    cell_json: bool = DEFAULTS.cell_json
    """Does its output carry the same as data?"""
