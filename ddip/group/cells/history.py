"""The history of cells and their output, including those of groups that have ended."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddip.group.cells.cell import Cell
from ddip.output.cells import recording
from ddip.output.cells.router import lock
from ddip.settings import DEFAULTS

KEPT = 500
"""Number of cells that the history keeps."""


@dataclass(frozen=True)
class Change:
    """A change of the ranks' state that no cell has made, such as a repair."""

    at: float
    """Unix time in seconds."""
    text: str
    """Description for the user."""
    pushed_by: int = 0
    """Number of the notebook's cell that has pushed variables; 0 for other changes."""
    resizes: bool = False
    """True if the number of ranks has changed."""


class History:
    """The last 500 cells of one or more successive groups.

    Iterate over the history to get each `Cell`, oldest first.

    Parameters
    ----------
    keep_output_bytes
        Limit on the recorded output of all cells together, in bytes. Beyond it, ddip drops the oldest output; the cells
        stay in the history.
    """

    def __init__(self, keep_output_bytes: int = DEFAULTS.keep_output_bytes) -> None:
        self.keep_output_bytes = keep_output_bytes
        """Limit on the recorded output of all cells together, in bytes."""
        self._cells: collections.deque[Cell] = collections.deque()
        self.changes: list[Change] = []
        """Changes of the ranks' state other than by cells, oldest first."""

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._cells))

    def add(self, cell: Cell) -> None:
        """Add `cell`; if the history is full, remove the oldest cell that has ended."""
        self._cells.append(cell)
        if len(self._cells) > KEPT:
            ended = next((old for old in self if old.done.done()), None)
            if ended is not None:
                self._cells.remove(ended)

    def note_change(self, text: str, *, pushed_by: int = 0, resizes: bool = False) -> None:
        """Note a change of the ranks' state that no cell has made; the parameters are as in `Change`."""
        self.changes.append(Change(time.time(), text, pushed_by, resizes))

    def remove(self, cell: Cell) -> None:
        """Remove a cell that will not run after all; raise ValueError if the history lacks it."""
        self._cells.remove(cell)

    def find(self, number: int) -> Cell | None:
        """Return the last cell with this number, preferring cells that have not ended; None if there is none."""
        found = [cell for cell in self if cell.number == number]
        return next(reversed([cell for cell in found if not cell.done.done()] or found), None)

    @property
    def background(self) -> list[Cell]:
        """The cells that were started in the background."""
        return [cell for cell in self if cell.background]

    def trim(self) -> None:
        """Drop the oldest recorded output beyond `keep_output_bytes`; all cells stay."""
        with lock:  # recordings of running cells still grow
            recording.trim_recordings([cell.recording for cell in self], self.keep_output_bytes)
