"""The GPU of this rank: is its work done, does its context live, and how much memory does it hold?

A collective of nccl returns at once. It waits for the other ranks on the GPU, and what the cell does next, such as
``backward()`` and ``step()``, queues up behind it. When the collective is aborted the queue goes on with garbage, and
nothing raises (torch's own words: "subsequent GPU operations might run on corrupted/incomplete data"). So:

    the cell goes well    its end is when the GPU has done all of it: until then it can be stopped and released
    it fails              a moment is given to what is queued, which may wait for ranks that never come
    a release             a rank whose GPU still works is interrupted before the abort, or its code would go on with
                          what the abort left, beyond the call that waits, such as ``.item()``; and the user is told
                          that its tensors may be wrong

The functions of torch's allocator hold its lock, and some wait for kernels meanwhile: only the main thread calls them.
On the CPU, all of this does nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

from ddip.protocol.reports import GpuFigures, GpuState
from ddip.rank import c10d

FAILED_SECONDS = 0.2
"""For which the GPU may go on after its cell has failed, before the notebook hears of that."""
LOOK_SECONDS = 0.001
"""How often the GPU is looked at meanwhile."""
SPARE_BYTES = 1 << 28
"""What a cache may keep after a cell. To empty it waits for kernels, and the next cell must allocate again."""


class Gpu:
    """What the rank knows of its GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.figures: GpuFigures | None = None
        """As the main thread noted them last, after a cell."""
        self.lost = ""
        """What a context said that can compute nothing any more: a new process is needed."""
        self.waits = False
        """For the GPU, at the end of a cell."""
        self.last: tuple[CodeType | None, int] = (None, 0)
        """Where the cell has begun its last collective: code and number of the line."""
        self._streams: dict[int, Any] = {}
        """Streams on which this cell has begun collectives."""
        self._begun = 0
        """Collectives before this cell."""

    @property
    def _used(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_initialized()

    def use(self, device: torch.device) -> None:
        """This is the rank's device."""
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self.note_figures()

    def begin_cell(self) -> None:
        """What is begun from here on is the cell's that has come."""
        self._streams.clear()
        self.last = (None, 0)
        self._begun = self.begun()

    def note_collective(self, code: CodeType | None, line: int) -> None:
        """A collective begins, at this line of a cell, on the stream that is current now."""
        if self._used:
            stream = torch.cuda.current_stream(self.device)
            self._streams[stream.cuda_stream] = stream
            self.last = (code, line)

    def begun(self) -> int:
        """How many collectives this rank has begun on its GPU, since its group was formed."""
        return c10d.begun_on_devices() if self._used else 0

    def is_under_way(self) -> bool:
        """Has this cell begun collectives that the GPU may not have ended? Does not block."""
        if self.begun() == self._begun:
            return False
        try:
            return not self._is_idle()
        except RuntimeError:  # the context is lost
            return True

    def _is_idle(self) -> bool:
        """Are the default stream, and those on which collectives were begun, done? Raises RuntimeError as they do."""
        streams = [torch.cuda.default_stream(self.device), *self._streams.values()]
        return all(stream.query() for stream in streams)

    def finish(self) -> None:
        """Wait until the GPU has done all that the cell has asked for; raises what that raises."""
        if self._used:
            with self._waiting():
                self._synchronize()

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def settle(self) -> GpuState:
        """After a cell, on the main thread: has the GPU done its work? Waits a moment if it has not."""
        if not self._used:
            return "done"
        state = self._settled()
        if state == "done":
            self.note_figures()
        return state

    def _settled(self) -> GpuState:
        until = time.monotonic() + FAILED_SECONDS
        failed = 0
        while True:
            try:
                if self._is_idle():
                    return "done"
            except RuntimeError as error:
                failed += 1
                if failed > 1:  # some errors are told once, and are over then; those of a lost context, always
                    self.lost = str(error).partition("\n")[0]
                    return "lost"
            if time.monotonic() > until:
                return "under way"
            time.sleep(LOOK_SECONDS)

    def note_figures(self) -> None:
        """On the main thread only."""
        self.figures = {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "total": torch.cuda.get_device_properties(self.device).total_memory,
        }

    def empty_caches(self) -> None:
        """Give back what torch's caches hold and nobody uses, if that is much and the GPU is idle; main thread only."""
        if not self._used or self.lost:
            return
        with contextlib.suppress(RuntimeError):
            if not self._is_idle():
                return
            if torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) > SPARE_BYTES:
                torch.cuda.empty_cache()
            if _spare_pinned() > SPARE_BYTES:
                torch._C._host_emptyCache()
            self.note_figures()


def _spare_pinned() -> int:
    """Bytes of pinned host memory that are cached and not in use; 0 where torch does not tell (before 2.8 or so)."""
    stats: dict[str, Any] = getattr(torch.cuda, "host_memory_stats", dict)()
    if not hasattr(torch._C, "_host_emptyCache"):
        return 0
    return int(stats.get("allocated_bytes.current", 0)) - int(stats.get("active_bytes.current", 0))


gpu = Gpu()


def finish() -> None:
    """See `Gpu.finish`; the last thing that a cell does, and it can be interrupted as the cell can."""
    gpu.finish()


def settle() -> GpuState:
    """See `Gpu.settle`."""
    return gpu.settle()
