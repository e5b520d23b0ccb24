"""Which collective this rank is in, or has begun last, in words; for the control thread.

torch's flight recorder tells, those of C++ too (DDP's). Where it has nothing, what ``collectives.py`` has noted of the
ones that Python has begun must do.
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
    """Return the `Stack` of this rank as a dict, with the collective that its cell is in."""
    text = ""
    if cells.busy:
        with contextlib.suppress(Exception):  # a cell may have changed what is asked: the stack is told anyway
            text = collective()
    return stacks.whole_stack(text)


def collective() -> str:
    """Such as ``in collective 5 of the default group: all_reduce of (4,) float32``, for the first that is under way.

    Else of the last one that was begun; empty if there was none in the groups that are there.
    """
    if not dist.is_initialized():
        return ""
    groups = {name: dist.get_process_group_ranks(group) for group, name in c10d.groups().items()}
    noted, recorded = collectives.noted(), _recorded()
    under_way = [entry for entry in recorded if not entry.is_done]
    if not under_way and noted is not None and not noted.is_done:
        under_way = [noted]
    if under_way:
        more = f", and {len(under_way) - 1} more are under way" if len(under_way) > 1 else ""
        return f"in collective {_text(under_way[0], groups)}{more}"
    last = max([*recorded, *filter(None, [noted])], key=lambda entry: entry.begun, default=None)
    return "" if last is None else f"last collective, {_text(last, groups)}"


def _recorded() -> list[Entry]:
    """Of the groups that are there; one that is gone may have had the same name, and have left one that never ended."""
    counts, entries = collectives.counts(), flight_recorder.entries()
    formed: dict[str, int] = {}
    for entry in entries:
        formed[entry.group] = max(entry.formed, formed.get(entry.group, 0))
    return [
        entry for entry in entries if entry.number <= counts.get(entry.group, 0) and entry.formed == formed[entry.group]
    ]


def _text(entry: Entry, groups: Mapping[str, Sequence[int]]) -> str:
    group = group_text(groups[entry.group], dist.get_world_size())
    dtype = entry.dtypes[0] if entry.dtypes else ""
    return f"{entry.number} of {group}: {kind_text(entry.name, entry.shapes, dtype)}"
