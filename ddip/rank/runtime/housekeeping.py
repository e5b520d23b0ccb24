"""Clean up between cells, and report the identity and figures of this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

import threadpoolctl
import torch
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import ExecutionResult
from torch.multiprocessing import get_sharing_strategy

from ddip.protocol import compat, compat_ipython, compat_torch, switches
from ddip.protocol.on_rank import VERSION
from ddip.protocol.reports import Figures, Hello
from ddip.rank.native import freed, self_tests
from ddip.rank.runtime import process_settings
from ddip.rank.runtime.gpu import gpu

_NO_WORKERS = SimpleNamespace(MP_STATUS_CHECK_INTERVAL=0.0)
"""Placeholder for `torch.utils.data._utils` in torch releases where that differs."""
ANSWER_LEAVES_WITHIN = 0.02
"""Seconds after which a cell's last message has left this process. A collection holds the GIL, so it must not begin
before the output thread has sent that message."""

REST, LONGEST_REST = 5, 0.5
"""Pause before a collection as a multiple of the last one's duration, and its limit in seconds, so that the cells of
"Run All" do not wait. Imports make a collection long: 70 ms for torch._dynamo, which the first optimizer imports."""
WORKER_SECONDS = 0.05
"""Time for the worker of a garbage data loader to end by itself, before it is terminated."""
TIDY_SECONDS = 1.0
"""Duration of a cleanup after which it can be interrupted, and the rank no longer counts as idle."""


class Cells:
    """Timing of this rank's cells and requests, and the cleanup after them."""

    def __init__(self) -> None:
        self.collect = True
        self.ranks_per_core = 1.0
        """Number of ranks of this host that share a core; at least 1."""
        self.threads: int | None = None
        """Thread count of the group; a cell may set another one. It is set once, when the next cell begins, on the main
        thread because OpenMP settings are per thread."""
        self._former_threads: int | None = None
        """Thread count that was set last."""
        self.collections = 0
        self.tidying_since: float | None = None
        """Start of the running cleanup on ``time.monotonic``; None if none runs."""
        self.doing = ""
        """Name of the ddip request that runs; "" for a cell."""
        self.seconds: float | None = None
        """Duration of the last cell."""
        self._collection_seconds = 0.0
        """Duration of the last collection, seconds."""
        self._started: float | None = None
        self._pending: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        """Exception of the last cell, until the cleanup frees its frames."""
        self.keep_frames = False
        """True to keep the frames of a failed cell for the debugger until the next cell begins."""
        self.kept_error: BaseException | None = None
        """Exception of the last cell whose frames are kept."""

    @property
    def busy(self) -> bool:
        """True while a cell or a ddip request runs."""
        return self._started is not None

    @property
    def busy_for(self) -> float | None:
        """The seconds since the running cell or ddip request began; None if none runs."""
        started = self._started
        return None if started is None else time.perf_counter() - started

    def begin_request(self, doing: str) -> None:
        """Mark the start of a ddip request; `doing` is its name in messages."""
        self.doing, self._started = doing, time.perf_counter()

    def end_request(self) -> None:
        """Mark the end of a ddip request."""
        self.doing, self._started = "", None

    def begin(self, debugs: bool = False) -> None:
        """Mark the start of a cell; a pending cleanup is done now if the last cell failed, otherwise dropped.

        `debugs`: the cell debugs the kept error; otherwise its frames are freed now.
        """
        if self._pending:
            self._pending.cancel()
        self.tidy_error()  # the memory of the failed cell may be needed
        if self.kept_error is not None and not debugs:
            self._free_kept_error()
        self._started = time.perf_counter()
        if self.threads is not None and self.threads != self._former_threads:
            self._former_threads = self.threads
            _set_threads(self.threads)

    @property
    def has_kept_error(self) -> bool:
        """True if the frames of the last cell's error are kept, or will be once the cleanup after it has run."""
        return self.kept_error is not None or (self._error is not None and self._keeps_frames())

    def _free_kept_error(self) -> None:
        error, self.kept_error = self.kept_error, None
        _free_frames(error)

    def _keeps_frames(self) -> bool:
        """Return whether to keep the frames of a failed cell: if `keep_frames` is set, or after ``%pdb on``."""
        return self.keep_frames or bool(getattr(get_ipython(), "call_pdb", False))

    def end(self, error: BaseException | None) -> None:
        """Mark the end of a cell that may have raised `error`, and schedule the cleanup."""
        if self._started is not None:
            self.seconds = time.perf_counter() - self._started
        self._started = None
        self._error = error
        self._pending = asyncio.get_running_loop().call_later(self._rest_seconds(), self.tidy)

    def _rest_seconds(self) -> float:
        return rest_after(self._collection_seconds, self.ranks_per_core)

    def tidy(self) -> None:
        """Clean up after a cell: free the frames of its error, collect garbage, empty caches.

        It runs when the cell's answer has left, and after a failed cell at the latest before the next one. Finalizers
        may wait indefinitely for a lock and delay the next cell; stopping that cell ends them (`interrupt_tidying`).
        """
        with self.letting_go():
            self._tidy_now()

    def tidy_error(self) -> None:
        """Clean up now if the last cell failed and this was not done yet: its frames hold tensors."""
        if self._error is not None:
            self.tidy()

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """Make finalizers that run in this context interruptible: stopping the next cell ends one that hangs."""
        with contextlib.suppress(KeyboardInterrupt), self._allow_interrupts():
            yield

    @contextlib.contextmanager
    def _allow_interrupts(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.tidying_since = time.monotonic()
        try:
            yield
        finally:
            self.tidying_since = None
            signal.signal(signal.SIGINT, before)

    @property
    def is_tidying_long(self) -> bool:
        """True if a cleanup has run for over `TIDY_SECONDS`, so that a finalizer may hang."""
        since = self.tidying_since
        return since is not None and time.monotonic() > since + TIDY_SECONDS

    def interrupt_tidying(self) -> None:
        """Interrupt a long cleanup, for which a stopped cell may wait; runs on the control thread."""
        if self.is_tidying_long:
            os.kill(os.getpid(), signal.SIGINT)

    def _tidy_now(self) -> None:
        error, self._error = self._error, None
        if error is not None and self._keeps_frames():
            self._free_kept_error()
            self.kept_error = error
        elif error is not None:
            _free_frames(error)
            error = None  # since Python 3.12, its frames keep the variables that were read from them
        if self.collect:
            began = time.perf_counter()
            collect_garbage()
            freed.give_back()
            self._collection_seconds = time.perf_counter() - began
            self.collections += 1
        gpu.tidy(empty=self.collect)


def rest_after(took: float, ranks_per_core: float = 1.0) -> float:
    """Return the seconds from a cell's end to its collection, if the last collection `took` that many.

    If ranks share cores, the answers of all of them must have left first.
    """
    return max(ANSWER_LEAVES_WITHIN * ranks_per_core, min(REST * took, LONGEST_REST))


def collect_garbage() -> None:
    """Collect garbage, and shorten torch's wait for the workers of data loaders in it.

    A worker may need 5 s to notice that it is orphaned, and torch waits up to 5 s for each before it terminates it. The
    shared memory of terminated workers is removed. ``tqdm.auto`` leaves such a loader with each bar, because it creates
    one more iterator than it uses.
    """
    children = multiprocessing.active_children()  # also reaps ended ones
    ended: list[BaseProcess] = []
    for child in children:
        vars(child)["terminate"] = partial(_terminate_worker, child, ended)
    workers: Any = torch.utils.data._utils if compat_torch.is_on(compat_torch.WORKERS) else _NO_WORKERS
    patience, workers.MP_STATUS_CHECK_INTERVAL = workers.MP_STATUS_CHECK_INTERVAL, WORKER_SECONDS
    try:
        gc.collect()
    finally:
        workers.MP_STATUS_CHECK_INTERVAL = patience
        for child in children:
            vars(child).pop("terminate", None)
        for child in ended:
            _remove_shared_memory(child)


def _terminate_worker(worker: BaseProcess, ended: list[BaseProcess]) -> None:
    ended.append(worker)
    type(worker).terminate(worker)


def _remove_shared_memory(worker: BaseProcess) -> None:
    """Remove shared memory files that a terminated worker has created and not yet unlinked."""
    if get_sharing_strategy() == "file_descriptor":
        worker.join(TIDY_SECONDS)
        for path in Path("/dev/shm").glob(f"torch_{worker.pid}_*"):
            path.unlink(missing_ok=True)


def _set_threads(count: int) -> None:
    """Set the number of threads as `OMP_NUM_THREADS` does at the start of a process."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        process_settings.set_own_variable(name, str(count))  # for processes that a cell starts
    with contextlib.suppress(Exception):  # no descriptor is left to find the libraries, or the cell replaced open()
        threadpoolctl.threadpool_limits(count)
    torch.set_num_threads(count)
    process_settings.note_threads(count)


def attribute_of(error: BaseException, name: str, default: Any = None) -> Any:
    """Return an attribute of an exception, bypassing its class's ``__getattribute__`` and ``__getattr__``.

    Returns `default` if there is no such attribute, or a property of the class fails.
    """
    try:
        return BaseException.__getattribute__(error, name)
    except Exception:
        return default


def _clear_frames(found: TracebackType | None) -> None:
    """Delete the variables of all frames in a traceback that have ended."""
    while found is not None:
        if not _is_suspended(found.tb_frame):
            with contextlib.suppress(RuntimeError):  # it still runs
                found.tb_frame.clear()
        found = found.tb_next


def _is_suspended(frame: FrameType) -> bool:
    """Return whether a generator or coroutine may continue at `frame`.

    Clearing the frame would close the generator; since Python 3.13, it raises RuntimeError instead, and this returns
    False. In older versions, a frame refers to its code only once it has ended; until then, its generator does.
    """
    can_continue = frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    if not can_continue or sys.version_info >= (3, 13):
        return False
    return not any(found is frame.f_code for found in gc.get_referents(frame))


def _free_frames(error: BaseException | None) -> None:
    """Free the frames of a failed cell, which hold its tensors, data loaders and groups' sockets.

    Frames are cleared explicitly, because they are often part of a cycle. The collector destroys a cycle in any order,
    and torch then waits 5 s for each worker of a data loader. ``%tb`` stops working, and so does ``%debug``, unless the
    user has asked for it (`Cells.keep_frames`).
    """
    seen: set[int] = set()
    errors = [error]
    while errors:
        link = errors.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            _clear_frames(attribute_of(link, "__traceback__"))
            errors += [attribute_of(link, "__cause__"), attribute_of(link, "__context__")]
            errors += attribute_of(link, "exceptions", ())  # of an exception group
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell = get_ipython()
    if shell is not None:
        shell.last_execution_result = ExecutionResult(None)  # %xdel looks at its result
        shell.InteractiveTB.tb = None
        shell.forget()  # type: ignore[attr-defined]


cells = Cells()


def set_collect(collect: bool) -> None:
    """Turn the collection after each cell on or off."""
    cells.collect = collect


def has_kept_error() -> bool:
    """Return whether the error of the last cell can be debugged, as its frames are kept."""
    return cells.has_kept_error


def make_hello() -> Hello:
    """Return versions, host, PID and capabilities of this process; turns off native mechanisms that fail."""
    import torch.distributed as dist

    self_tests.turn_off_failing()

    def is_available(backend: str) -> bool:
        return bool(getattr(dist, f"is_{backend}_available", lambda: True)())

    return {
        "version": VERSION,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda is not None or torch.version.hip is not None,
        "off": compat.find_off(compat_torch.NAMES, compat_ipython.RANK_KERNEL, compat_ipython.RANK_SHELL),
        "native_off": switches.find_off(),
        "backends": [
            name for name in dist.Backend.backend_list if name not in ("undefined", "fake") and is_available(name)
        ],
    }


def _resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None if no descriptor is left to read it."""
    if sys.platform == "linux":
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return None
    import psutil

    return int(psutil.Process().memory_info().rss)


def rank_figures() -> Figures:
    """Return memory (bytes), state, and seconds of the last cell; may be called while a cell runs."""
    return {
        "memory": _resident_bytes(),
        "gpu": gpu.figures,
        "busy": cells.busy,
        "busy_for": cells.busy_for,
        "doing": cells.doing,
        "seconds": cells.seconds,
        "collections": cells.collections,
    }
