"""Merge the traces of all ranks into one file for Perfetto: one process per rank, all on the notebook's clock.

Events are read and written one at a time, since a trace may have gigabytes.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
PIECE = 1 << 20
"""Number of characters to read at once."""
EVENTS = '"traceEvents"'
BASE = "baseTimeNanoseconds"
OTHERS_APART = 10_000_000
"""Offset for the numbers of GPU tracks, which may coincide with those of threads."""
OF_KINETO = ("Spans", "Traces", "")
"""Process IDs in a trace that do not stand for processes."""


def merge_files(traces: Mapping[int, Path], offsets: Mapping[int, int], begin: int, to: Path) -> None:
    """Merge the gzipped trace files of ranks into the file `to`, which appears once it is complete.

    `traces`: paths by rank. `offsets`: how far each rank's clock is ahead of the notebook's; `begin`: when the cell
    began on the notebook's clock; both in nanoseconds.
    """
    part = to.with_name(f"{to.name}.part")
    try:
        with gzip.open(part, "wt", compresslevel=3, encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for rank in traces for event in _name_events(rank)))
            for rank, path in traces.items():
                with gzip.open(path, "rt", encoding="utf-8") as trace:
                    for event in of_rank(rank, trace, offsets[rank] + begin):
                        file.write(",\n")
                        file.write(json.dumps(event))
            file.write("\n]}\n")
        part.replace(to)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _name_events(rank: int) -> list[Event]:
    named = {"ph": "M", "pid": rank + 1, "tid": 0, "ts": 0}
    return [
        {**named, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {**named, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]


def of_rank(rank: int, trace: io.TextIOBase | Any, begin: int) -> Iterator[Event]:
    """Yield the events of a rank's `trace` for the merged file, whose time 0 is `begin` on its clock.

    `begin` is in nanoseconds.
    """
    head, events = _split_trace(trace)
    shift = (begin - int(head.get(BASE, 0))) / 1000
    pid: Any = None
    for event in events:
        event_pid = event.get("pid")
        if event_pid in OF_KINETO:
            continue
        if event.get("ph") == "M" and str(event.get("name", "")).startswith("process_"):
            labels = event.get("args", {}).get("labels", "")
            if pid is None and labels == "CPU":
                pid = event_pid
            continue
        if isinstance(event_pid, int) and event_pid != pid and pid is not None and isinstance(event.get("tid"), int):
            event["tid"] += OTHERS_APART * (event_pid + 1)
            if event.get("name") == "thread_name":
                event["args"] = {"name": f"GPU {event_pid}, {event.get('args', {}).get('name', '')}"}
        event["pid"] = rank + 1
        if "ts" in event:
            event["ts"] = round(float(event["ts"]) - shift, 3)
        if "id" in event:  # of flow arrows, which each rank numbers separately
            event["id"] = f"{rank}.{event['id']}"
        yield event


def _split_trace(trace: Any) -> tuple[Event, Iterator[Event]]:
    """Return the header of a trace and an iterator of its events."""
    text = ""
    while EVENTS not in text:
        piece = trace.read(PIECE)
        if not piece:
            raise ValueError("the file is not a trace of torch's profiler")
        text += piece
    head, _, rest = text.partition(EVENTS)
    return json.loads(f"{head.rstrip().rstrip(',')}}}"), _read_events(trace, rest[rest.index("[") + 1 :])


def _read_events(trace: Any, text: str) -> Iterator[Event]:
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at] in " \r\n\t,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:  # the rest of the event has not been read
            piece = trace.read(PIECE)
            if not piece:
                raise
            text, at = text[at:] + piece, 0
            continue
        yield event
