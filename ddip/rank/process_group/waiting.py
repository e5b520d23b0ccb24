"""Measure how long the main thread waits for other ranks, by sampling it while a user watches.

The main thread waits if it sleeps, as Linux reports, in a function of torch.distributed, in DDP, which broadcasts
buffers, or in a backward pass, at whose end DDP waits for its collectives. A rank that sleeps elsewhere, in
``time.sleep`` or for its data loader, does not wait for others. On a GPU, nothing is measured: nccl's collectives wait
there, and the main thread continues.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ddip.protocol.reports import PendingWait
from ddip.rank.process_group import aborted_tensors, collectives
from ddip.rank.runtime import stacks
from ddip.rank.runtime.gpu import gpu
from ddip.rank.runtime.housekeeping import cells

MAX_INTERVALS = 3.0
"""Maximum number of intervals that one sample represents if the control thread was busy."""
TORCH = f"{Path(torch.__file__).parent}/"
WAIT_FILES = (
    f"{TORCH}distributed/",
    f"{TORCH}autograd/",
    f"{TORCH}nn/parallel/distributed.py",
    collectives.__file__,
    aborted_tensors.__file__,
)
"""Folders and files of functions in which a thread that sleeps waits for other ranks."""


class WaitSampler:
    """A sampler of the time that this rank waits for others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time for which the main thread has waited for others, of the time in `looked`."""
        self.looked = 0.0
        """Time that was sampled, seconds."""
        self._every = 1.0
        self._until = self._last_sample = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._random = random.Random()

    @property
    def is_known(self) -> bool:
        """True if waiting can be measured on this rank: it works on the CPU, on Linux."""
        return gpu.device.type == "cpu" and os.path.exists("/proc/self/stat")

    def watch(self, every: float, keep: float) -> None:
        """Sample each `every` seconds for `keep` seconds while a cell runs; call this on the control thread."""
        self._every, self._until = every, time.monotonic() + keep
        if self.is_known and cells.busy and self._timer is None:
            self._last_sample = time.monotonic()
            self._schedule()

    def _schedule(self) -> None:
        """Schedule the next sample after a random delay, so that samples do not align with a loop of the cell."""
        seconds = self._every * (0.5 + self._random.random())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._sample)

    def _sample(self) -> None:
        self._timer = None
        now = time.monotonic()
        passed, self._last_sample = min(now - self._last_sample, MAX_INTERVALS * self._every), now
        if now > self._until or not cells.busy:
            return
        self.looked += passed
        if _is_waiting_for_ranks() and _is_sleeping():
            self.seconds += passed
        self._schedule()


def pending_wait() -> PendingWait | None:
    """Return where the main thread waits for other ranks, and for what; None if it does not wait.

    The position is read before and after the rest, so that both belong together. Always None where waiting is not
    known (`WaitSampler.is_known`).
    """
    if not waiting.is_known:
        return None
    position, begun = stacks.main_thread_position(), collectives.awaited_operations(_awaited_work())
    is_waiting = _is_waiting_for_ranks() and _is_sleeping() and stacks.main_thread_position() == position
    return {"position": position, "begun": begun} if is_waiting else None


def _is_waiting_for_ranks() -> bool:
    """Return whether the innermost function of the main thread is one that waits for other ranks."""
    frame = _innermost_frame()
    while frame is not None and frame.f_code.co_filename.endswith(stacks.OPERATOR_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(WAIT_FILES)


def _awaited_work() -> Any:
    """Return the work whose ``wait`` the main thread is in; None if it is in another function."""
    frame = _innermost_frame()
    is_in_wait = frame is not None and frame.f_code.co_filename == aborted_tensors.__file__
    return frame.f_locals.get("work") if frame is not None and is_in_wait else None


def _innermost_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_sleeping() -> bool:
    """Return whether the main thread sleeps, as Linux reports."""
    stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes()
    return stat.rpartition(b")")[2].split()[0] == b"S"  # the state field of proc(5)


waiting = WaitSampler()
