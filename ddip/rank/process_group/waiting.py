"""Measure how long the main thread waits for other ranks: sampled while somebody watches.

The main thread waits if it sleeps, as Linux reports, in a function of torch.distributed or in a backward pass, at whose
end DDP waits for its collectives. A rank that sleeps elsewhere, in ``time.sleep`` or for its data loader, does not wait
for others. On a GPU nothing is measured: nccl's collectives wait there, and the main thread continues.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from pathlib import Path

import torch

from ddip.rank.process_group import aborted_tensors, collectives
from ddip.rank.runtime.gpu import gpu
from ddip.rank.runtime.housekeeping import cells

LONGEST = 3.0
"""Intervals that one sample counts for at most: the control thread may have been busy."""
TORCH = f"{Path(torch.__file__).parent}/"
WAITS = f"{TORCH}distributed/", f"{TORCH}autograd/", collectives.__file__, aborted_tensors.__file__
"""Folders and files of functions in which a thread that sleeps waits for other ranks."""
CALLS_OPERATORS = f"{TORCH}_ops.py"
"""The file whose functions call torch's operators for others."""


class Waiting:
    """The samples of this rank."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """For which the main thread has waited for others, of the seconds that were `looked` at."""
        self.looked = 0.0
        self._every = 1.0
        self._until = self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._random = random.Random()

    @property
    def is_known(self) -> bool:
        """Can it be measured whether this rank waits?"""
        return gpu.device.type == "cpu" and os.path.exists("/proc/self/stat")

    def watch(self, every: float, keep: float) -> None:
        """From the control thread, take a sample `every` so many seconds while a cell runs, for `keep` seconds."""
        self._every, self._until = every, time.monotonic() + keep
        if self.is_known and cells.busy and self._timer is None:
            self._last = time.monotonic()
            self._schedule()

    def _schedule(self) -> None:
        """Schedule the next sample at a moment with which no loop of the cell keeps in step."""
        seconds = self._every * (0.5 + self._random.random())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._sample)

    def _sample(self) -> None:
        self._timer = None
        now = time.monotonic()
        passed, self._last = min(now - self._last, LONGEST * self._every), now
        if now > self._until or not cells.busy:
            return
        self.looked += passed
        if _is_in_collective() and _sleeps():
            self.seconds += passed
        self._schedule()


def _is_in_collective() -> bool:
    """Is the innermost function of the main thread one that waits for other ranks?"""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(CALLS_OPERATORS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(WAITS)


def _sleeps() -> bool:
    """Does the main thread sleep? Raises no error: the process is there."""
    stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes()
    return stat.rpartition(b")")[2].split()[0] == b"S"  # state of proc(5)


waiting = Waiting()
