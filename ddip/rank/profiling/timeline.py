"""Attribute the time of a cell on a rank to causes, with pure functions over intervals in nanoseconds.

Each moment counts once, for the first of these layers that it is in:

    kernels     the GPU computes                                                       compute
    network     the rank certainly waits in a collective: an NCCL kernel, or a
                blocking call                                                          communication
    loading     the rank waits for a data loader, or loads a batch itself              data loading
    transfers   gloo threads work at a collective while the main thread is blocked,
                according to samples of its CPU time                                   communication
    ops         torch operations run on the rank's threads                             compute
    the rest    the main thread runs Python                                            compute, "in Python"
                the main thread is blocked: it sleeps, reads a file, waits for
                a process                                                              idle

``group/profiling/stragglers.py`` computes which part of communication is waiting for other ranks.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Piece: TypeAlias = tuple[int, int, float]
"""Begin, end, and the share of the time between them that counts."""
LAYERS = ("kernels", "network", "loading", "transfers", "ops")
"""Layers in order of precedence: each moment is attributed to the first layer that contains it."""
BOTH, REST = "transfers beside ops", "rest"


@dataclass
class Layers:
    """Intervals by layer between `begin` and `end`; those of a layer may overlap, in any order."""

    begin: int
    end: int
    kernels: list[Interval] = field(default_factory=list)
    network: list[Interval] = field(default_factory=list)
    loading: list[Interval] = field(default_factory=list)
    transfers: list[Interval] = field(default_factory=list)
    ops: list[Interval] = field(default_factory=list)
    samples: list[Interval] = field(default_factory=list)
    """Pairs of a time and the main thread's CPU time up to then, including waits for a core."""


@dataclass
class TimeBreakdown:
    """A rank's time by cause, in seconds.

    `compute`, `loading`, `idle` and the weighted pieces of `communication` add up to the whole time.
    """

    compute: float = 0.0
    python: float = 0.0
    """Part of `compute` without a torch operation or kernel."""
    loading: float = 0.0
    idle: float = 0.0
    communication: list[Piece] = field(default_factory=list)


def divide_time(layers: Layers) -> TimeBreakdown:
    """Attribute the time of `layers` to causes, for each interval between two CPU time samples."""
    slots = _sample_slots(layers)
    begins = [begin for begin, _, _ in slots]
    stretches = collections.defaultdict[int, list[tuple[int, int, str]]](list)
    for begin, end, kind in _layer_stretches(layers, begins):
        stretches[bisect.bisect_right(begins, begin) - 1].append((begin, end, kind))
    divided = TimeBreakdown()
    for number, (_, _, blocked) in enumerate(slots):
        _add_slot(divided, stretches[number], blocked)
    divided.communication = _merge_pieces(divided.communication)
    return divided


def _layer_stretches(layers: Layers, cuts: Iterable[int]) -> Iterator[tuple[int, int, str]]:
    """Yield stretches of `layers` in order, each with its layer, split at each of the times `cuts`."""
    events = [(cut, 0, 0) for cut in cuts] + [(layers.end, 0, 0)]
    for number, name in enumerate(LAYERS):
        for begin, end in getattr(layers, name):
            begin, end = max(begin, layers.begin), min(end, layers.end)
            if begin < end:
                events += [(begin, number, 1), (end, number, -1)]
    active, position = [0] * len(LAYERS), layers.begin
    for moment, number, step in sorted(events):
        if position < moment:
            first = next((name for name, count in zip(LAYERS, active, strict=True) if count), REST)
            yield position, moment, BOTH if first == "transfers" and active[-1] else first
            position = moment
        active[number] += step


def _sample_slots(layers: Layers) -> list[tuple[int, int, float | None]]:
    """Return the intervals between samples, each with the nanoseconds that the main thread was blocked.

    These are None where no samples were taken. The system adds a wait for a core when it is over, so time that exceeds
    a slot is carried to the slots before it.
    """
    samples, found, earlier = sorted(layers.samples), list[tuple[int, int, float | None]](), 0
    for (a, before), (b, after) in reversed([*itertools.pairwise(samples)]):
        used = after - before + earlier
        earlier = max(0, used - (b - a))
        begin, end = max(a, layers.begin), min(b, layers.end)
        if begin < end:
            found.append((begin, end, (1 - min(max(used, 0), b - a) / (b - a)) * (end - begin)))
    edges = [layers.begin, *itertools.chain.from_iterable((a, b) for a, b, _ in reversed(found)), layers.end]
    found += [(a, b, None) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return sorted(found, key=lambda slot: slot[0])


def _add_slot(divided: TimeBreakdown, stretches: Sequence[tuple[int, int, str]], blocked: float | None) -> None:
    """Add the stretches of one slot, a short part of the profile, to `divided`.

    `stretches`: begin and end in nanoseconds, and kind. `blocked`: nanoseconds of the slot for which the main thread
    was blocked. They count as waits for gloo transfers first, then for transfers during which operations ran on other
    threads; the rest is shared between the loader and idle time in proportion to their stretches. If it is None, the
    thread counts as blocked whenever no operation runs.
    """
    spent = collections.Counter[str]()
    for a, b, kind in stretches:
        spent[kind] += b - a
    if blocked is None:
        waits = {"transfers": float(spent["transfers"]), BOTH: 0.0}
        idle = float(spent[REST])
    else:
        waits = {"transfers": min(spent["transfers"], blocked)}
        waits[BOTH] = min(spent[BOTH], blocked - waits["transfers"])
        rest = (blocked - sum(waits.values())) * spent[REST] / ((spent[REST] + spent["loading"]) or 1)
        idle = min(spent[REST], rest)
    python = spent[REST] - idle + spent["transfers"] - waits["transfers"]
    divided.idle += idle / 1e9
    divided.python += python / 1e9
    divided.compute += (spent["kernels"] + spent["ops"] + spent[BOTH] - waits[BOTH] + python) / 1e9
    divided.loading += spent["loading"] / 1e9
    shares = {kind: seconds / spent[kind] for kind, seconds in waits.items() if seconds > 0} | {"network": 1.0}
    divided.communication += [(a, b, shares[kind]) for a, b, kind in stretches if kind in shares]


def _merge_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Sort `pieces`, and merge neighbours with the same share."""
    found: list[Piece] = []
    for a, b, share in sorted(pieces):
        if found and found[-1][1] == a and abs(found[-1][2] - share) < 1e-3:
            found[-1] = found[-1][0], b, found[-1][2]
        else:
            found.append((a, b, share))
    return found
