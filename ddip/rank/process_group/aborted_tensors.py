"""Restore the tensors of aborted collectives, and detect failures that break the group's connections.

An all_reduce writes partial sums into its tensor before the last rank has joined. If it is aborted, running the line
again would add to them. So small CPU tensors are copied when such a collective begins, and the copy is dropped when
the collective is complete:

    Python code begins it      copy_inputs    at most MAX_COPY_BYTES per collective, MAX_PENDING_BYTES in all
    torch returns a work       track_work     the copy is kept until the work is waited for, or a later one begins
    ``work.wait()`` raises     note_failure   the tensor is restored in the thread that waited
    the cell or group ends     settle_works   handles works that no one waited for

If the tensors are too large, ddip names the line to the user instead. Collectives that DDP's reducer begins in C++ are
not noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, Work, c10d_logger, distributed_c10d

from ddip.protocol.reports import AbortedTensor
from ddip.rank.process_group import tallies
from ddip.rank.process_group.tallies import Place
from ddip.rank.runtime import c10d, stacks, tracebacks

MAX_COPY_BYTES = 1 << 16
"""Maximum size of a collective's tensors to be copied: that takes 2 us longer than a copy of 4 bytes."""
MAX_PENDING_BYTES = 1 << 24
"""Maximum size of all copies that are kept."""
MAX_REPORTED = 100
"""Maximum number of tensors that are reported after a cell."""


class WrittenTensors(NamedTuple):
    """The tensors that a collective writes in place."""

    tensors: list[Tensor]
    copies: list[bytes] | None
    """Their contents before the collective; None if they are too large."""
    size: int
    """Size of the copies, bytes."""
    code: CodeType
    """Code of the cell that began the collective."""
    line: int


_pending: dict[int, tuple[Any, WrittenTensors]] = {}
"""Works that may not be complete, with the tensors that they write, by the id of the work; oldest first."""
_pending_bytes = 0
"""Size of the copies that are kept."""
_abandoned: weakref.WeakSet[Any] = weakref.WeakSet()
"""Works of groups that this rank has left; their failures do not concern the current group."""
_reports: list[AbortedTensor] = []
"""Reports for the next cell that ends."""
is_group_broken = False
"""True once a collective has failed because a connection broke or a timeout expired.

gloo has closed the connection then, so every later collective of the group fails.
"""
_original_wait = Work.wait
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
"""Types whose tensors are copied; a subclass may hold no data of its own."""
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
_C10D, _C10D_LOGGER = distributed_c10d.__file__, c10d_logger.__file__
stacks.WAIT_FILES.add(__file__)
tracebacks.HIDDEN.add(__name__)


def begin_group() -> None:
    """Assume intact connections, since this rank joins a new group."""
    global is_group_broken
    is_group_broken = False


def watch_waits() -> None:
    """Wrap ``Work.wait`` to note errors of collectives, even if the program catches them; call this once.

    Sends and receives of gloo get the timeout of their group.
    """

    @functools.wraps(_original_wait)
    def wrapper(work: Any, *args: Any, **kwargs: Any) -> Any:
        timeout = None if args or kwargs else tallies.timeout_of_message(work)
        if timeout is not None:
            args = (timeout,)
        try:
            result = _original_wait(work, *args, **kwargs)
        except RuntimeError as error:
            _note_failed_work(work, error)
            raise
        if _pending:
            _forget_work(id(work))
        return result

    Work.wait = wrapper  # type: ignore[method-assign, assignment]


def find_place(frame: FrameType | None) -> Place:
    """Return the place at which a collective begins.

    `frame` is the one that calls the method of the group. torch itself begins those of ``all_gather_object`` and of
    DDP's hooks, for example.
    """
    if frame is not None and frame.f_code.co_filename == _C10D:  # ``dist.all_reduce``
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename == _C10D_LOGGER:  # its decorator
        frame = frame.f_back
    cells, scripts = stacks.cell_files, stacks.script_files
    caller = "" if frame is None else frame.f_code.co_filename
    while frame is not None:
        path = frame.f_code.co_filename
        if path in cells or path in scripts:
            return frame.f_code, frame.f_lineno, caller.startswith(_TORCH_FOLDER)
        frame = frame.f_back
    return None, 0, False


