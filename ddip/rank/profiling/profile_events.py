"""What torch's profiler has recorded, as the layers of ``timeline.py``.

The names of events are torch's, and those of its GPU activities the profiler's (Kineto).
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
"""How operations that begin a collective are called, on the thread that begins it."""
WORK = re.compile(r"(gloo|nccl|ucc|mpi|xccl):")
"""What a backend calls its own part of it."""
KERNELS = ("kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset")
NCCL = "nccl"
"""In the name of each of its kernels."""
SLACK = 50_000
"""By which the clocks of the flight recorder and of the profiler may differ, nanoseconds."""
NO_RECORDER = "?"
"""In place of a group's name where torch records no collectives: the order in which a rank begins them must do."""
Ends: TypeAlias = "dict[str, list[Interval]]"


@dataclass
class Recorded:
    """What all parts of a recording hold."""

    layers: Layers
    work: Ends = field(default_factory=lambda: collections.defaultdict(list))
    """When backends were at work, by name of what they did."""
    calls: list[tuple[int, int, str]] = field(default_factory=list)
    """Begin and end of each operation that begins a collective."""
    count: int = 0


def read(events: Iterable[Any], main_thread: int, recorded: Recorded) -> None:
    """Add the `events` of one part of a recording; `main_thread` is the system's number for it."""
    layers, on_threads = recorded.layers, collections.defaultdict[int, list[Interval]](list)
    of_backends: set[int] = set()
    for event in events:
        recorded.count += 1
        name, thread = event.name(), event.device_resource_id()
        moment = event.start_ns(), event.start_ns() + event.duration_ns()
        kind = _kind(event)
        if kind in KERNELS:
            (layers.network if NCCL in name.lower() else layers.kernels).append(moment)
        elif WORK.match(name):
            recorded.work[name].append(moment)
            if kind == "cpu" and thread != main_thread:
                of_backends.add(thread)
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
        elif not event.is_user_annotation():
            on_threads[thread].append(moment)
    for thread, ops in on_threads.items():
        if thread not in of_backends:
            layers.ops += ops


def _kind(event: Any) -> str:
    """``cpu``, or what the GPU did."""
    if str(event.device_type()).endswith("CPU"):
        return "cpu" if _activity(event) in ("", "cpu_op", "user_annotation") else "other"
    return _activity(event) or ("gpu_user_annotation" if WORK.match(event.name()) else "kernel")


def _activity(event: Any) -> str:
    """Older releases do not tell."""
    return str(event.activity_type()) if hasattr(event, "activity_type") else ""


def collectives(
    recorded: Recorded, entries: Sequence[Entry], ranks: Mapping[str, list[int]], world: Sequence[int]
) -> list[CollectiveRow]:
    """The collectives of the recording: those of the flight recorder, or the calls where torch has none.

    `ranks` are those of each group, by its name; a group that is gone had all, the `world`.
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
        its = work.get(entry.op, collections.deque())
        while its and its[0][1] < entry.begun - SLACK:
            its.popleft()  # it was begun before the recording
        done = max(entry.begun, its.popleft()[1]) if its else end
        of = ranks.get(entry.group, list(world))
        rows.append((entry.group, of, entry.number, entry.name, entry.shapes, entry.dtypes, entry.begun, done))
    return rows


def _call_name(name: str) -> str:
    return name.removeprefix(CALLS[0]).strip("_")


def empty(fault: str) -> ProfileReport:
    """In place of a report."""
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
