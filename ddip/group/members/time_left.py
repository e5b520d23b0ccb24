"""How long jobs of Slurm's still have, and the lines that say so before their end."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta

from ddip.cluster.hosts import slurm
from ddip.guard import Guard
from ddip.output.area import notify

WARN_SECONDS = (600.0, 120.0)
"""Before the end of a job, when its user is told."""


class TimeLeft:
    """Of the job that ends first; the user is told when it is nearly over, at once if it is already."""

    def __init__(self) -> None:
        self._jobs: tuple[int, ...] = ()
        self._told = 0
        """How many of WARN_SECONDS have come."""
        self._timer: threading.Timer | None = None
        self._guard = Guard("how long a job still has could not be found out")

    def follow(self, jobs: Iterable[int]) -> None:
        """It is about these jobs from now on; none: it is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._jobs = tuple(jobs)
        self._look(self._jobs)

    def _look(self, jobs: tuple[int, ...]) -> None:
        """Tell, if the time has come; that of a job may be changed meanwhile."""
        first = _first(jobs)
        if first is None or jobs is not self._jobs:
            return
        left, job = first
        come = sum(left <= seconds for seconds in WARN_SECONDS)
        if come > self._told:
            notify(f"{_text(left, job)}; save what you need: its ranks end with it")
        self._told = come
        if come < len(WARN_SECONDS):
            self._timer = threading.Timer(left - WARN_SECONDS[come], self._guard.around(self._look), [jobs])
            self._timer.daemon = True
            self._timer.start()

    def text(self) -> str:
        """How much of it is left; empty where there is no end."""
        first = _first(self._jobs)
        return "" if first is None else _text(*first)


def _first(jobs: Iterable[int]) -> tuple[float, int] | None:
    """Seconds until the first end of a job, and which; None: no end is known."""
    return min(((left, job) for job in jobs if (left := slurm.seconds_left(job)) is not None), default=None)


def _text(left: float, job: int) -> str:
    return f"job {job} of Slurm ends in {timedelta(seconds=int(left))}"
