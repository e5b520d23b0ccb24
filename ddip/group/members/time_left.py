"""The remaining time of Slurm jobs, and warnings before they end."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta

from ddip.cluster.hosts import slurm
from ddip.guard import Guard
from ddip.output.area import notify

WARN_SECONDS = (600.0, 120.0)
"""Times before the end of a job at which the user is warned."""


class TimeLeft:
    """Remaining time of the job that ends first, with warnings when it is nearly over."""

    def __init__(self) -> None:
        self._jobs: tuple[int, ...] = ()
        self._warnings_given = 0
        """Number of WARN_SECONDS that have passed."""
        self._timer: threading.Timer | None = None
        self._guard = Guard("how long a job still has could not be found out")

    def follow(self, jobs: Iterable[int]) -> None:
        """Watch these jobs instead of the former ones, and print a warning before the first ends.

        If there are none, watch none.
        """
        if self._timer is not None:
            self._timer.cancel()
        former, self._jobs = self._jobs, tuple(jobs)
        if self._jobs != former:
            self._warnings_given = 0
        self._check_time(self._jobs)

    def _check_time(self, jobs: tuple[int, ...]) -> None:
        """Warn if the first job to end is near its end, and check again at the next warning time."""
        first = _first_to_end(jobs)
        if first is None or jobs is not self._jobs:
            return
        remaining, job = first
        passed = sum(remaining <= seconds for seconds in WARN_SECONDS)
        if passed > self._warnings_given:
            notify(f"{_remaining_text(remaining, job)}; save your work: the ranks end with the job")
        self._warnings_given = passed
        if passed < len(WARN_SECONDS):
            self._timer = threading.Timer(
                remaining - WARN_SECONDS[passed], self._guard.around(self._check_time), [jobs]
            )
            self._timer.daemon = True
            self._timer.start()

    def text(self) -> str:
        """Return the remaining time in words; empty if there is no limit."""
        first = _first_to_end(self._jobs)
        return "" if first is None else _remaining_text(*first)


def _first_to_end(jobs: Iterable[int]) -> tuple[float, int] | None:
    """Return the seconds until the first of `jobs` ends, and that job; None if no end is known."""
    return min(((remaining, job) for job in jobs if (remaining := slurm.seconds_left(job)) is not None), default=None)


def _remaining_text(remaining: float, job: int) -> str:
    return f"Slurm job {job} ends in {timedelta(seconds=int(remaining))}"
