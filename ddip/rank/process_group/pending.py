"""Describe the collective that this rank is in, or has begun last; called on the control thread.

torch's flight recorder also has the collectives of C++, such as DDP's. If it has nothing, ``collectives.py`` still has
those that Python code has begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ddip.protocol.collective import group_text, kind_text
from ddip.rank.process_group import collectives, flight_recorder
from ddip.rank.process_group.flight_recorder import Entry
from ddip.rank.runtime import c10d, stacks
from ddip.rank.runtime.housekeeping import cells


def whole_stack() -> dict[str, Any]:
    """Return the `Stack` of this rank as a dict, with a description of its cell's current collective."""
    return stacks.whole_stack(_collective_of_cell())


def waiting_location() -> dict[str, Any]:
    """Return the `StackLocation` of the main thread as a dict, with the current collective of its cell."""
    return {**stacks.main_thread_location(), "collective": _collective_of_cell()}


def _collective_of_cell() -> str:
    if cells.busy:
        with contextlib.suppress(Exception):  # a cell may have changed torch's objects; the place is useful without it
            return describe_collective()
    return ""


def describe_collective() -> str:
    """Describe the first unfinished collective, or else the last one; empty if there was none.

    Only the current groups count. An example is ``in collective 5 of the default group: all_reduce of (4,) float32``.
    """
    if not dist.is_initialized():
        return ""
    groups = {name: dist.get_process_group_ranks(group) for group, name in c10d.named_groups().items()}
    last_noted, recorded = collectives.find_last_begun(), _recorded_entries()
    under_way = [entry for entry in recorded if not entry.is_done]
    if not under_way and last_noted is not None and not last_noted.is_done:
        under_way = [last_noted]
    if under_way:
        more = f", and {len(under_way) - 1} more are under way" if len(under_way) > 1 else ""
        return f"in collective {_entry_text(under_way[0], groups)}{more}"
    last = max([*recorded, *filter(None, [last_noted])], key=lambda entry: entry.begun, default=None)
    return "" if last is None else f"last collective, {_entry_text(last, groups)}"


def _recorded_entries() -> list[Entry]:
    """Return the recorded collectives of the current groups.

    A former group may have had the same name, and may have left a collective that never ended.
    """
    counts, entries = collectives.counts_by_group(), flight_recorder.read_entries()
    formed: dict[str, int] = {}
    for entry in entries:
        formed[entry.group] = max(entry.formed, formed.get(entry.group, 0))
    return [
        entry for entry in entries if entry.number <= counts.get(entry.group, 0) and entry.formed == formed[entry.group]
    ]


def _entry_text(entry: Entry, groups: Mapping[str, Sequence[int]]) -> str:
    group = group_text(groups[entry.group], dist.get_world_size())
    dtype = entry.dtypes[0] if entry.dtypes else ""
    return f"{entry.number} of {group}: {kind_text(entry.name, entry.shapes, dtype)}"
