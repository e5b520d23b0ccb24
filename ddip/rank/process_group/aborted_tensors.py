"""Restore the tensors of aborted collectives, and notice failures that break the group's connections.

An all_reduce writes partial sums into its tensor before the last rank has joined. If it is aborted, running the line
again would add to them. So small CPU tensors are copied when such a collective begins, and the copy is dropped when it
is complete:

    Python code begins it      copy_inputs    at most MAX_COPY_BYTES per collective, MAX_PENDING_BYTES in all
    torch returns a work       expect         kept until somebody waits for it, or a later collective begins
    ``work.wait()`` raises     note_failure   the tensor is restored in the thread that waited
    the cell or group ends     settle         works that nobody waited for

Tensors that are too large are named to the user instead. A collective that DDP's reducer begins in C++ is not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import weakref
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work, c10d_logger, distributed_c10d

from ddip.protocol.reports import AbortedTensor
from ddip.rank.runtime import c10d, stacks

MAX_COPY_BYTES = 1 << 16
"""A copy of this size takes 2 us longer than one of 4 bytes."""
MAX_PENDING_BYTES = 1 << 24
MAX_REPORTED = 100
"""Number of tensors that are reported after a cell."""


class Written(NamedTuple):
    """The tensors that a collective writes in place."""

    tensors: list[Tensor]
    copies: list[bytes] | None
    """None: they are too large."""
    size: int
    """Of the copies, bytes."""
    code: CodeType
    line: int


_pending: dict[int, tuple[Any, Written]] = {}
"""Works that are not known to be complete, with their tensors, by the id of the work; the oldest first."""
_pending_bytes = 0
"""Of the copies that are kept."""
_left: weakref.WeakSet[Any] = weakref.WeakSet()
"""Works of groups that this rank has left: their failure says nothing about the group that it is in."""
_aborted: list[AbortedTensor] = []
"""Reported with the next cell that ends."""
is_group_broken = False
"""Has a collective failed because a connection broke, or since it had waited too long? Then gloo has closed the
connection, and every later collective of the group fails."""
_wait = Work.wait
_KINDS = (Tensor, torch.nn.Parameter)
"""Subclasses may be no tensors at all."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_C10D, _C10D_LOGGER = distributed_c10d.__file__, c10d_logger.__file__
stacks.WAIT_FILES.add(__file__)


def begin_group() -> None:
    """Start with intact connections: the rank joins a new group."""
    global is_group_broken
    is_group_broken = False


def watch_waits() -> None:
    """Wrap ``Work.wait``, once: it raises what a collective has failed with, also if the program catches it."""

    @functools.wraps(_wait)
    def wrapper(work: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = _wait(work, *args, **kwargs)
        except RuntimeError as error:
            _note_failed_work(work, error)
            raise
        if _pending:
            _drop(id(work))
        return result

    Work.wait = wrapper  # type: ignore[method-assign, assignment]


def _is_internal(frame: FrameType | None) -> bool:
    """Tell if torch has called a collective for itself, on tensors that the user never sees.

    Such as in ``all_gather_object`` and in hooks of DDP. `frame` has called the method of the group.
    """
    for path in (_C10D, _C10D_LOGGER):  # ``dist.all_reduce`` and its decorator
        if frame is not None and frame.f_code.co_filename == path:
            frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def copy_inputs(group: dist.ProcessGroup, args: tuple[Any, ...], code: CodeType | None, line: int) -> Written | None:
    """Copy the tensors that the caller's caller is about to write in place; None if they do not concern the user.

    Tensors without memory of their own raise.
    """
    if code is None or not args or _is_internal(sys._getframe(2)):
        return None
    if len(args) > 1 and type(args[1]) is dist.BroadcastOptions and args[1].rootRank == group.rank():
        return None  # the source is only read
    if _pending:
        _settle_oldest()
    tensors = list(args[0]) if isinstance(args[0], list) else [args[0]]
    size = 0
    for tensor in tensors:
        if type(tensor) not in _KINDS or not tensor.is_cpu or not tensor.is_contiguous():
            return None
        size += tensor.nbytes
    if size > MAX_COPY_BYTES or _pending_bytes + size > MAX_PENDING_BYTES:
        return Written(tensors, None, 0, code, line)
    return Written(tensors, [ctypes.string_at(one.data_ptr(), one.nbytes) for one in tensors], size, code, line)


def _settle_oldest() -> None:
    """Drop the oldest works as long as they are complete."""
    while True:
        work, _ = next(iter(list(_pending.values())), (None, None))
        if work is None or not work.is_completed():
            break
        _settle(work)


def expect(work: Any, written: Written) -> None:
    """Keep `written` until `work` is complete."""
    global _pending_bytes
    _pending[id(work)] = work, written
    _pending_bytes += written.size


def _drop(key: int) -> Written | None:
    """Let a work go, and return what it has written."""
    global _pending_bytes
    _, written = _pending.pop(key, (None, None))
    if not _pending:
        _pending_bytes = 0
    elif written is not None:
        _pending_bytes -= written.size
    return written


def _settle(work: Any) -> None:
    """Drop a complete work; restore its tensors if it has failed."""
    try:
        _wait(work)  # returns at once; torch warns of the methods that only ask
    except RuntimeError as error:
        _note_failed_work(work, error)
    else:
        _drop(id(work))


def settle() -> None:
    """Drop all works that are complete; restore the tensors of those that have failed."""
    for work, _ in list(_pending.values()):
        if work.is_completed():
            _settle(work)


def leave_group() -> None:
    """Restore the tensors of all works: the groups are gone, and no thread of theirs goes on."""
    settle()
    for work, _ in list(_pending.values()):
        _left.add(work)
        _drop(id(work))


def _note_failed_work(work: Any, error: BaseException) -> None:
    if work not in _left:
        note_failure(error, _drop(id(work)) if work.is_completed() else None)


def note_failure(error: BaseException, written: Written | None = None) -> None:
    """Note that a collective has raised `error`, and restore what it has written; never raises."""
    global is_group_broken
    is_lost = c10d.is_connection_lost(error)
    is_group_broken = is_group_broken or is_lost
    if written is not None and written.copies is not None:
        with contextlib.suppress(Exception):  # the program must get its own error
            both = zip(written.tensors, written.copies, strict=True)
            results = {_restore(tensor, copy) for tensor, copy in both} - {None}
            if results:
                report(written.code, written.line, restored=False not in results)
    elif written is not None and is_lost:
        report(written.code, written.line)


def _restore(tensor: Tensor, copy: bytes) -> bool | None:
    """Write `copy` into `tensor`, as the collective has: autograd's counter of versions does not move.

    Returns None if nothing has changed, False if it cannot be done.
    """
    if tensor.nbytes > tensor.untyped_storage().nbytes() or tensor.nbytes != len(copy) or not tensor.is_contiguous():
        return False  # the program has changed its storage
    if ctypes.string_at(tensor.data_ptr(), len(copy)) == copy:
        return None
    ctypes.memmove(tensor.data_ptr(), copy, len(copy))
    return True


def report(code: CodeType | None, line: int, restored: bool = False) -> None:
    """Tell the user of the tensor of a collective that this line of a cell has begun."""
    if code is None:
        return
    told = AbortedTensor(place=asdict(stacks.place_of_line(code, line)), restored=restored)
    if told not in _aborted and len(_aborted) < MAX_REPORTED:
        _aborted.append(told)


def take() -> list[AbortedTensor]:
    """Settle what is complete, and return what the user has not been told yet."""
    settle()
    told = _aborted[:]
    _aborted.clear()
    return told
