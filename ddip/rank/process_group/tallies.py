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
import time
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import thread as executors
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ddip.protocol.reports import Digests, GroupUse, MayBegin
from ddip.rank.runtime import c10d, libraries

Place: TypeAlias = tuple[CodeType | None, int, bool]
"""Code and number of the line of a cell or script that begins a collective, None and 0 if none does; True if torch
itself begins it, on tensors that the user never sees."""
MAX_LINES = 1000
"""Number of latest collectives per group whose lines are kept."""
MAX_WORKS = 20 * MAX_LINES
"""Number of latest works of collectives that are known."""
MAX_UNSIGNED = 100
"""Number of collectives whose signatures are computed together."""
TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_RUN_JOB, _RUN_LOOP = executors._WorkItem.run.__code__, asyncio.BaseEventLoop.run_forever.__code__
"""Functions of the standard library that run a job of a thread pool, and an asyncio loop."""
_LIKELIEST_FIRST: tuple[MayBegin, ...] = "yes", "maybe"

Signature: TypeAlias = tuple[str, tuple[tuple[int | None, Any, tuple[int, ...]], ...], tuple[Any, ...]]
"""What must be equal on all ranks of a group for their n-th collectives to match: the operation, number of elements
(None if it may differ), dtype and strides of each tensor, and reduction and root's rank in the group, if any."""
REDUCING = {dist.AllreduceCoalescedOptions, dist.AllreduceOptions, dist.ReduceOptions, dist.ReduceScatterOptions}
"""Options of collectives with a ``reduceOp``."""
ROOTED = {dist.BroadcastOptions, dist.GatherOptions, dist.ReduceOptions, dist.ScatterOptions}
"""Options of collectives with a ``rootRank``."""
_signatures: dict[Signature, tuple[int, Signature]] = {}
"""Checksums of signatures, with the signatures themselves, of which equal ones share one object."""
_tallies: dict[int, Tally] = {}
"""Tallies by the id of the group. They hold weak references, since a group that is kept alive stays connected."""
_messages: weakref.WeakKeyDictionary[Any, tuple[Tally, str, int]] = weakref.WeakKeyDictionary()
"""Works of sends and receives: the group's tally, the direction, and the number of such operations begun until then,
this one included."""


class Collective(NamedTuple):
    """A collective that Python code has begun."""

    before: list[int]
    """Number of collectives begun before it, for each of the tally's devices."""
    code: CodeType | None
    line: int
    """Code and number of the line of a cell or script that began it; None and 0 if none did."""
    op: str
    inputs: list[tuple[torch.Size, torch.dtype, tuple[int, ...]]]
    """Shape, dtype and strides of each tensor that it reads; strides () if contiguous, or if sizes need not agree."""
    sizes_agree: bool
    """True if its inputs must have the same sizes on all ranks."""
    options: tuple[Any, ...]
    """Options on which ranks must agree: the reduction and the root's rank in the group, if any."""
    at: int
    """Time, as in ``time.time_ns``."""

    @property
    def number(self) -> int:
        """Number in its group, from 1."""
        return _number_after(self.before)

    def signature(self) -> Signature:
        """Return what must be equal on all ranks."""
        agreed = self.inputs if self.sizes_agree else self.inputs[: self.op != "scatter"]  # only the root has inputs
        kinds = tuple(
            [
                (shape.numel(), dtype, strides) if self.sizes_agree else (None, dtype, ())
                for shape, dtype, strides in agreed
            ]
        )
        return self.op, kinds, self.options


def _number_after(before: list[int]) -> int:
    """Return the number of the collective that follows those begun on each device."""
    return max(before, default=0) + 1


def _agreed_options(options: Any) -> tuple[Any, ...]:
    """Return the options on which ranks must agree; `options` are torch's, or a collective's last tensors."""
    kind = type(options)
    reduction = (options.reduceOp.op,) if kind in REDUCING else ()
    return (*reduction, options.rootRank) if kind in ROOTED else reduction


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, () if it is contiguous.

    Backends send memory as it is, whatever the strides.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    return tuple([stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1])


