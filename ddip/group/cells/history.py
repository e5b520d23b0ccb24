"""The history of cells and their output, including those of groups that have ended."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddip.group.cells.cell import Cell
from ddip.output.cells import recording
from ddip.output.cells.router import lock
from ddip.protocol.objects.pickling import Pickled
from ddip.settings import DEFAULTS

KEPT = 500
"""Number of cells that the history keeps."""
SENT_BYTES = 16 << 20
"""Bytes of pushed values that the history keeps for an export, for all pushes together."""


@dataclass(frozen=True)
class Change:
    """A change of the ranks' state that no cell has made, such as a repair."""

    text: str
    """Description for the user."""
    resizes: bool = False
    """True if the number of ranks has changed."""


@dataclass(frozen=True)
class Sent:
    """Variables that the notebook has pushed."""

    at: float
    """Unix time in seconds."""
    number: int
    """Number of the notebook's cell that has pushed them."""
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    pickled: Mapping[str, Pickled] | None
    """Copies of the pickled values; None if they would exceed `SENT_BYTES`."""


class History:
    """The last 500 cells of one or more successive groups.

    Iterate over the history to get each `Cell`, oldest first.

    Parameters
    ----------
    keep_output_bytes
        Limit on the recorded output of all cells together, in bytes. Beyond it, ddip drops the oldest output; the cells
        stay in the history.
    keep_pushes
        True to keep copies of pushed variables, up to `SENT_BYTES`, for ``%dipexport``.
    """

    def __init__(self, keep_output_bytes: int = DEFAULTS.keep_output_bytes, keep_pushes: bool = False) -> None:
        self.keep_output_bytes = keep_output_bytes
        """Limit on the recorded output of all cells together, in bytes."""
        self._cells: collections.deque[Cell] = collections.deque()
        self.started = 0.0
        """Unix time of the last start of all ranks, in seconds."""
        self.is_cut = False
        """True if the history has dropped cells that ran since then."""
        self.changes: list[Change] = []
        """Changes of the ranks' state since then that no cell has made, oldest first."""
        self.sent: list[Sent] = []
        """Pushes since then, oldest first."""
        self._keep_pushes = keep_pushes
        self._sent_bytes = 0

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._cells))

    def add(self, cell: Cell) -> None:
        """Add `cell`; if the history is full, remove the oldest cell that has ended."""
        self._cells.append(cell)
        if len(self._cells) > KEPT:
            ended = next((old for old in self if old.done.done()), None)
            if ended is not None:
                self._cells.remove(ended)
                self.is_cut = self.is_cut or ended.submitted >= self.started

    def begin_session(self) -> None:
        """Note that all ranks start now, without any variables."""
        self.started, self.is_cut = time.time(), False
        self.changes, self.sent, self._sent_bytes = [], [], 0

    def note_push(self, number: int, pickled: Mapping[str, Pickled], ranks: Sequence[int]) -> None:
        """Note which variables the notebook's cell `number` has pushed to `ranks`, if they are kept at all.

        Copies them while all pushes together have at most `SENT_BYTES`.
        """
        if not self._keep_pushes:
            return
        kept, size = None, sum(value.size for value in pickled.values())
        if self._sent_bytes + size <= SENT_BYTES:
            self._sent_bytes += size
            kept = {name: Pickled.of(value.joined(), value.sizes) for name, value in pickled.items()}
        self.sent.append(Sent(time.time(), number, tuple(pickled), tuple(ranks), kept))

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
