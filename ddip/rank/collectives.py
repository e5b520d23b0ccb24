"""How many collectives this rank has begun in each of its groups, and in which lines.

torch counts them, also those that C++ begins (DDP's reducer, functional collectives). But most backends count sends and
receives as well, of which the ranks of a group may begin different numbers. So the methods of ``ProcessGroup`` that
Python code calls are wrapped: sends and receives are counted apart, and of collectives the line is noted. They are
wrapped in the class, since programs hold functions of ``torch.distributed`` under names of their own. A collective
takes a few microseconds longer. The wrappers are called ``wrapper``, a name that is left out where a rank tells in
which function it is.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from types import CodeType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ddip.protocol.rank_spec import DEFAULT_GROUP
from ddip.protocol.reports import Begun, LineBegun
from ddip.rank import c10d, libraries, stacks
from ddip.rank.flight_recorder import Entry
from ddip.rank.gpu import gpu

Method: TypeAlias = Callable[..., Any]
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
LINES = 1000
"""Of so many collectives of a group, the last ones, the line is known."""

_tallies: dict[int, _Tally] = {}
"""By the id of the group; none of them keeps its group alive, or the group's connections would stay open."""


class _Tally:
    """What this rank has begun in one group; lists have one item for each backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        key = id(group)
        self.group = weakref.ref(group, lambda _: _tallies.pop(key, None))
        self.devices, self._backends = c10d.counting_backends(group)
        self.apart = [0] * len(self._backends)
        """Sends and receives, as far as torch counts them with the collectives."""
        self.batch: list[int] | None = None
        """What torch had counted when the batch began that is being put together."""
        self.is_batch_apart = False
        """Is it one of sends and receives?"""
        self.lines: collections.deque[tuple[list[int], CodeType | None, int, int]] = collections.deque(maxlen=LINES)
        """Collectives begun before this one, code and number of its line, and its thread."""
        self.last: tuple[int, str, list[Any], int] | None = None
        """Of what Python code has begun last: its number, operation, what it was given of which shape and dtype, and
        when."""
        self.work: Callable[[], Any] = _nothing
        """What torch has returned for that, as long as somebody else has it."""

    def counted(self) -> list[int]:
        """What torch has counted."""
        return [backend._get_sequence_number_for_group() for backend in self._backends]

    def begun(self) -> list[int]:
        """How many collectives have been begun, for each of `devices`."""
        return [n - apart for n, apart in zip(self.counted(), self.apart, strict=True)]

    def set_apart(self, before: list[int], collectives: int = 0) -> None:
        """Of what torch has counted since `before`, only so many were collectives."""
        for i, (n, m) in enumerate(zip(self.counted(), before, strict=True)):
            self.apart[i] += max(0, n - m - collectives)


def _tally(group: dist.ProcessGroup) -> _Tally:
    tally = _tallies.get(id(group))
    if tally is None or tally.group() is not group:
        tally = _tallies[id(group)] = _Tally(group)
    return tally


def _nothing() -> None:
    """In place of a reference."""


def _note_line(group: dist.ProcessGroup, op: str, given: Any = None) -> _Tally:
    """The caller's caller begins a collective, the `op` of what is `given`."""
    frame = sys._getframe(2)
    cells = stacks.cell_files()
    while frame is not None and frame.f_code.co_filename not in cells:
        frame = frame.f_back  # type: ignore[assignment]
    code, number = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
    tally = _tally(group)
    begun = tally.begun()
    tally.lines.append((begun, code, number, threading.get_ident()))
    tally.last = max(begun, default=0) + 1, op, [] if given is None else _given(given), time.time_ns()
    tally.work = _nothing
    gpu.note_begun(code, number)
    return tally