def copy_inputs(group: dist.ProcessGroup, args: tuple[Any, ...], place: Place) -> WrittenTensors | None:
    """Copy the tensors that a collective at `place` will write in place; None if no copy is needed.

    `args`: the collective's arguments, tensors first. No copy is needed if torch itself begins the collective, if no
    cell does, if this rank only sends, or if a tensor is not a contiguous CPU tensor. Raises an error of torch if a
    tensor has no memory of its own.
    """
    code, line, is_by_torch = place
    if code is None or is_by_torch or not args:
        return None
    if len(args) > 1 and type(args[1]) is BroadcastOptions and args[1].rootRank == group.rank():
        return None  # the source is only read
    if _pending:
        _settle_oldest()
    tensors = list(args[0]) if isinstance(args[0], list) else [args[0]]  # the program may change its list meanwhile
    size = 0
    for tensor in tensors:
        if type(tensor) not in _TENSOR_TYPES or not tensor.is_cpu or not tensor.is_contiguous():
            return None
        size += tensor.nbytes
    if size > MAX_COPY_BYTES or _pending_bytes + size > MAX_PENDING_BYTES:
        return WrittenTensors(tensors, None, 0, code, line)
    copies = [ctypes.string_at(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    return WrittenTensors(tensors, copies, size, code, line)


def _settle_oldest() -> None:
    """Settle the oldest works, up to the first that is not complete."""
    while True:
        work, _ = next(iter(list(_pending.values())), (None, None))
        if work is None or not work.is_completed():
            break
        _settle_work(work)


def track_work(work: Any, written: WrittenTensors) -> None:
    """Keep `written` until `work` is complete."""
    global _pending_bytes
    _pending[id(work)] = work, written
    _pending_bytes += written.size


def _forget_work(key: int) -> WrittenTensors | None:
    """Remove the work with the id `key` from the pending ones, and return the tensors that it has written."""
    global _pending_bytes
    _, written = _pending.pop(key, (None, None))
    if not _pending:
        _pending_bytes = 0
    elif written is not None:
        _pending_bytes -= written.size
    return written


def _settle_work(work: Any) -> None:
    """Remove a complete work from the pending ones; restore its tensors if it has failed."""
    try:
        _original_wait(work)  # returns at once; torch deprecates the methods that only query
    except RuntimeError as error:
        _note_failed_work(work, error)
    else:
        _forget_work(id(work))


def settle_works() -> None:
    """Settle all complete works: drop their copies, and restore the tensors of those that have failed."""
    for work, _ in list(_pending.values()):
        if work.is_completed():
            _settle_work(work)


def leave_group() -> None:
    """Settle all complete works and forget the others, since this rank has left their groups."""
    settle_works()
    for work, _ in list(_pending.values()):
        _abandoned.add(work)
        _forget_work(id(work))


def _note_failed_work(work: Any, error: BaseException) -> None:
    if work not in _abandoned:
        note_failure(error, _forget_work(id(work)) if work.is_completed() else None)


def note_failure(error: BaseException, written: WrittenTensors | None = None) -> None:
    """Note that a collective has raised `error`; restore the tensors that it wrote, or report them; never raises."""
    global is_group_broken
    is_lost = c10d.is_connection_lost(error)
    is_group_broken = is_group_broken or is_lost
    if written is not None and written.copies is not None:
        with contextlib.suppress(Exception):  # the program must get the error of the collective
            pairs = zip(written.tensors, written.copies, strict=True)
            results = {_restore_tensor(tensor, copy) for tensor, copy in pairs} - {None}
            if results:
                add_report(written.code, written.line, restored=False not in results)
    elif written is not None and is_lost:
        add_report(written.code, written.line)


def _restore_tensor(tensor: Tensor, copy: bytes) -> bool | None:
    """Write `copy` into the memory of `tensor` without advancing autograd's version counter.

    Returns None if the contents are already equal, and False if the program has replaced the tensor's storage.
    """
    if tensor.nbytes > tensor.untyped_storage().nbytes() or tensor.nbytes != len(copy) or not tensor.is_contiguous():
        return False  # the program has changed its storage
    if ctypes.string_at(tensor.data_ptr(), len(copy)) == copy:
        return None
    ctypes.memmove(tensor.data_ptr(), copy, len(copy))
    return True


def add_report(code: CodeType | None, line: int, restored: bool = False) -> None:
    """Add a report on the tensors of a collective that this line of a cell began, unless there is one."""
    if code is None:
        return
    tensor = AbortedTensor(place=asdict(stacks.place_of_line(code, line)), restored=restored)
    if tensor not in _reports and len(_reports) < MAX_REPORTED:
        _reports.append(tensor)


def take_reports() -> list[AbortedTensor]:
    """Settle all complete works; return and remove the reports for the cell that has just ended."""
    settle_works()
    reports = _reports[:]
    _reports.clear()
    return reports
