"""Track the GPU of this rank: whether its work is done, whether its context is usable, how much memory it holds.

An NCCL collective returns at once. It waits for the other ranks on the GPU, and the cell's next operations, such as
``backward()`` and ``step()``, queue up behind it. If the collective is aborted, the queue continues with garbage and
nothing raises (torch: "subsequent GPU operations might run on corrupted/incomplete data"). Therefore:

    cell succeeds    It ends only when the GPU has done all its work. Until then it can be stopped and aborted.
    cell fails       Queued work gets a moment to finish; it may wait for ranks that never come.
    abort            A rank whose GPU is still busy is interrupted before the abort. Otherwise its code would continue
                     after the call that waits, such as ``.item()``, with the garbage that the abort left. The user is
                     told that its tensors may be wrong.

Calls into CUDA are made on the main thread, or in a thread that waits without the interpreter lock. The allocator takes
a lock that is held during waits for kernels, and a query of a stream can block behind a thread that waits for this
stream. If the control thread or the interpreter lock were blocked in such a call, the rank would miss an abort.

On a CPU device, none of this does anything.
"""

from __future__ import annotations

import contextlib
import threading
from types import CodeType
from typing import Any

import torch

from ddip.protocol.reports import GpuFigures, GpuState
from ddip.rank.runtime import c10d

FAILED_SECONDS = 0.2
"""Time that the GPU gets to finish after a failed cell, before the notebook is notified."""
LOOK_SECONDS = 0.02
"""Wait to find out whether the GPU is busy."""
SPARE_BYTES = 1 << 28
"""Unused memory that a cache may keep after a cell: emptying it waits for kernels, and costs the next cell time."""


class Gpu:
    """State of this rank's GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.state: GpuState = "done"
        """State of the work that cells have queued; under way while a cell runs."""
        self.figures: GpuFigures | None = None
        """Memory figures after the last cell, recorded by the main thread."""
        self.uuid = ""
        """UUID of the device in the driver; "" in torch releases that do not have it (before about 2.5)."""
        self.lost = ""
        """Error of a CUDA context that is no longer usable, which requires a new process."""
        self.waits = False
        """True while the main thread waits for the GPU at the end of a cell."""
        self.last: tuple[CodeType | None, int] = (None, 0)
        """Code and line number of the cell's last collective."""
        self._copy_stream: torch.cuda.Stream | None = None
        """Stream for copies that do not wait for queued work."""
        self._begun_in_python = 0
        """Collectives, sends and receives begun by Python code, as torch does not count some sends."""
        self.begun_before_cell = 0
        """Value of `begun` when this cell began."""

    @property
    def _is_used(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_initialized()

    def use(self, device: torch.device) -> None:
        """Make `device` the rank's device and, if it is a GPU, torch's current one.

        Call this on the main thread before the group forms: it creates the stream for copies.
        """
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # created now, as it could wait for a kernel later
            self._copy_stream = self._copy_stream or torch.cuda.Stream(device)
            self.note_figures()

    def begin_cell(self) -> None:
        """Count operations from here on as those of the cell that begins."""
        self.last, self.waits = (None, 0), False
        if self._is_used:
            self.state = "under way"
            self.begun_before_cell = self.begun()

    def copied(self, obj: Any) -> Any:
        """Return a copy on the CPU of a tensor or storage as it is now, without waiting for queued work.

        Not for the control thread: it may wait for other users of the driver, without the interpreter lock.
        """
        if isinstance(obj, torch.UntypedStorage):  # its own copy would hold the interpreter lock
            whole = torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj)
            return self.copied(whole).untyped_storage()
        if self._copy_stream is None or obj.device != self.device:
            return obj.cpu()
        with torch.cuda.stream(self._copy_stream):
            return obj.cpu()

    def note_begun(self, code: CodeType | None = None, line: int = 0) -> None:
        """Count a collective, send or receive that begins, and store the cell's line that began it."""
        self._begun_in_python += 1
        if code is not None:
            self.last = code, line

    def begun(self) -> int:
        """Return a counter of the collectives, sends and receives begun on the GPU; 0 while no GPU is used."""
        return self._begun_in_python + c10d.begun_on_devices() if self._is_used else 0

    def is_under_way(self) -> bool:
        """Return whether the cell has begun a collective and the GPU is not done, within `LOOK_SECONDS`."""
        return self.begun() != self.begun_before_cell and self._wait_for_state(LOOK_SECONDS) != "done"

    def finish(self) -> None:
        """Wait until the GPU has done all work of the cell; raises its errors."""
        if self._is_used:
            self.waits = True
            try:
                self._synchronize()
            finally:
                self.waits = False
            self.state = "done"

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def settle(self) -> GpuState:
        """Wait briefly for the GPU's work after a cell, and return its state; runs on the main thread."""
        if self.state != "done":
            self.state = self._wait_for_state(FAILED_SECONDS)
        if self.state == "done":
            self.note_figures()
        return self.state

    def find_lost(self) -> str:
        """Return the error of a context that an aborted collective has made unusable; empty if it is usable."""
        return self.lost if self._is_used and self._wait_for_state(FAILED_SECONDS) == "lost" else ""

    def _wait_for_state(self, seconds: float) -> GpuState:
        """Wait for the GPU for at most `seconds` and return its state; store the error of a lost context."""
        errors: list[RuntimeError] = []

        def synchronize_device() -> None:
            for _ in range(2):  # some errors are raised only once, those of a lost context always
                try:
                    self._synchronize()
                    errors.clear()
                    return
                except RuntimeError as error:
                    errors.append(error)

        thread = threading.Thread(target=synchronize_device, name="ddip-gpu", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            return "under way"
        if not errors:
            return "done"
        self.lost = str(errors[-1]).partition("\n")[0]
        return "lost"

    def note_figures(self) -> None:
        """Record UUID and memory figures; runs on the main thread only."""
        if self._is_used:
            properties = torch.cuda.get_device_properties(self.device)
            self.uuid = str(getattr(properties, "uuid", ""))
            self.figures = {
                "allocated": torch.cuda.memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
                "total": properties.total_memory,
            }

    def tidy(self, empty: bool) -> None:
        """Update the figures after a cell's garbage was collected; runs on the main thread.

        With `empty`, caches of torch are emptied if more than `SPARE_BYTES` in them are unused.
        """
        if not self._is_used or self.state != "done":
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
    """Return the bytes of unused cached pinned host memory; 0 in torch releases before about 2.8."""
    stats: dict[str, Any] = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(stats.get("allocated_bytes.current", 0)) - int(stats.get("active_bytes.current", 0))


def _empty_pinned() -> None:
    """Empty the cache of pinned host memory.

    The function is public since about torch 2.15; before, it was private or did not exist.
    """
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    getattr(torch._C, "_host_emptyCache", lambda: None)() if public is None else public()


gpu = Gpu()


def settle_gpu() -> GpuState:
    """Return the GPU's state after a cell (`Gpu.settle`)."""
    return gpu.settle()