def _given(given: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of what goes in: a tensor, or a list of some, or a list for each tensor."""
    if not isinstance(given, list):
        return [(given.shape, given.dtype)]
    if given and isinstance(given[0], list):
        given = given[0]
    return [(tensor.shape, tensor.dtype) for tensor in given]


def _collective(method: Method) -> Method:
    op = NAMES.get(method.__name__, method.__name__)
    at = None if method.__name__ == "barrier" else int(method.__name__ in INTO_THE_FIRST)

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        try:  # the collective does not depend on what is noted of it
            tally = _note_line(group, op, None if at is None or at >= len(args) else args[at])
        except Exception:
            return method(group, *args, **kwargs)
        work = method(group, *args, **kwargs)
        if work is not None:
            try:
                tally.work = weakref.ref(work)
            except TypeError:  # what a backend of others' returns
                tally.work = _nothing
        return work

    return wrapper


def _send_or_receive(method: Method) -> Method:
    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        gpu.note_begun()
        tally = _tally(group)
        if tally.batch is not None:
            tally.is_batch_apart = True
            return method(group, *args, **kwargs)
        before = tally.counted()
        try:
            return method(group, *args, **kwargs)
        finally:
            tally.set_apart(before)

    return wrapper


def _monitored_barrier(method: Method) -> Method:
    """It sends and receives: rank 0 more than the others."""

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tally = _tally(group)
        before = tally.counted()
        _note_line(group, "monitored_barrier")
        try:
            return method(group, *args, **kwargs)
        finally:
            tally.set_apart(before, collectives=1)

    return wrapper


def _start_of_batch(method: Method) -> Method:
    """nccl counts the batch as one, or each of its members, or both; which of them depends on the release."""

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tally = _tally(group)
        before = tally.counted()
        result = method(group, *args, **kwargs)
        tally.batch, tally.is_batch_apart = before, False
        return result

    return wrapper


def _end_of_batch(method: Method) -> Method:
    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tally = _tally(group)
        before, tally.batch = tally.batch, None
        try:
            return method(group, *args, **kwargs)
        finally:
            if before is not None and tally.is_batch_apart:
                tally.set_apart(before)

    return wrapper


COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of ``ProcessGroup``; not every release has them all."""
NAMES = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
"""Of those that a user knows by another."""
INTO_THE_FIRST = {
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
}
"""What they are given first is for the result, and what goes in comes second."""
OTHERS = {
    "send": _send_or_receive,
    "recv": _send_or_receive,
    "recv_anysource": _send_or_receive,
    "monitored_barrier": _monitored_barrier,
    "_start_coalescing": _start_of_batch,
    "_end_coalescing": _end_of_batch,
}


@functools.cache
def watch() -> None:
    """Wrap the methods of ``ProcessGroup``, once, from now on; before the first group is formed."""
    for name, wrap in {**dict.fromkeys(COLLECTIVES, _collective), **OTHERS}.items():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, wrap(method))


def _groups() -> list[tuple[dist.ProcessGroup, str]]:
    world = c10d.world()
    return [(group, DEFAULT_GROUP if group is world else name) for group, name in c10d.groups().items()]


def counts() -> dict[str, int]:
    """How many collectives this rank has begun in each of its groups, by torch's name for it."""
    return {name: max(_tally(group).begun(), default=0) for group, name in c10d.groups().items()}


def noted() -> Entry | None:
    """The collective that Python code has begun last, in a group that is there."""
    found: Entry | None = None
    for group, name in c10d.groups().items():
        tally = _tally(group)
        if tally.last is not None and (found is None or tally.last[3] > found.begun):
            (number, op, given, at), work = tally.last, tally.work()
            shapes, dtypes = [list(shape) for shape, _ in given], [str(dtype).rpartition(".")[2] for _, dtype in given]
            is_done = work is None or work.is_completed()
            found = Entry(name, 0, number, op, shapes, dtypes, at, is_done, (0, 0))
    return found


def begun() -> Begun:
    """What this rank has begun so far, in each of its groups whose backend counts."""
    report: Begun = {}
    size = dist.get_world_size() if dist.is_initialized() else 0
    for group, name in _groups():
        tally = _tally(group)
        ranks = None if group.size() == size else dist.get_process_group_ranks(group)
        for device, begun, apart in zip(tally.devices, tally.begun(), tally.apart, strict=True):
            report[f"{name} {device}"] = begun, apart, ranks
    return report


def line_of(key: str, number: int) -> LineBegun | None:
    """Where the collective was begun before which there were `number` in the group and device `key`.

    Returns its ``place`` as a dict, and ``goes_on``: it was begun by a thread other than the main one that still runs.
    None if C++ began it, or too many others have been begun since.
    """
    for group, name in _groups():
        tally = _tally(group)
        keys = [f"{name} {device}" for device in tally.devices]
        if key in keys:
            for begun, code, line, thread in reversed(list(tally.lines)):
                if begun[keys.index(key)] == number:
                    if code is None:
                        return None
                    goes_on = thread != threading.main_thread().ident and thread in sys._current_frames()
                    return {"place": asdict(stacks.place_of_line(code, line)), "goes_on": goes_on}
    return None


def _can_begin(thread: threading.Thread) -> bool:
    """Is code of the user's on it, or of torch.distributed?

    Not on one that a library has for itself, as tqdm has for its bars, in each process that has shown one.
    """
    if not getattr(thread, "ddip_cell", None):  # no cell has started it
        return False
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        path = frame.f_code.co_filename
        if not libraries.is_librarys(path) or _DISTRIBUTED in path:
            return True
        frame = frame.f_back
    return False


def stays_behind(key: str, number: int) -> bool:
    """Has this rank begun fewer than `number` in the group and device `key`, and none of its threads can begin more?"""
    if any(map(_can_begin, threading.enumerate())):
        return False
    report = begun()  # after the threads: what the last of them began before its end counts
    return key in report and report[key][0] < number
