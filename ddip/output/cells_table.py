"""The cells that were given to ranks, as a table for people: ``%dipcells``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddip.errors import ranks_text
from ddip.output.tables import aligned


@dataclass(frozen=True)
class CellRow:
    """One cell."""

    number: int
    ranks: Sequence[int]
    state: str
    """Also how it has ended, in words."""
    seconds: float
    background: bool
    first_line: str


def cells_table(rows: Sequence[CellRow]) -> str:
    """One line a cell, the oldest first."""
    head = ["cell", "ranks", "state", "seconds", "first line"]
    lines = [
        [
            str(row.number),
            ranks_text(list(row.ranks)).split(" ", 1)[1],
            row.state + (", in the background" if row.background else ""),
            f"{row.seconds:.1f}",
            row.first_line,
        ]
        for row in rows
    ]
    return aligned([head, *lines])
