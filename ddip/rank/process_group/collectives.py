"""Note which collectives this rank begins in each of its groups, and on which lines.

The methods of ``ProcessGroup`` that Python code calls are wrapped: collectives, sends and receives are counted
(``tallies.py``), the line of a collective is noted, and small tensors that it writes in place are copied
(``aborted_tensors.py``). The methods are wrapped in the class, since programs may have imported the functions of
``torch.distributed`` under other names. The wrappers are called ``wrapper``, a name that is omitted when ddip shows in
which function a rank is.

A collective takes longer by 12 µs of Python code in a hot loop, and by several times as much if the processor has just
switched to this process; ``benchmarks/train.py`` compares both with torchrun.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ddip.protocol.rank_spec import DEFAULT_GROUP
from ddip.protocol.reports import Begun, Digests
from ddip.rank.process_group import aborted_tensors, tallies
from ddip.rank.process_group.flight_recorder import Entry
from ddip.rank.process_group.tallies import Tally, tally_of
from ddip.rank.runtime import c10d, stacks, tracebacks
from ddip.rank.runtime.gpu import gpu

Method: TypeAlias = Callable[..., Any]
tracebacks.HIDDEN.add(__name__)


class Kind(NamedTuple):
    """Facts about a collective."""

    op: str = ""
    """User-visible name; empty: that of the method."""
    output_first: bool = False
    """True if the first argument receives the result, and the second one is the input."""
    in_place: bool = False
    """True if it writes into the tensors that it reads."""
    sizes_agree: bool = False
    """True if its inputs have the same sizes on all ranks."""


def _input_tensors(inputs: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a collective's `inputs`: a tensor, a list of them, or a list of lists.

    Only the first one of several lists counts.
    """
    if inputs is None:
        return ()
    if not isinstance(inputs, (list, tuple)):
        return (inputs,)
    return inputs[0] if inputs and isinstance(inputs[0], (list, tuple)) else inputs


def _wrap_collective(method: Method) -> Method:
    """Wrap a collective: note it, copy the tensors that it writes in place, and note how it fails."""
    kind = COLLECTIVES.get(method.__name__, Kind())
    op = kind.op or method.__name__
    at = None if op == "barrier" else int(kind.output_first)
    _, _, in_place, sizes_agree = kind

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        written = None
        try:  # an error while noting it must not stop the collective
            place = aborted_tensors.find_place(sys._getframe(1))
            tensors = () if at is None or at >= len(args) else _input_tensors(args[at])
            tally = tally_of(group)
            begun = tally.begin(op, place, tensors, sizes_agree, args[-1] if args else None)
            gpu.note_begun(*place[:2])
            if in_place:
                written = aborted_tensors.copy_inputs(group, args, place)
        except Exception:
            return method(group, *args, **kwargs)
        try:
            work = method(group, *args, **kwargs)
        except RuntimeError as error:
            aborted_tensors.note_failure(error, written)
            raise
        if work is not None:
            if written is not None:
                aborted_tensors.track_work(work, written)
            tally.note_work(work, begun)
        return work

    return wrapper


def _wrap_send(method: Method) -> Method:
    """Wrap a send or receive to count it, and to learn by how much it increases torch's counters."""
    direction = {"send": "to", "recv": "from"}.get(method.__name__, "")

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        gpu.note_begun()
        tally = tally_of(group)
        tally.enter(is_collective=False)
        way = f"{direction} {args[1]}" if direction and len(args) > 1 else "from any"
        number = tally.messages[way] = tally.messages[way] + 1
        batch = tally.batches.get(threading.get_ident())
        if batch is not None:
            batch.has_sends = True
            return method(group, *args, **kwargs)
        before = tally.begin_send()
        try:
            work = method(group, *args, **kwargs)
        except BaseException as error:
            tally.end_send(before, failed=True)
            aborted_tensors.note_failure(error)
            raise
        tally.end_send(before, failed=False)
        tallies.note_message(work, tally, way, number)
        return work

    return wrapper


def _wrap_monitored_barrier(method: Method) -> Method:
    """Wrap the barrier: count it as one collective, whatever it sends and receives.

    Rank 0 sends and receives more often than the others.
    """

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tally = tally_of(group)
        window = tallies.Window(tally)
        place = aborted_tensors.find_place(sys._getframe(1))
        tally.begin("monitored_barrier", place)
        gpu.note_begun(*place[:2])
        try:
            return method(group, *args, **kwargs)
        except RuntimeError as error:
            aborted_tensors.note_failure(error)
            raise
        finally:
            tally.exclude(window, collectives=1)

    return wrapper


