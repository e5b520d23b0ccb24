"""Count the collectives, sends and receives that this rank has begun in each group.

torch counts collectives, including those that C++ begins (DDP's reducer, functional collectives). Most backends count
sends and receives as well, so ddip subtracts them. Threads may use a group at the same time. Therefore no number is
derived from two readings of torch's counter, except for a batch and a monitored barrier; if another thread begins
something meanwhile, the group is no longer reported.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch.distributed as dist

from ddip.protocol.reports import GroupUse, MayBegin
from ddip.rank.runtime import c10d, libraries

MAX_LINES = 1000
"""Number of latest collectives per group whose lines are kept."""
TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"

_tallies: dict[int, Tally] = {}
"""By the id of the group. A tally does not keep its group alive, or the group's connections would stay open."""


class Tally:
    """The operations that this rank has begun in one group; lists have one item per backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        key = id(group)
        self.group = weakref.ref(group, lambda _: _tallies.pop(key, None))
        self.devices, self._backends = c10d.counting_backends(group)
        self.messages: collections.Counter[str] = collections.Counter()
        """Sends and receives by direction, such as ``to 1``."""
        self.batches: dict[int, Window] = {}
        """Batches that threads are assembling, by the thread's identifier."""
        self.is_unsure = False
        """Two threads were counted together, so the numbers are not reported."""
        self.lines: collections.deque[tuple[list[int], CodeType | None, int]] = collections.deque(maxlen=MAX_LINES)
        """Per collective: the number begun before it, and code and number of its line."""
        self.last: tuple[int, str, list[Any], int] | None = None
        """The last collective begun by Python code: number, operation, shapes and dtypes, time."""
        self.work: Callable[[], Any] = nothing
        """Reference to the work that torch returned for it."""
        self._lock = threading.Lock()
        self._apart = [0] * len(self._backends)
        """Operations that torch has counted and that are not collectives, without single sends and receives."""
        self._sends = 0
        self._per_send: list[int] | None = None
        """How much torch adds to its count per send or receive: the least seen, as another thread may add to it."""
        self._entries: collections.Counter[int] = collections.Counter()
        """Operations begun by Python code, by the thread's identifier."""
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """Threads other than the main one that have begun operations."""
        self._by_threads = False
        self._main = 0
        """Collectives that Python code has begun in the main thread."""

    def counted(self) -> list[int]:
        """Return torch's counters."""
        return [backend._get_sequence_number_for_group() for backend in self._backends]

    def begun(self) -> list[int]:
        """Return how many collectives have been begun, for each of `devices`."""
        counted = self.counted()
        if self._sends or any(self._apart):
            each = self._per_send or [1] * len(counted)
            return [n - apart - self._sends * k for n, apart, k in zip(counted, self._apart, each, strict=True)]
        return counted

    def enter(self, is_collective: bool) -> None:
        """Note that the calling thread begins an operation."""
        ident = threading.get_ident()
        if ident != threading.main_thread().ident:
            thread = threading.current_thread()
            self._threads.add(thread)
            self._by_threads |= not isinstance(thread, threading._DummyThread)  # such as autograd's
        elif is_collective:
            self._main += 1
        self._entries[ident] += 1

    def others(self) -> int:
        """Return how many operations threads other than the calling one have begun."""
        ident = threading.get_ident()
        return sum(n for thread, n in list(self._entries.items()) if thread != ident)

    def begin_send(self) -> list[int]:
        """Count a send or receive; returns torch's counters before it."""
        with self._lock:  # counted first: a rank that is counting seems to be behind, never ahead
            self._sends += 1
        return self.counted()

    def end_send(self, before: list[int], failed: bool) -> None:
        """Learn from torch's counters how a send or receive is counted."""
        added = [n - m for n, m in zip(self.counted(), before, strict=True)]
        with self._lock:
            if failed:
                self._sends -= 1
                self._apart = [n + m for n, m in zip(self._apart, added, strict=True)]
            elif self._per_send is None:
                self._per_send = added
            else:
                self._per_send = [min(pair) for pair in zip(self._per_send, added, strict=True)]

    def set_apart(self, window: Window, collectives: int = 0) -> None:
        """Count only so many collectives within `window`, whatever torch has counted."""
        now, self.is_unsure = self.counted(), self.is_unsure or self.others() != window.others
        with self._lock:
            for i, (n, m) in enumerate(zip(now, window.counted, strict=True)):
                self._apart[i] += max(0, n - m - collectives)

    def use(self, device: int, ranks: list[int] | None, may_begin: MayBegin) -> GroupUse:
        """Return the report for the backend with the index `device`; see `threads_may_begin`.

        The threads are looked at first: collectives that one of them has begun before its end are counted.
        """
        if self._threads:
            living = sys._current_frames()
            may_begin = "yes" if any(thread.ident in living for thread in list(self._threads)) else may_begin
        begun = self.begun()
        return {
            "collectives": begun[device],
            "messages": dict(self.messages),
            "ranks": ranks,
            "by_main": sum(begun) == self._main,
            "by_threads": self._by_threads,
            "may_begin": may_begin,
        }


class Window:
    """The moment from which torch's counters are compared with later ones."""

    def __init__(self, tally: Tally) -> None:
        self.others = tally.others()
        self.counted = tally.counted()
        self.has_sends = False


def nothing() -> None:
    """Stand in for a weak reference."""


def tally_of(group: dist.ProcessGroup) -> Tally:
    """Return the tally of `group`."""
    tally = _tallies.get(id(group))
    if tally is None or tally.group() is not group:
        tally = _tallies[id(group)] = Tally(group)
    return tally


def threads_may_begin() -> MayBegin:
    """Judge by their stacks if threads that cells have started may begin collectives, in whatever group.

    Threads of libraries (tqdm's monitor, idle workers of an executor) may not, those within ``torch.distributed`` may.
    """
    answer: MayBegin = "no"
    threads = [thread for thread in threading.enumerate() if getattr(thread, "ddip_cell", None)]
    frames = sys._current_frames() if threads else {}
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            path = frame.f_code.co_filename
            if TORCH_DISTRIBUTED in path:
                return "yes"
            if not libraries.is_librarys(path):
                answer = "maybe"
            frame = frame.f_back
    return answer
