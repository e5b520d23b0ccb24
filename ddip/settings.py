"""Defaults of the settings that a user may change, for the traits of the magics, arguments of ``Group``, and cells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of a group and its cells."""

    timeout: float = 60.0
    """Seconds to wait for a group to form."""
    collect: bool = True
    """Collect garbage, and empty large unused GPU caches, on every rank after each cell."""
    keep_frames: bool = False
    """Keep the frames of a failed cell on its ranks for ``%dipdebug``, until the next cell."""
    spawn: bool = False
    """Spawn each engine as a new process instead of forking it."""
    failure_grace: float = 1.0
    """Seconds from the first failure in a cell until ddip aborts the collectives in which other ranks are blocked."""
    stall_timeout: float = 10.0
    """Seconds without progress after which a cell reports which rank waits where."""
    style: str = "auto"
    """Layout of several ranks' output: ``tabs``, ``labels`` or ``grouped``; ``auto`` is tabs in a notebook and labels
    elsewhere."""
    max_output_chars: int = 400_000
    """Characters of text that a rank may show in one cell; the middle of longer text is omitted."""
    keep_output_bytes: int = 64_000_000
    """Total bytes of cell output that are kept to be shown again."""
    cell_json: bool = True
    """Add a JSON form to the output of each cell, for programs that read notebooks."""
    report_after: float = 10.0
    """Seconds after which a cell reports its ranks and its duration; the trait of the magics defaults to 0."""


DEFAULTS = Settings()