def _wrap_batch_start(method: Method) -> Method:
    """Wrap the start of a batch of sends and receives to open a window on torch's counters.

    Depending on the release of torch, nccl's counters count the batch, its members, or both; `_wrap_batch_end` excludes
    them.
    """

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tally = tally_of(group)
        window = tallies.Window(tally)
        result = method(group, *args, **kwargs)
        tally.batches[threading.get_ident()] = window
        return result

    return wrapper


def _wrap_batch_end(method: Method) -> Method:
    """Wrap the end of a batch, to leave its sends and receives out of torch's count of collectives."""

    @functools.wraps(method)
    def wrapper(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tally = tally_of(group)
        window = tally.batches.pop(threading.get_ident(), None)
        try:
            return method(group, *args, **kwargs)
        except RuntimeError as error:
            aborted_tensors.note_failure(error)
            raise
        finally:
            if window is not None and window.has_sends:
                tally.exclude(window)

    return wrapper


COLLECTIVES = {
    "_allgather_base": Kind("all_gather_into_tensor", output_first=True, sizes_agree=True),
    "_reduce_scatter_base": Kind("reduce_scatter_tensor", output_first=True, sizes_agree=True),
    "all_gather_single": Kind(output_first=True, sizes_agree=True),
    "all_gather_single_coalesced": Kind(),
    "all_to_all_single": Kind(output_first=True),
    "allgather": Kind("all_gather", output_first=True),
    "allgather_coalesced": Kind(output_first=True),
    "allgather_into_tensor_coalesced": Kind(),
    "allreduce": Kind("all_reduce", in_place=True, sizes_agree=True),
    "allreduce_coalesced": Kind(in_place=True, sizes_agree=True),
    "alltoall": Kind("all_to_all", output_first=True),
    "alltoall_base": Kind("all_to_all_single", output_first=True),
    "barrier": Kind(),
    "broadcast": Kind(in_place=True, sizes_agree=True),
    "gather": Kind(output_first=True),
    "gather_into_tensor": Kind(output_first=True),
    "gather_single": Kind(output_first=True),
    "reduce": Kind(in_place=True, sizes_agree=True),
    "reduce_scatter": Kind(output_first=True),
    "reduce_scatter_single": Kind(output_first=True, sizes_agree=True),
    "reduce_scatter_single_coalesced": Kind(),
    "reduce_scatter_tensor_coalesced": Kind(),
    "scatter": Kind(output_first=True),
}
"""Methods of ``ProcessGroup`` that are collectives; not every release of torch has all of them."""
OTHERS = {
    "send": _wrap_send,
    "recv": _wrap_send,
    "recv_anysource": _wrap_send,
    "monitored_barrier": _wrap_monitored_barrier,
    "_start_coalescing": _wrap_batch_start,
    "_end_coalescing": _wrap_batch_end,
}


@functools.cache
def wrap_methods() -> None:
    """Wrap the methods of ``ProcessGroup``, once; call this before the first group is formed."""
    for name, wrap in {**dict.fromkeys(COLLECTIVES, _wrap_collective), **OTHERS}.items():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, wrap(method))
    aborted_tensors.watch_waits()


def _named_groups() -> list[tuple[dist.ProcessGroup, str]]:
    world = c10d.default_group()
    return [(group, DEFAULT_GROUP if group is world else name) for group, name in c10d.named_groups().items()]


def counts_by_group() -> dict[str, int]:
    """Return the number of collectives that this rank has begun in each group, by torch's group name."""
    return {name: max(tally_of(group).begun(), default=0) for group, name in c10d.named_groups().items()}


def find_last_begun() -> Entry | None:
    """Return the last collective that Python code has begun in a current group; None if there was none."""
    found: Entry | None = None
    for group, name in c10d.named_groups().items():
        tally = tally_of(group)
        last = tally.last
        if last is not None and (found is None or last.at > found.begun):
            shapes = [list(shape) for shape, _, _ in last.inputs]
            dtypes = [str(dtype).rpartition(".")[2] for _, dtype, _ in last.inputs]
            found = Entry(name, 0, last.number, last.op, shapes, dtypes, last.at, tally.is_last_done(), (0, 0))
    return found


