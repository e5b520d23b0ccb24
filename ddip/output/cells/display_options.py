"""Options for the display of a group's cells."""

from __future__ import annotations

from dataclasses import dataclass

from ddip.settings import DEFAULTS

STYLES = ("auto", "tabs", "labels", "grouped")


@dataclass(frozen=True)
class DisplayOptions:
    """Display options that a user may set."""

    style: str = DEFAULTS.style
    """Layout of several ranks' output: ``tabs``, ``labels`` or ``grouped``; ``auto`` is tabs in a notebook and labels
    elsewhere."""
    max_output_chars: int = DEFAULTS.max_output_chars
    """Characters of text that a rank may show in one cell; the middle of longer text is omitted."""
    report_after: float = DEFAULTS.report_after
    """Seconds after which a cell reports the ranks it ran on and its duration."""
    cell_json: bool = DEFAULTS.cell_json
    """Add a JSON form to the output of each cell."""
