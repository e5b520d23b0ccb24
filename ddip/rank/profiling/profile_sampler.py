"""Sample from a thread whether the main thread computes or is blocked while a profiled cell runs.

A sample is the main thread's CPU time plus the time that it has waited for a core (both on Linux only), because a
thread that waits for a core on a busy machine is not blocked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ddip.guard import Guard
from ddip.rank.profiling.timeline import Interval

PERIOD_SECONDS = 0.005
LOOK_EVERY = 10
"""Samples between two calls of `look`."""


class Sampler:
    """A thread that samples from `start` to `stop`, and calls `look` every `LOOK_EVERY` samples."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.samples: list[Interval] = []
        self._look = look
        self._guard = Guard("a sample of the profile is missing", shown=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddip-profile", daemon=True)
        self._clock: int | None = None
        self._schedstat = -1

    def start(self) -> None:
        """Take the first sample and start the thread; call this on the main thread."""
        if sys.platform == "linux":
            self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
            with contextlib.suppress(OSError):
                self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._sample()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and take the last sample."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._sample()
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    def _run(self) -> None:
        count = 0
        while not self._over.wait(PERIOD_SECONDS):
            with self._guard:
                self._sample()
                count += 1
                if count % LOOK_EVERY == 0:
                    self._look()

    def _sample(self) -> None:
        if self._clock is not None:
            self.samples.append((time.time_ns(), time.clock_gettime_ns(self._clock) + self._core_wait_ns()))

    def _core_wait_ns(self) -> int:
        """Return how long the main thread has waited for a core, in nanoseconds; 0 if that is unknown."""
        if self._schedstat < 0:
            return 0
        try:
            return int(os.pread(self._schedstat, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return 0


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
