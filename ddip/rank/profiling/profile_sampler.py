"""A thread that looks, while a profiled cell runs, whether the main thread computes or is blocked.

The CPU time of a thread is the system's (Linux); on a busy machine it waits for a core, too, which is not the same as
to be blocked.
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
"""Samples from one look at other things to the next."""


class Sampler:
    """Takes samples from `start` to `stop`, and calls `look` now and then."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.samples: list[Interval] = []
        self._look = look
        self._guard = Guard("a sample of the profile is missing", shown=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddip-profile", daemon=True)
        self._clock: int | None = None
        self._waits = -1

    def start(self) -> None:
        """On the main thread."""
        if sys.platform == "linux":
            self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
            with contextlib.suppress(OSError):
                self._waits = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._sample()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._sample()
        if self._waits >= 0:
            os.close(self._waits)
            self._waits = -1

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
            self.samples.append((time.time_ns(), time.clock_gettime_ns(self._clock) + self._waited()))

    def _waited(self) -> int:
        """How long the main thread has waited for a core, nanoseconds; 0 if the system does not tell."""
        if self._waits < 0:
            return 0
        try:
            return int(os.pread(self._waits, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return 0


def resident() -> int:
    """Memory of this process, bytes; 0 if it cannot be found out."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
