"""The questions of a cell's ranks that wait for answers, and the cell's clock, which stands still meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from ddip.protocol.cell_messages import AskedQuestion


@dataclass(frozen=True)
class OpenQuestion:
    """A question of `rank` to the user."""

    rank: int
    asked: AskedQuestion


class OpenQuestions:
    """The open questions of one cell, from any thread.

    While a question is open, the user thinks, and the ranks that wait for the asking one are not to blame: no time of
    the cell passes.
    """

    def __init__(self) -> None:
        self._questions: list[OpenQuestion] = []
        self._in_ide: set[int] = set()
        """The ranks that have stopped in an IDE."""
        self._changed = threading.Condition()
        self._paused = 0.0
        self._paused_since: float | None = None

    def add(self, question: OpenQuestion) -> None:
        """Add a question that has arrived."""
        with self._changed:
            self._questions.append(question)
            self._update_clock()

    def take(self, question: OpenQuestion) -> bool:
        """Remove `question`, which is about to be answered; return False if it is no longer open."""
        with self._changed:
            if question not in self._questions:
                return False
            self._questions.remove(question)
            self._update_clock()
            return True

    def set_paused(self, rank: int, is_paused: bool) -> None:
        """Note that `rank` has stopped in an IDE, or that it continues."""
        with self._changed:
            (self._in_ide.add if is_paused else self._in_ide.discard)(rank)
            self._update_clock()

    def drop(self, ranks: Collection[int] | None = None) -> None:
        """Remove the questions of `ranks` (None: all), which no longer wait for answers or in an IDE."""
        with self._changed:
            self._in_ide.difference_update([*self._in_ide] if ranks is None else ranks)
            self._questions = [each for each in self._questions if ranks is not None and each.rank not in ranks]
            self._update_clock()

    def _update_clock(self) -> None:
        now = time.monotonic()
        if self.is_paused and self._paused_since is None:
            self._paused_since = now
        elif not self.is_paused and self._paused_since is not None:
            self._paused += now - self._paused_since
            self._paused_since = None
        self._changed.notify_all()

    def wait_for_change(self, seconds: float) -> None:
        """Wait until a question is added or removed, at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    @property
    def is_paused(self) -> bool:
        """True if the cell's clock stands still: a question is open, or a rank has stopped in an IDE."""
        return bool(self._questions or self._in_ide)

    @property
    def by_rank(self) -> dict[int, OpenQuestion]:
        """The first open question of each rank that has one, in rank order."""
        with self._changed:
            first: dict[int, OpenQuestion] = {}
            for question in sorted(self._questions, key=lambda each: each.rank):
                first.setdefault(question.rank, question)
            return first

    def __contains__(self, question: OpenQuestion) -> bool:
        return question in self._questions

    def __bool__(self) -> bool:
        return bool(self._questions)

    @property
    def paused_seconds(self) -> float:
        """Total time for which questions have been open so far, in seconds."""
        since = self._paused_since
        return self._paused + (0.0 if since is None else time.monotonic() - since)

    def now(self) -> float:
        """Return the time of the cell's clock, in seconds.

        It is ``time.monotonic()``, less the seconds for which questions were open.
        """
        return time.monotonic() - self.paused_seconds
