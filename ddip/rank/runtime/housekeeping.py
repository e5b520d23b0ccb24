"""What a rank does between cells, and what it tells about itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
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
from ddip.rank.runtime.gpu import gpu

_NO_WORKERS = SimpleNamespace(MP_STATUS_CHECK_INTERVAL=0.0)
"""In place of torch's module, in a torch that has another."""
ANSWER_LEAVES_WITHIN = 0.02
"""Seconds after which a cell's last message has left this process: the collection holds the GIL, so it must not begin
before the output thread has sent that message."""

REST, LONGEST_REST = 5, 0.5
"""How many times as long as the last collection took a rank rests before the next, and for how many seconds at most:
the cells of "Run All" are not to wait. What a cell imports makes it long; torch._dynamo, which the first optimizer
imports, 70 ms."""
WORKER_SECONDS = 0.05
"""What a worker of a data loader that is garbage gets to end by itself."""
TIDY_SECONDS = 1.0
"""That it may take to take apart what a cell has left, before that can be interrupted, and the rank is not idle."""


class Cells:
    """What this rank knows of its cells: is one running, how long did the last one take."""

    def __init__(self) -> None:
        self.collect = True
        self.threads: int | None = None
        """To be shared out at the next cell: OpenMP counts for each thread, so the main thread must do it."""
        self.collections = 0
        self.tidying_since: float | None = None
        """When it was begun to take apart what a cell has left; on ``time.monotonic``."""
        self.doing = ""
        """What ddip has asked for, while that is done."""
        self.seconds: float | None = None
        self._took = 0.0
        """That the last collection took, seconds."""
        self._started: float | None = None
        self._pending: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        """What the last cell raised, until its frames are let go."""

    @property
    def busy(self) -> bool:
        return self._started is not None

    @property
    def busy_for(self) -> float | None:
        """Seconds since the cell that runs, or what ddip has asked for, has begun."""
        started = self._started
        return None if started is None else time.perf_counter() - started

    def begin_request(self, doing: str) -> None:
        """What ddip has asked for begins."""
        self.doing, self._started = doing, time.perf_counter()

    def end_request(self) -> None:
        self.doing, self._started = "", None

    def begin(self) -> None:
        if self._pending:
            self._pending.cancel()
        if self._error is not None:  # the memory of the failed cell may be needed
            self.tidy()
        self._started = time.perf_counter()
        threads, self.threads = self.threads, None
        if threads is not None:
            _set_threads(threads)

    def end(self, error: BaseException | None) -> None:
        if self._started is not None:
            self.seconds = time.perf_counter() - self._started
        self._started = None
        self._error = error
        self._pending = asyncio.get_running_loop().call_later(rest_after(self._took), self.tidy)

    def tidy(self) -> None:
        """What is done when the cell's answer has left, or at the latest before the next.

        It runs finalizers of the cell's objects. One that waits for ever, for a lock that nobody opens, would hold up
        the next cell, so who stops that one ends this, too: `interrupt_tidying`.
        """
        with self.letting_go():
            self._tidy()

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """While objects are let go of whose finalizers may wait for ever: who stops the next cell ends that, too."""
        with contextlib.suppress(KeyboardInterrupt), self._interruptible():
            yield

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.tidying_since = time.monotonic()
        try:
            yield
        finally:
            self.tidying_since = None
            signal.signal(signal.SIGINT, before)

    @property
    def is_tidying_long(self) -> bool:
        """Has this rank taken apart for a while what its last cell has left? Something in there may wait for ever."""
        since = self.tidying_since
        return since is not None and time.monotonic() > since + TIDY_SECONDS

    def interrupt_tidying(self) -> None:
        """From the control thread: the next cell is stopped, which may wait for this."""
        if self.is_tidying_long:
            os.kill(os.getpid(), signal.SIGINT)

    def _tidy(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            _let_go(error)
            error = None  # its frames keep what they have told of their variables, from Python 3.12 on
        if self.collect:
            began = time.perf_counter()
            collect_garbage()
            freed.give_back()
            self._took = time.perf_counter() - began
            self.collections += 1
        gpu.tidy(empty=self.collect)


def rest_after(took: float) -> float:
    """Seconds from the end of a cell to the collection, if the last one took so many."""
    return max(ANSWER_LEAVES_WITHIN, min(REST * took, LONGEST_REST))


def collect_garbage() -> None:
    """With the workers of data loaders in it, which nobody can tell to end any more.

    They see that within 5 s, and torch waits for each of them as long. ``tqdm.auto`` leaves such a loader with each
    bar: it makes one more iterator than it uses.
    """
    children = multiprocessing.active_children()  # reaps what has ended since
    ended: list[BaseProcess] = []
    for child in children:
        vars(child)["terminate"] = partial(_terminate, child, ended)
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


def _terminate(worker: BaseProcess, ended: list[BaseProcess]) -> None:
    ended.append(worker)
    type(worker).terminate(worker)


def _remove_shared_memory(worker: BaseProcess) -> None:
    """What this worker has not passed on: torch makes a file, opens and removes it; it may have been ended between."""
    if get_sharing_strategy() == "file_descriptor":
        worker.join(TIDY_SECONDS)
        for path in Path("/dev/shm").glob(f"torch_{worker.pid}_*"):
            path.unlink(missing_ok=True)


def _set_threads(count: int) -> None:
    """What `OMP_NUM_THREADS` does at the start of a process."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)  # for what a cell starts
    with contextlib.suppress(Exception):  # no descriptor is left to look which libraries there are, or no open()
        threadpoolctl.threadpool_limits(count)
    torch.set_num_threads(count)


def attribute_of(error: BaseException, name: str, default: Any = None) -> Any:
    """An attribute of an exception whose class may do anything with attributes; `default` if it cannot be had."""
    try:
        return BaseException.__getattribute__(error, name)
    except Exception:
        return default


def _let_go(error: BaseException | None) -> None:
    """Let go of the frames of a failed cell: they hold its tensors, its data loaders, the sockets of its groups.

    They are cleared, since they are often part of a cycle, and what the collector takes apart cannot tidy up in order:
    torch waits 5 s for each worker of a data loader then. IPython and Python keep them for debuggers, which nobody can
    use on a rank; ``%tb`` goes with them.
    """
    known: set[int] = set()
    errors = [error]
    while errors:
        link = errors.pop()
        if link is not None and id(link) not in known:
            known.add(id(link))
            traceback.clear_frames(attribute_of(link, "__traceback__"))
            errors += [attribute_of(link, "__cause__"), attribute_of(link, "__context__")]
            errors += attribute_of(link, "exceptions", ())  # of a group
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


def hello() -> Hello:
    """This process, and what its torch can do."""
    import torch.distributed as dist

    self_tests.turn_off_failing()

    def available(backend: str) -> bool:
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
            name for name in dist.Backend.backend_list if name not in ("undefined", "fake") and available(name)
        ],
    }


def _resident() -> int | None:
    """Memory of this process, bytes; None if it has no descriptor left to look with."""
    if sys.platform == "linux":
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return None
    import psutil

    return int(psutil.Process().memory_info().rss)


def figures() -> Figures:
    """Memory (bytes), state and seconds of the last cell; safe while a cell runs."""
    return {
        "memory": _resident(),
        "gpu": gpu.figures,
        "busy": cells.busy,
        "busy_for": cells.busy_for,
        "doing": cells.doing,
        "seconds": cells.seconds,
        "collections": cells.collections,
    }