class Tally:
    """A count of the operations that this rank has begun in one group; lists have one item per backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        key = id(group)
        self.group = weakref.ref(group, lambda _: _tallies.pop(key, None))
        self.devices, backends = c10d.counting_backends(group)
        self._counters = [backend._get_sequence_number_for_group for backend in backends]
        self.messages: collections.Counter[str] = collections.Counter()
        """Sends and receives by direction, such as ``to 1``."""
        self.batches: dict[int, Window] = {}
        """Batches that threads are assembling, by the thread's identifier."""
        self.is_unsure = False
        """True if operations of two threads cannot be told apart, so that the numbers are not reported."""
        self.last: Collective | None = None
        """The last collective begun by Python code."""
        self._works: collections.deque[tuple[weakref.ref[Any], list[int]]] = collections.deque(maxlen=MAX_WORKS)
        """Works that torch returned for the latest collectives, from the oldest that still exists, with
        `Collective.before` of each."""
        self._unsigned: collections.deque[Collective] = collections.deque()
        """The latest collectives, whose signatures `_sign` has not added yet."""
        self._lines: collections.deque[tuple[list[int], CodeType | None, int, Signature, Digests]] = collections.deque(
            maxlen=MAX_LINES
        )
        """Per collective begun by Python code: the number begun before it, code and number of its line, signature, and
        the digests with it."""
        self._signing = threading.Lock()
        self._lock = threading.Lock()
        self._excluded = [0] * len(backends)
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
        self._main = threading.main_thread().ident
        self._begun_by_main = 0
        """Collectives that Python code has begun in the main thread."""

    def counted(self) -> list[int]:
        """Return torch's counters."""
        return [count() for count in self._counters]

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
        if ident != self._main:
            thread = threading.current_thread()
            self._threads.add(thread)
            self._by_threads |= not isinstance(thread, threading._DummyThread)  # such as autograd's
        elif is_collective:
            self._begun_by_main += 1
        self._entries[ident] += 1

    def begin(
        self,
        op: str,
        place: Place,
        tensors: Sequence[torch.Tensor] = (),
        sizes_agree: bool = False,
        options: Any = None,
    ) -> Collective:
        """Note that Python code begins the collective `op` on `tensors` at `place`.

        `sizes_agree` as in `Collective`; `options`: torch's, or any other last argument. Only what costs little is done
        here, because it takes several times as long as in a loop: the process has usually just been switched to.
        """
        before = self.begun()
        self.enter(is_collective=True)
        code, line, _ = place
        inputs = [(tensor.shape, tensor.dtype, _strides_of(tensor) if sizes_agree else ()) for tensor in tensors]
        agreed = _agreed_options(options)
        self.last = collective = Collective(before, code, line, op, inputs, sizes_agree, agreed, time.time_ns())
        self._unsigned.append(collective)
        if len(self._unsigned) >= MAX_UNSIGNED:
            self._sign(wait=False)
        return collective

    def note_work(self, work: Any, collective: Collective) -> None:
        """Note that torch returned `work` for a collective."""
        try:
            while self._works[0][0]() is None:
                self._works.popleft()
        except IndexError:  # there is none
            pass
        try:
            self._works.append((weakref.ref(work), collective.before))
        except TypeError:  # a third-party backend's work
            return

    def number_of(self, work: Any) -> int | None:
        """Return the number of the collective for which torch returned `work`; None if it is not known."""
        return next((_number_after(before) for ref, before in reversed(list(self._works)) if ref() is work), None)

    def is_last_done(self) -> bool:
        """Return whether the last collective begun by Python code is complete, or its work no longer exists."""
        last, latest = self.last, list(self._works)[-1:]
        works = [ref() for ref, before in latest if last is not None and before is last.before]
        return all(work is None or work.is_completed() for work in works)

    def _sign(self, wait: bool = True) -> None:
        """Add lines, with signatures and digests, for the collectives that have none.

        For many at once, this takes a fraction of the time that it takes after each switch to this process. Without
        `wait`, it does nothing while another thread does it, or the code that a signal handler has interrupted.
        """
        if not wait and self._signing.locked():
            return
        with self._signing:
            for _ in range(len(self._unsigned)):
                collective = self._unsigned[0]
                if not self._lines or self._lines[-1][0] is not collective.before:  # else an interrupt came in between
                    self._sign_one(collective)
                self._unsigned.popleft()

    def _sign_one(self, collective: Collective) -> None:
        signature, before = collective.signature(), collective.before
        known = _signatures.get(signature)
        if known is None:
            if len(_signatures) >= MAX_LINES:
                _signatures.clear()
            # a checksum is equal in all processes, unlike the hash of a text
            known = _signatures[signature] = zlib.crc32(repr(signature).encode()), signature
        number, digest, positions = self._lines[-1][-1] if self._lines else (0, 0, 0)
        digest, positions = (digest * 31 + known[0]) % 2**61, (positions * 31 + hash(tuple(before))) % 2**61
        self._lines.append((before, collective.code, collective.line, known[1], (number + 1, digest, positions)))

    def digests(self) -> Digests:
        """Return the digests of all collectives begun by Python code."""
        self._sign()
        return self._lines[-1][-1] if self._lines else (0, 0, 0)

    def line(self, device: int, number: int) -> tuple[CodeType | None, int]:
        """Return code and line that began the collective after the first `number`.

        None and 0 if they are not known. `device`: the index of one of `devices`.
        """
        self._sign()
        found = ((code, line) for begun, code, line, *_ in reversed(list(self._lines)) if begun[device] == number)
        return next(found, (None, 0))

    def lines_before(self, device: int, number: int) -> list[tuple[CodeType | None, int, Signature, Digests]]:
        """Return what Python code began among the first `number` collectives on backend number `device`.

        At most the last MAX_LINES: code and number of its line, signature, and the digests with it.
        """
        self._sign()
        return [
            (code, line, signature, digests)
            for begun, code, line, signature, digests in list(self._lines)
            if begun[device] < number
        ]

    def knows_all(self) -> bool:
        """Return whether `lines_before` has all collectives begun by Python code."""
        return self.digests()[0] == len(self._lines)

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
        by_python, digest, positions = self.digests()
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


