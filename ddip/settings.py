"""Every default that a user may change: traits of the magics, arguments of ``Group``, and cells read them here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Of a group and its cells."""

    timeout: float = 60.0
    """Seconds to wait for a group to form."""
    collect: bool = True
    """Collect garbage on every rank after each cell."""
    spawn: bool = False
    """Start each engine as a process of its own, instead of forking it."""
    failure_grace: float = 1.0
    """Seconds from the first failure in a cell until the ranks that wait for others are released."""
    stall_timeout: float = 10.0
    """Seconds without progress after which it is told who waits where."""
    style: str = "auto"
    """How several ranks are told apart: ``tabs``, ``labels`` or ``grouped``; ``auto`` is tabs in a notebook and labels
    elsewhere."""
    max_output_chars: int = 400_000
    """Characters of text that a rank may show in one cell; of more, the middle is left out."""
    keep_output_bytes: int = 64_000_000
    """Of what cells have shown, all together, that can be shown again."""
    cell_json: bool = True
    """Does the output of a cell carry the same as data, for programs that read notebooks?"""
    report_after: float = 10.0
    """Seconds after which a cell says where it ran and how long it took."""


DEFAULTS = Settings()
