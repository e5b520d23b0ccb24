"""Count the collectives, sends and receives that this rank has begun in each group.

torch counts collectives, including those that C++ begins (DDP's reducer, functional collectives). Most backends also
count sends and receives, so ddip subtracts them. Threads may use a group at the same time. Therefore no number is
derived from two readings of torch's counter, except for a batch and a monitored barrier; if another thread begins an
operation in between, the group is no longer reported.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import thread as executors
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch.distributed as dist

from ddip.protocol.reports import Digests, GroupUse, MayBegin
from ddip.rank.runtime import c10d, libraries

MAX_LINES = 1000
"""Number of latest collectives per group whose lines are kept."""
TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_RUN_JOB, _RUN_LOOP = executors._WorkItem.run.__code__, asyncio.BaseEventLoop.run_forever.__code__
"""Functions of the standard library that run a job of a thread pool, and an asyncio loop."""
_LIKELIEST_FIRST: tuple[MayBegin, ...] = "yes", "maybe"

Signature: TypeAlias = tuple[str, tuple[tuple[int | None, Any, tuple[int, ...]], ...], tuple[Any, ...]]
"""What must be equal on all ranks of a group for their n-th collectives to match: the operation, number of elements
(None if it may differ), dtype and strides of each tensor, and reduction and root's rank in the group, if any."""
_signatures: dict[Signature, tuple[int, Signature]] = {}
"""Checksums of signatures, with the signatures themselves, of which equal ones share one object."""
_tallies: dict[int, Tally] = {}
"""Tallies by the id of the group. They hold weak references, since a group that is kept alive stays connected."""
works: weakref.WeakKeyDictionary[Any, tuple[Tally, str, int]] = weakref.WeakKeyDictionary()
"""Works that torch has returned: the group's tally, the direction of a send or receive, "" for a collective, and the
number of such operations begun until then, this one included."""


class Tally:
    """A count of the operations that this rank has begun in one group; lists have one item per backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        key = id(group)
        self.group = weakref.ref(group, lambda _: _tallies.pop(key, None))
        self.devices, self._backends = c10d.counting_backends(group)
        self.messages: collections.Counter[str] = collections.Counter()
        """Sends and receives by direction, such as ``to 1``."""
        self.batches: dict[int, Window] = {}
        """Batches that threads are assembling, by the thread's identifier."""
        self.is_unsure = False
        """True if operations of two threads cannot be told apart, so that the numbers are not reported."""
        self.lines: collections.deque[tuple[list[int], CodeType | None, int, Signature, Digests]] = collections.deque(
            maxlen=MAX_LINES
        )
        """Per collective begun by Python code: the number begun before it, code and number of its line, signature, and
        the `digests` with it."""
        self.digests: Digests = (0, 0, 0)
        self.last: tuple[int, str, list[Any], int] | None = None
        """The last collective begun by Python code: number, operation, shapes and dtypes, time."""
        self.work: Callable[[], Any] = no_work
        """Weak reference to the work that torch returned for that collective."""
        self._lock = threading.Lock()
        self._excluded = [0] * len(self._backends)
        """Operations that torch counts but that are not collectives, without sends and receives outside of batches."""
        self._sends = 0
        """Sends and receives outside of batches."""
        self._count_per_send: list[int] | None = None
        """Amount by which torch's counters grow per send or receive: the minimum, since other threads may add to it."""
        self._entries: collections.Counter[int] = collections.Counter()
        """Operations begun by Python code, by the thread's identifier."""
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """Threads other than the main one that have begun operations."""
        self._by_threads = False
        """True if a thread started by Python, other than the main one, has begun operations."""
        self._begun_by_main = 0
        """Collectives that Python code has begun in the main thread."""

    def counted(self) -> list[int]:
        """Return torch's counters."""
        return [backend._get_sequence_number_for_group() for backend in self._backends]

    def begun(self) -> list[int]:
        """Return the number of collectives begun, for each of `devices`."""
        counted = self.counted()
        if self._sends or any(self._excluded):
            per_send = self._count_per_send or [1] * len(counted)
            numbers = zip(counted, self._excluded, per_send, strict=True)
            return [count - excluded - self._sends * weight for count, excluded, weight in numbers]
        return counted

    def enter(self, is_collective: bool) -> None:
        """Note that the current thread begins an operation, a collective or else a send or receive."""
        ident = threading.get_ident()
        if ident != threading.main_thread().ident:
            thread = threading.current_thread()
            self._threads.add(thread)
            self._by_threads |= not isinstance(thread, threading._DummyThread)  # such as autograd's
        elif is_collective:
            self._begun_by_main += 1
        self._entries[ident] += 1

    def sign(self, signature: Signature, before: list[int], code: CodeType | None, line: int) -> None:
        """Add the `signature` of a collective to `digests` and `lines`.

        `code` and `line`: where it was begun; `before`: the numbers of collectives begun before it, by device.
        """
        known = _signatures.get(signature)
        if known is None:
            if len(_signatures) >= MAX_LINES:
                _signatures.clear()
            # a checksum is equal in all processes, unlike the hash of a text
            known = _signatures[signature] = zlib.crc32(repr(signature).encode()), signature
        number, digest, positions = self.digests
        digest, positions = (digest * 31 + known[0]) % 2**61, (positions * 31 + hash(tuple(before))) % 2**61
        self.digests = number + 1, digest, positions
        self.lines.append((before, code, line, known[1], self.digests))  # equal signatures share one object

    def lines_before(self, device: int, number: int) -> list[tuple[CodeType | None, int, Signature, Digests]]:
        """Return the `lines` that are among the first `number` collectives on backend number `device`."""
        return [
            (code, line, signature, digests)
            for begun, code, line, signature, digests in list(self.lines)
            if begun[device] < number
        ]

    def begun_by_others(self) -> int:
        """Return the number of operations begun by threads other than the current one."""
        ident = threading.get_ident()
        return sum(n for thread, n in list(self._entries.items()) if thread != ident)

    def begin_send(self) -> list[int]:
        """Count a send or receive; return torch's counters before it."""
        with self._lock:  # counted first, so that a rank may for a moment seem to be behind, but never ahead
            self._sends += 1
        return self.counted()

    def end_send(self, before: list[int], failed: bool) -> None:
        """Record by how much a send or receive has increased torch's counters; exclude a failed one.

        `before` is the result of `begin_send`.
        """
        added = [n - m for n, m in zip(self.counted(), before, strict=True)]
        with self._lock:
            if failed:
                self._sends -= 1
                self._excluded = [n + m for n, m in zip(self._excluded, added, strict=True)]
            elif self._count_per_send is None:
                self._count_per_send = added
            else:
                self._count_per_send = [min(pair) for pair in zip(self._count_per_send, added, strict=True)]

    def exclude(self, window: Window, collectives: int = 0) -> None:
        """Exclude what torch has counted since `window` was opened, except for this number of `collectives`."""
        now, self.is_unsure = self.counted(), self.is_unsure or self.begun_by_others() != window.begun_by_others
        with self._lock:
            for i, (n, m) in enumerate(zip(now, window.counted, strict=True)):
                self._excluded[i] += max(0, n - m - collectives)

    def use(self, device: int, ranks: list[int] | None, may_begin: MayBegin) -> GroupUse:
        """Return the numbers of operations on backend number `device` of this group, which has `ranks` (None: all).

        `may_begin` is the result of `threads_may_begin`; a running thread that has begun operations makes it "yes".
        Threads are checked before torch's counters are read, so that the collectives of a thread that ends are counted.
        """
        if self._threads:
            running = sys._current_frames()
            may_begin = "yes" if any(thread.ident in running for thread in list(self._threads)) else may_begin
        begun = self.begun()
        by_python, digest, positions = self.digests
        return {
            "collectives": begun[device],
            "messages": dict(self.messages),
            "ranks": ranks,
            "by_python": by_python,
            "digest": digest,
            "positions": positions,
            "by_main": sum(begun) == self._begun_by_main,
            "by_threads": self._by_threads,
            "may_begin": may_begin,
        }