def begun_operations() -> Begun:
    """Return the operations that this rank has begun, per group and device, if the backend counts them."""
    report: Begun = {}
    size = dist.get_world_size() if dist.is_initialized() else 0
    may_begin = tallies.threads_may_begin()
    for group, name in _named_groups():
        tally = tally_of(group)
        ranks = None if group.size() == size else dist.get_process_group_ranks(group)
        if not tally.is_unsure:
            for i, device in enumerate(tally.devices):
                report[f"{name} {device}"] = tally.use(i, ranks, may_begin)
    return report


def awaited_operations(work: Any) -> Begun:
    """Return the operations up to that of `work`, in its group only, in the format of `begun_operations`.

    If `work` is None or unknown, all operations are returned.
    """
    begun = begun_operations()
    operation = None if work is None else tallies.operation_of(work)
    if operation is None:
        return begun
    tally, way, number = operation
    keys = {f"{name} {device}" for group, name in _named_groups() if group is tally.group() for device in tally.devices}
    return {
        key: {**use, "collectives": 0, "messages": {way: number}}
        if way
        else {**use, "collectives": min(number, use["collectives"]), "messages": {}}
        for key, use in begun.items()
        if key in keys
    }


def line_of(key: str, number: int) -> dict[str, Any] | None:
    """Locate the line of the collective that followed the first `number` in the group and device `key`.

    Returns a `StackLocation` as a dict, or None if C++ began the collective or if the line is no longer known.
    """
    tally = _tally_at(key)
    if tally is None:
        return None
    code, line = tally.line(_device_index(tally, key), number)
    return None if code is None else asdict(stacks.place_of_line(code, line))


def digests_up_to(key: str, number: int) -> Digests | None:
    """Return the digests of what Python code began among the first `number` collectives in a group.

    `key`: group and device, as in `begun_operations`. None if these collectives are too long ago to be known.
    """
    tally = _tally_at(key)
    if tally is None:
        return None
    lines = tally.lines_before(_device_index(tally, key), number)
    return lines[-1][-1] if lines else (0, 0, 0) if tally.knows_all() else None


def signatures_of(key: str, number: int) -> list[str]:
    """Describe what Python code began among the first `number` collectives in a group.

    Oldest first, at most the last `tallies.MAX_LINES`; empty if there is no such group. `key`: group and device, as in
    `begun_operations`.
    """
    tally = _tally_at(key)
    group = None if tally is None else tally.group()
    if tally is None or group is None:
        return []
    ranks = dist.get_process_group_ranks(group)
    lines = tally.lines_before(_device_index(tally, key), number)
    return [_signature_text(*signature, ranks) for _, _, signature, _ in lines]


def place_of_signature(key: str, number: int, back: int) -> dict[str, Any] | None:
    """Locate the line of a collective of `signatures_of`, the one that is at position `back` from its end.

    `back` is 1 for the last. Returns a `StackLocation` as a dict, or None if the line is not known.
    """
    tally = _tally_at(key)
    lines = [] if tally is None else tally.lines_before(_device_index(tally, key), number)
    code, line = lines[-back][:2] if back <= len(lines) else (None, 0)
    return None if code is None else asdict(stacks.place_of_line(code, line))


def _device_index(tally: Tally, key: str) -> int:
    return tally.devices.index(key.rpartition(" ")[2])


def _tally_at(key: str) -> Tally | None:
    for group, name in _named_groups():
        tally = tally_of(group)
        if key in [f"{name} {device}" for device in tally.devices]:
            return tally
    return None


def _signature_text(
    op: str, inputs: Sequence[tuple[int | None, torch.dtype, Any]], options: Sequence[Any], ranks: Sequence[int]
) -> str:
    """Describe a signature in a group of `ranks`, such as ``broadcast (4 float32, root 0)``."""
    details = []
    for count, dtype, strides in inputs:
        text = str(dtype).removeprefix("torch.")
        details.append(text if count is None else f"{count} {text}{f' with strides {strides}' if strides else ''}")
    details += [f"root {ranks[each]}" if isinstance(each, int) else each.name for each in options]
    return f"{op} ({', '.join(details)})" if details else op
