"""The cells that were given to ranks, and what they have shown: also of groups that have ended."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from ddip.group.cells.cell import Cell
from ddip.output.cells import recording
from ddip.output.cells.router import lock
from ddip.settings import DEFAULTS

KEPT = 500
"""Cells that are listed."""


class History:
    """The last cells, the oldest first. Threads of cells in the background add to it, too."""

    def __init__(self, keep_output_bytes: int = DEFAULTS.keep_output_bytes) -> None:
        self.keep_output_bytes = keep_output_bytes
        """Of what they have shown, all together; of what is older only that it ran is known."""
        self._cells: collections.deque[Cell] = collections.deque()

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._cells))

    def add(self, cell: Cell) -> None:
        """One more; the oldest that has ended goes."""
        self._cells.append(cell)
        if len(self._cells) > KEPT:
            ended = next((one for one in self if one.done.done()), None)
            if ended is not None:
                self._cells.remove(ended)

    def remove(self, cell: Cell) -> None:
        """It was not to be run."""
        self._cells.remove(cell)

    def find(self, number: int) -> Cell | None:
        """The last one with this number, of those that have not ended if there are any; None if there is none."""
        found = [cell for cell in self if cell.number == number]
        return next(reversed([cell for cell in found if not cell.done.done()] or found), None)

    @property
    def background(self) -> list[Cell]:
        """Those that were started in the background."""
        return [cell for cell in self if cell.background]

    def trim(self) -> None:
        """Drop the oldest output, if there is too much of it."""
        with lock:  # those of cells that run grow
            recording.trim([cell.recording for cell in self], self.keep_output_bytes)
