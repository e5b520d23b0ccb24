"""Do the ranks of a cell make progress? And those that were told to stop, towards their end?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ddip.group.members.members import Members
from ddip.protocol import on_rank

PULSE_SECONDS = 1.0
"""How often ranks that are silent are asked whether they move."""
IDLE_CPU = 0.05
"""Below this share of a core a rank is taken to stand still, as a thread that waits for a socket does."""
CODE_SECONDS = 2.0
"""CPU time that a cell's own code may take to end after an interrupt; Python's and ours behind it may take any."""
ENDING_SECONDS = 30.0
"""How long all that may take, however loaded the machine is."""


class Watch:
    """Asks the ranks of one cell, when they are silent."""

    def __init__(self, ranks: Members, stall_timeout: float) -> None:
        self._ranks = ranks
        self._stall_timeout = stall_timeout
        self._since = self._asked = time.monotonic()
        self._last: dict[int, tuple[int, float]] = {}

    def moved(self) -> None:
        """Something has come from the ranks: the stall timeout begins anew."""
        self._since = time.monotonic()

    def stands_still(self, running: Sequence[int], now: float) -> bool:
        """True when no rank has moved for as long as the stall timeout: no message, no step, no CPU time."""
        interval = min(PULSE_SECONDS, self._stall_timeout / 4)
        if now < self._since + interval or now < self._asked + interval:
            return False
        passed, self._asked = now - self._asked, now
        answers = self._ranks.call_on_control_channel(running, on_rank.pulse())
        pulses: dict[int, tuple[int, float]] = {r: answer for r, answer in answers.items() if answer is not None}
        if any(_has_moved(self._last.get(rank), pulse, passed) for rank, pulse in pulses.items()):
            self.moved()
        self._last.update(pulses)
        return now >= self._since + self._stall_timeout


def _has_moved(before: tuple[int, float] | None, now: tuple[int, float], passed: float) -> bool:
    return before is None or before[0] != now[0] or now[1] - before[1] > IDLE_CPU * passed


@dataclass
class _Use:
    """What a rank and the processes that it has started use of the machine."""

    seconds: float
    """CPU time so far."""
    runs: bool
    """Would one of them go on if it had a core?"""


class Ending:
    """Ranks that were told to stop: which of them are still on their way to their end?

    A rank that has a twentieth of a core needs twenty times as long, so CPU time is what counts, not the time. Behind a
    cell's own code it may also sleep, for `asleep` seconds.
    """

    def __init__(self, ranks: Members, running: Sequence[int], asleep: float = 0.0) -> None:
        self._ranks = ranks
        self._asleep_until = time.monotonic() + asleep
        self._until = time.monotonic() + ENDING_SECONDS
        self._looked = time.monotonic()
        self._first = self._last = self._uses(running)
        self._phase: dict[int, str] = {}
        self._moved: set[int] = set()

    def moving(self, running: Sequence[int]) -> list[int]:
        """Those of `running` that are; ask every so often. One is left out when it has stood still twice in a row."""
        now = time.monotonic()
        if now > self._until:
            return []
        passed, self._looked = now - self._looked, now
        answers = self._ranks.call_on_control_channel(running, on_rank.phase())
        self._phase.update({rank: answer for rank, answer in answers.items() if answer is not None})
        uses = self._uses(running)
        moved = {rank for rank, use in uses.items() if self._moves(rank, use, passed)}
        self._last = {**self._last, **uses}
        moving, self._moved = moved | self._moved, moved
        return [rank for rank in running if rank in moving]

    def _moves(self, rank: int, use: _Use, passed: float) -> bool:
        before = self._last.get(rank, use)
        phase = self._phase.get(rank, "code")
        if phase == "idle":  # its answer is under way
            return True
        if not use.runs and use.seconds - before.seconds <= IDLE_CPU * passed:
            return phase == "ending" and time.monotonic() < self._asleep_until
        return phase == "ending" or use.seconds - self._first.get(rank, use).seconds < CODE_SECONDS

    def _uses(self, ranks: Sequence[int]) -> dict[int, _Use]:
        return {rank: _Use(*use) for rank, use in self._ranks.uses(ranks).items()}