def note_work(work: Any, tally: Tally, direction: str, number: int) -> None:
    """Note that `work` belongs to operation `number` of this `direction` in `tally`; "" for a collective."""
    with contextlib.suppress(TypeError):  # a third-party backend's work, or None
        works[work] = tally, direction, number


def timeout_of_message(work: Any) -> timedelta | None:
    """Return the timeout of the group of a gloo send or receive; None for any other `work`.

    Without one, gloo's ``wait`` would use the short timeout with which the group was formed (`c10d.setup_timeout`).
    """
    tally, direction, _ = works.get(work, (None, "", 0))
    group = tally.group() if tally is not None and direction else None
    return None if group is None else c10d.gloo_timeout(group)


class Window:
    """A snapshot of a tally's counters, for comparison with later ones."""

    def __init__(self, tally: Tally) -> None:
        self.begun_by_others = tally.begun_by_others()
        self.counted = tally.counted()
        self.has_sends = False
        """True once the batch of this window has a send or receive."""


def no_work() -> None:
    """Return None, as a weak reference to a work that no longer exists does."""


def tally_of(group: dist.ProcessGroup) -> Tally:
    """Return the tally of `group`, creating it if needed."""
    tally = _tallies.get(id(group))
    if tally is None or tally.group() is not group:
        tally = _tallies[id(group)] = Tally(group)
    return tally


def threads_may_begin() -> MayBegin:
    """Judge by their stacks whether threads that cells have started may begin collectives in any group.

    A thread in ``torch.distributed`` will ("yes"), and one in a user's code may ("maybe"), like a timer, a job of an
    executor, which may have queued others, and an asyncio task of any thread. One in libraries only, such as tqdm's
    monitor or an idle worker of an executor, will not ("no").
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    answers = {_judge_thread(threads.get(ident), frame) for ident, frame in sys._current_frames().items()}
    return next((answer for answer in _LIKELIEST_FIRST if answer in answers), "no")


def _judge_thread(thread: threading.Thread | None, frame: FrameType | None) -> MayBegin:
    """Judge by its innermost `frame` whether one thread may begin collectives.

    `thread` is None for a thread of C++, which may run callbacks.
    """
    is_from_c = thread is None or isinstance(thread, threading._DummyThread)
    is_from_cell = is_from_c or bool(getattr(thread, "ddip_cell", None))
    answer: MayBegin = "maybe" if is_from_cell and isinstance(thread, threading.Timer) else "no"
    while frame is not None:
        code = frame.f_code
        if is_from_cell and TORCH_DISTRIBUTED in code.co_filename:
            return "yes"
        if is_from_cell and (code is _RUN_JOB or not libraries.is_librarys(code.co_filename)):
            answer = "maybe"
        if code is _RUN_LOOP and _has_users_task(frame.f_locals["self"]):
            answer = "maybe"
        frame = frame.f_back
    return answer


def _has_users_task(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether `loop` has an unfinished task whose code is not a library's."""
    codes = (getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks(loop))
    return any(code is not None and not libraries.is_librarys(code.co_filename) for code in codes)
