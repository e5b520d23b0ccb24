"""Do the ranks of a cell make progress?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddip.ranks import Ranks

PULSE_SECONDS = 1.0
"""How often ranks that are silent are asked whether they move."""
IDLE_CPU = 0.05
"""Below this share of a core a rank is taken to stand still, as a thread that waits for a socket does."""


class Watch:
    """Asks the ranks of one cell, when they are silent."""

    def __init__(self, ranks: Ranks, patience: float) -> None:
        self._ranks = ranks
        self._patience = patience
        self._since = self._asked = time.monotonic()
        self._last: dict[int, tuple[int, float]] = {}

    def moved(self) -> None:
        """They do."""
        self._since = time.monotonic()

    def stands_still(self, running: Sequence[int], now: float) -> bool:
        """True when no rank has moved for as long as the user's patience goes: no message, no step, no CPU time."""
        interval = min(PULSE_SECONDS, self._patience / 4)
        if now < self._since + interval or now < self._asked + interval:
            return False
        passed, self._asked = now - self._asked, now
        answers = self._ranks.ask_beside(running, "stacks.pulse")
        pulses: dict[int, tuple[int, float]] = {r: answer for r, answer in answers.items() if answer is not None}
        if any(_has_moved(self._last.get(rank), pulse, passed) for rank, pulse in pulses.items()):
            self.moved()
        self._last.update(pulses)
        return now >= self._since + self._patience


def _has_moved(before: tuple[int, float] | None, now: tuple[int, float], passed: float) -> bool:
    return before is None or before[0] != now[0] or now[1] - before[1] > IDLE_CPU * passed
