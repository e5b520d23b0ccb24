"""The GPU of this rank: is its work done, does its context live, and how much memory does it hold?

A collective of nccl returns at once. It waits for the other ranks on the GPU, and what the cell does next, such as
``backward()`` and ``step()``, queues up behind it. When the collective is aborted the queue goes on with garbage, and
nothing raises (torch's own words: "subsequent GPU operations might run on corrupted/incomplete data"). So:

    the cell goes well    its end is when the GPU has done all of it: until then it can be stopped and released
    it fails              a moment is given to what is queued, which may wait for ranks that never come
    a release             a rank whose GPU still works is interrupted before the abort, or its code would go on with
                          what the abort left, beyond the call that waits, such as ``.item()``; and the user is told
                          that its tensors may be wrong

What asks CUDA is called on the main thread, or waits in a thread of its own, without the interpreter: the allocator's
functions take a lock that is held while somebody waits for kernels, and to ask whether a stream is done can wait for
whoever waits for that stream, with the interpreter held, in which no release would be heard.

On the CPU, all of this does nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

from ddip.protocol.reports import GpuFigures, GpuState
from ddip.rank.runtime import c10d

FAILED_SECONDS = 0.2
"""For which the GPU may go on after its cell has failed, before the notebook hears of that."""
LOOK_SECONDS = 0.02
"""For which it is waited for, to see whether it works."""
SPARE_BYTES = 1 << 28
"""What a cache may keep after a cell. To empty it waits for kernels, and the next cell must allocate again."""


class Gpu:
    """What the rank knows of its GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.state: GpuState = "done"
        """Of what cells have asked for; under way while one runs."""
        self.figures: GpuFigures | None = None
        """As the main thread noted them last, after a cell."""
        self.uuid = ""
        """By which the driver knows it; empty where torch does not tell (before 2.5 or so)."""
        self.lost = ""
        """What a context said that can compute nothing any more: a new process is needed."""
        self.waits = False
        """For the GPU, at the end of a cell."""
        self.last: tuple[CodeType | None, int] = (None, 0)
        """Where the cell has begun its last collective: code and number of the line."""
        self._side: torch.cuda.Stream | None = None
        """Of copies that wait for nothing that the GPU has to do."""
        self._noted = 0
        """Collectives, sends and receives that Python code has begun; torch counts them, but for some sends."""
        self._before = 0
        """What had been begun before this cell."""

    @property
    def _used(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_initialized()

    def use(self, device: torch.device) -> None:
        """This is the rank's device."""
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._side = self._side or torch.cuda.Stream(device)  # now: later, to make one may wait for a kernel
            self.note_figures()

    def begin_cell(self) -> None:
        """What is begun from here on is the cell's that has come."""
        self.last, self.waits = (None, 0), False
        if self._used:
            self.state = "under way"
            self._before = self.begun()

    def copied(self, obj: Any) -> Any:
        """A tensor or storage of an accelerator, copied to the CPU as it is now; what is queued is not waited for.

        On any thread but the control thread: it may wait for whoever keeps the driver busy, without the interpreter.
        """
        if isinstance(obj, torch.UntypedStorage):  # which would be copied with the interpreter held
            whole = torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj)
            return self.copied(whole).untyped_storage()
        if self._side is None or obj.device != self.device:
            return obj.cpu()
        with torch.cuda.stream(self._side):
            return obj.cpu()

    def note_begun(self, code: CodeType | None = None, line: int = 0) -> None:
        """A collective begins, at this line of a cell, or a send or receive."""
        self._noted += 1
        if code is not None:
            self.last = code, line

    def begun(self) -> int:
        """A number that grows with each collective, send and receive that this rank begins in its group."""
        return self._noted + c10d.begun_on_devices() if self._used else 0

    def is_under_way(self) -> bool:
        """Has this cell begun something with other ranks, and is the GPU not done? Takes LOOK_SECONDS at most."""
        return self.begun() != self._before and self._look(LOOK_SECONDS) != "done"

    def finish(self) -> None:
        """Wait until the GPU has done all that the cell has asked for; raises what that raises."""
        if self._used:
            with self._waiting():
                self._synchronize()
            self.state = "done"

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
        if self.state != "done":
            self.state = self._look(FAILED_SECONDS)
        if self.state == "done":
            self.note_figures()
        return self.state

    def _look(self, seconds: float) -> GpuState:
        """Is the GPU done, within so many seconds?"""
        errors: list[RuntimeError] = []

        def wait() -> None:
            for _ in range(2):  # some errors are told once, and are over then; those of a lost context, always
                try:
                    self._synchronize()
                    errors.clear()
                    return
                except RuntimeError as error:
                    errors.append(error)

        thread = threading.Thread(target=wait, name="ddip-gpu", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            return "under way"
        if not errors:
            return "done"
        self.lost = str(errors[-1]).partition("\n")[0]
        return "lost"

    def note_figures(self) -> None:
        """On the main thread only."""
        if self._used:
            properties = torch.cuda.get_device_properties(self.device)
            self.uuid = str(getattr(properties, "uuid", ""))
            self.figures = {
                "allocated": torch.cuda.memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
                "total": properties.total_memory,
            }

    def tidy(self, empty: bool) -> None:
        """When a cell's garbage is gone, on the main thread; `empty`: give back what torch's caches hold and nobody
        uses, if that is much."""
        if not self._used or self.state != "done":
            return
        with contextlib.suppress(RuntimeError):
            if empty:
                spare = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
                if spare > SPARE_BYTES:
                    torch.cuda.empty_cache()
                if _spare_pinned() > SPARE_BYTES:
                    _empty_pinned()
            self.note_figures()


def _spare_pinned() -> int:
    """Bytes of pinned host memory that are cached and not in use; 0 where torch does not tell (before 2.8 or so)."""
    stats: dict[str, Any] = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(stats.get("allocated_bytes.current", 0)) - int(stats.get("active_bytes.current", 0))


def _empty_pinned() -> None:
    """Public from torch 2.15 or so; before that, private or not there."""
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    getattr(torch._C, "_host_emptyCache", lambda: None)() if public is None else public()


gpu = Gpu()


def settle() -> GpuState:
    """See `Gpu.settle`."""
    return gpu.settle()
