"""Convert events of torch's profiler into the layers of ``timeline.py``.

torch names the events; its profiler (Kineto) names the GPU activities.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ddip.protocol.reports import CollectiveRow, ProfileReport
from ddip.rank.process_group.flight_recorder import Entry
from ddip.rank.profiling.timeline import Interval, Layers

LOADER = "enumerate(DataLoader)#"
CALLS = ("c10d::", "record_param_comms")
"""Prefixes of operations that begin a collective, on the thread that begins it."""
WORK = re.compile(r"(gloo|nccl|ucc|mpi|xccl):")
"""Prefix of events of a backend that works at a collective."""
KERNELS = ("kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset")
NCCL = "nccl"
"""Part of the name of each NCCL kernel."""
SLACK = 50_000
"""Difference that the clocks of the flight recorder and of the profiler may have, nanoseconds."""
NO_RECORDER = "?"
"""Placeholder for a group's name if torch's flight recorder is off; collectives are then matched by their order."""
Ends: TypeAlias = "dict[str, list[Interval]]"


@dataclass
class RecordedEvents:
    """Events of all parts of a recording."""

    layers: Layers
    work: Ends = field(default_factory=lambda: collections.defaultdict(list))
    """Intervals in which backends worked, by name of the operation."""
    calls: list[tuple[int, int, str]] = field(default_factory=list)
    """Begin, end and name of each operation that begins a collective."""
    count: int = 0
    """Number of events."""


def read_events(events: Iterable[Any], main_thread: int, recorded: RecordedEvents) -> None:
    """Add the `events` of one part to `recorded`; `main_thread` is the native id of that thread."""
    layers, on_threads = recorded.layers, collections.defaultdict[int, list[Interval]](list)
    backend_threads: set[int] = set()
    for event in events:
        recorded.count += 1
        name, thread = event.name(), event.device_resource_id()
        moment = event.start_ns(), event.start_ns() + event.duration_ns()
        kind = _event_kind(event)
        if kind in KERNELS:
            (layers.network if NCCL in name.lower() else layers.kernels).append(moment)
        elif WORK.match(name):
            recorded.work[name].append(moment)
            if kind == "cpu" and thread != main_thread:
                backend_threads.add(thread)
                layers.transfers.append(moment)
            elif kind == "cpu":
                layers.network.append(moment)
        elif kind != "cpu":
            continue
        elif name.startswith(CALLS):
            recorded.calls.append((*moment, name))
            if thread == main_thread:
                layers.network.append(moment)
        elif name.startswith(LOADER) and thread == main_thread:
            layers.loading.append(moment)
        elif not _is_annotation(event):
            on_threads[thread].append(moment)
    for thread, ops in on_threads.items():
        if thread not in backend_threads:
            layers.ops += ops


def _is_annotation(event: Any) -> bool:
    """Return whether the event is a block that the user has named with ``record_function``."""
    ask = getattr(event, "is_user_annotation", None)  # since torch 2.5
    return _activity_type(event) == "user_annotation" if ask is None else ask()


def _event_kind(event: Any) -> str:
    """Return ``cpu`` for an operation on the CPU, otherwise the kind of activity, such as ``kernel``."""
    if str(event.device_type()).endswith("CPU"):
        return "cpu" if _activity_type(event) in ("", "cpu_op", "user_annotation") else "other"
    return _activity_type(event) or ("gpu_user_annotation" if WORK.match(event.name()) else "kernel")


def _activity_type(event: Any) -> str:
    """Return the profiler's activity type of `event`; "" in torch releases without it."""
    return str(event.activity_type()) if hasattr(event, "activity_type") else ""


def collective_rows(
    recorded: RecordedEvents, entries: Sequence[Entry], ranks: Mapping[str, list[int]], world: Sequence[int]
) -> list[CollectiveRow]:
    """Return the collectives of a recording as rows.

    They are the flight recorder's `entries`, or profiled calls if there are none. `ranks` has the ranks of each group
    by its name; a group that was destroyed is taken to have all ranks, `world`.
    """
    begin, end = recorded.layers.begin, recorded.layers.end
    if not entries:
        return [
            (NO_RECORDER, list(world), number, _call_name(name), [], [], a, b)
            for number, (a, b, name) in enumerate(sorted(recorded.calls), 1)
            if begin <= a <= end and name not in ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
        ]
    work = {name: collections.deque(sorted(moments)) for name, moments in recorded.work.items()}
    rows: list[CollectiveRow] = []
    for entry in entries:
        if not begin - SLACK <= entry.begun <= end:
            continue
        moments_of_op = work.get(entry.op, collections.deque())
        while moments_of_op and moments_of_op[0][1] < entry.begun - SLACK:
            moments_of_op.popleft()  # it began before the recording
        finished = max(entry.begun, moments_of_op.popleft()[1]) if moments_of_op else end
        group_ranks = ranks.get(entry.group, list(world))
        rows.append(
            (entry.group, group_ranks, entry.number, entry.name, entry.shapes, entry.dtypes, entry.begun, finished)
        )
    return rows


def _call_name(name: str) -> str:
    return name.removeprefix(CALLS[0]).strip("_")


def empty_report(fault: str) -> ProfileReport:
    """Return a report without figures, which gives `fault` as the reason."""
    return {
        "fault": fault,
        "note": "",
        "begin": 0,
        "end": 0,
        "compute": 0.0,
        "python": 0.0,
        "loading": 0.0,
        "idle": 0.0,
        "communication": [],
        "collectives": [],
        "events": 0,
        "size": 0,
    }
