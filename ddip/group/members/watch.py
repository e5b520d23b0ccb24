"""Detect whether the ranks of a cell make progress, and interrupted ranks towards their end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ddip.group.members.members import Members
from ddip.protocol import on_rank

PULSE_SECONDS = 1.0
"""Interval at which silent ranks are asked whether they make progress."""
IDLE_CPU = 0.05
"""Share of a core below which a rank counts as standing still, like a thread that waits for a socket."""
CODE_SECONDS = 2.0
"""CPU time that a cell's own code may take to end after an interrupt; cleanup by Python and ddip has no limit."""
ENDING_SECONDS = 30.0
"""Time that an interrupted rank may take in all, even on a loaded machine."""


class Watch:
    """Stall detector of one cell: asks silent ranks whether they make progress."""

    def __init__(self, ranks: Members, stall_timeout: float) -> None:
        self._ranks = ranks
        self._stall_timeout = stall_timeout
        self._since = self._asked = time.monotonic()
        self._last: dict[int, tuple[int, float]] = {}
        self.is_still = False
        """True if the last call of `has_stalled` has asked the ranks, and none had made progress since then."""

    def note_progress(self) -> None:
        """Restart the stall timeout, as something has arrived from the ranks."""
        self._since = time.monotonic()

    def has_stalled(self, running: Sequence[int], now: float) -> bool:
        """Ask the ranks for progress if it is time; return whether none has made any during the stall timeout.

        Progress is a call of `note_progress`, another position in the code, or CPU time (of ranks on the CPU). The
        ranks are asked at most every `PULSE_SECONDS`; in between, the answer is False. Sets `is_still`.
        """
        self.is_still = False
        interval = min(PULSE_SECONDS, self._stall_timeout / 4)
        if now < self._since + interval or now < self._asked + interval:
            return False
        elapsed, self._asked = now - self._asked, now
        answers = self._ranks.call_on_control_channel(running, on_rank.main_thread_pulse())
        pulses: dict[int, tuple[int, float]] = {r: answer for r, answer in answers.items() if answer is not None}
        have_moved = any(_has_moved(self._last.get(rank), pulse, elapsed) for rank, pulse in pulses.items())
        self.is_still = not have_moved and len(pulses) == len(running)
        if have_moved:
            self.note_progress()
        self._last.update(pulses)
        return now >= self._since + self._stall_timeout


def _has_moved(before: tuple[int, float] | None, now: tuple[int, float], elapsed: float) -> bool:
    return before is None or before[0] != now[0] or now[1] - before[1] > IDLE_CPU * elapsed


@dataclass
class _Use:
    """CPU use of a rank and its child processes."""

    seconds: float
    """CPU time so far."""
    runs: bool
    """True if one of these processes is runnable."""


class StopProgress:
    """Progress of interrupted ranks towards their end.

    A rank with a twentieth of a core needs twenty times as long, so CPU time counts rather than elapsed time. After the
    end of a cell's own code, a rank may also sleep, until `asleep` seconds after this object was made.
    """

    def __init__(self, ranks: Members, running: Sequence[int], asleep: float = 0.0) -> None:
        self._ranks = ranks
        self._asleep_until = time.monotonic() + asleep
        self._until = time.monotonic() + ENDING_SECONDS
        self._looked = time.monotonic()
        self._first = self._last = self._cpu_use(running)
        self._phase: dict[int, str] = {}
        self._moved: set[int] = set()

    def find_moving(self, running: Sequence[int]) -> list[int]:
        """Return the `running` ranks that have made progress since the call before the last one.

        Call it repeatedly: each call compares with the one before. Returns none after ENDING_SECONDS.
        """
        now = time.monotonic()
        if now > self._until:
            return []
        elapsed, self._looked = now - self._looked, now
        answers = self._ranks.call_on_control_channel(running, on_rank.main_thread_phase())
        self._phase.update({rank: answer for rank, answer in answers.items() if answer is not None})
        uses = self._cpu_use(running)
        moved = {rank for rank, use in uses.items() if self._makes_progress(rank, use, elapsed)}
        self._last = {**self._last, **uses}
        moving, self._moved = moved | self._moved, moved
        return [rank for rank in running if rank in moving]

    def _makes_progress(self, rank: int, use: _Use, elapsed: float) -> bool:
        before = self._last.get(rank, use)
        phase = self._phase.get(rank, "code")
        if phase == "idle":  # the rank has finished, and its reply is on its way
            return True
        if not use.runs and use.seconds - before.seconds <= IDLE_CPU * elapsed:
            return phase == "ending" and time.monotonic() < self._asleep_until
        return phase == "ending" or use.seconds - self._first.get(rank, use).seconds < CODE_SECONDS

    def _cpu_use(self, ranks: Sequence[int]) -> dict[int, _Use]:
        return {rank: _Use(*use) for rank, use in self._ranks.cpu_uses(ranks).items()}
