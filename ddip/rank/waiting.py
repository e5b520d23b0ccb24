"""How long the main thread of this rank waits for other ranks; looked at now and then, while somebody watches.

    main thread      sleeps in all_reduce, in work.wait(), at the end of DDP's backward pass (C++), in wait_tensor ...
    gloo's threads   do the collectives; one of them waits for a message of another rank

Both are read from the system (``lost_waits.py``), so nothing of torch's is wrapped, and no code of the user's runs more
slowly. A rank that sleeps for another reason, in ``time.sleep`` or for its data loader, does not wait for others.

nccl's collectives wait on the GPU, and the main thread goes on: of a rank on a GPU it is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from ddip.rank import lost_waits
from ddip.rank.gpu import gpu
from ddip.rank.housekeeping import cells

WORKER = "pt_gloo_runloop"
"""What torch calls the threads that do gloo's collectives."""
LONGEST = 3.0
"""Of how many intervals a look tells at most: the control thread may have been busy."""


class Waiting:
    """What has been seen so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """For which the main thread has waited for others, of those that were `looked` at."""
        self.looked = 0.0
        self._every = 1.0
        self._until = self._last = 0.0
        self._threads: Sequence[str] = ()
        """All there were when it was looked for gloo's."""
        self._waits: lost_waits.Waits | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._random = random.Random()

    @property
    def is_known(self) -> bool:
        """Can it be told whether this rank waits?"""
        return gpu.device.type == "cpu" and lost_waits.is_known()

    def watch(self, every: float, keep: float) -> None:
        """From the control thread: look `every` so many seconds, as long as a cell runs, for `keep` seconds."""
        self._every, self._until = every, time.monotonic() + keep
        if self.is_known and cells.busy:
            self._find_workers()
            if self._timer is None and self._waits is not None:
                self._last = time.monotonic()
                self._look_again()

    def _find_workers(self) -> None:
        """Gloo's threads, where there are other threads than before."""
        threads = os.listdir("/proc/self/task")
        if threads != self._threads or self._waits is None:
            self._close()
            self._threads = threads
            with contextlib.suppress(OSError):  # no descriptor is left, or one has ended just now
                self._waits = lost_waits.Waits([thread for thread in threads if _name(thread) == WORKER])

    def _close(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            waits.close()

    def _look_again(self) -> None:
        """At a moment that no loop of the cell's keeps in step with."""
        seconds = self._every * (0.5 + self._random.random())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        passed, self._last = min(now - self._last, LONGEST * self._every), now
        if now > self._until or not cells.busy or self._waits is None:
            self._close()
            return
        self.looked += passed
        if self._waits.look():
            self.seconds += passed
        self._look_again()


def _name(thread: str) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    return ""


waiting = Waiting()