def note_message(work: Any, tally: Tally, direction: str, number: int) -> None:
    """Note that `work` belongs to send or receive `number` of this `direction` in `tally`."""
    with contextlib.suppress(TypeError):  # a third-party backend's work, or None
        _messages[work] = tally, direction, number


def operation_of(work: Any) -> tuple[Tally, str, int] | None:
    """Return the tally, direction and number of the operation of `work`; None if it is not known.

    The direction of a collective is "".
    """
    if work in _messages:
        return _messages[work]
    numbers = ((tally, "", tally.number_of(work)) for tally in list(_tallies.values()))
    return next(((tally, way, number) for tally, way, number in numbers if number is not None), None)


def timeout_of_message(work: Any) -> timedelta | None:
    """Return the timeout of the group of a gloo send or receive; None for any other `work`.

    Without one, gloo's ``wait`` would use the short timeout with which the group was formed (`c10d.setup_timeout`).
    """
    if not _messages or work not in _messages:
        return None
    group = _messages[work][0].group()
    return None if group is None else c10d.gloo_timeout(group)


class Window:
    """A snapshot of a tally's counters, for comparison with later ones."""

    def __init__(self, tally: Tally) -> None:
        self.begun_by_others = tally.begun_by_others()
        self.counted = tally.counted()
        self.has_sends = False
        """True once the batch of this window has a send or receive."""


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
