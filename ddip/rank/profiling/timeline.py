"""Divide the time of a cell on a rank among its causes: pure functions over intervals, in nanoseconds.

Each moment counts once, for the first of these that it is in:

    kernels     the GPU computes                                                       compute
    network     the rank waits in a collective, for certain: a kernel of nccl's, or
                a call that returns when it is done                                    communication
    loading     the next batch of a data loader is awaited, or made                    data loading
    transfers   gloo's own threads work at a collective while the main thread is
                blocked, which a sample of its CPU time says                           communication
    ops         operations of torch's on the rank's threads                            compute
    the rest    the main thread runs Python                                            compute, "in Python"
                it is blocked: it sleeps, reads a file, waits for a process            idle

``group/profiling/stragglers.py`` finds out which part of communication is waiting for other ranks.
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
"""Begin, end, and which part of the time between them counts."""
LAYERS = ("kernels", "network", "loading", "transfers", "ops")
"""The first layer that a moment is in has it."""
BOTH, REST = "transfers beside ops", "rest"


@dataclass
class Layers:
    """What happened between `begin` and `end`; intervals of a layer may overlap, in any order."""

    begin: int
    end: int
    kernels: list[Interval] = field(default_factory=list)
    network: list[Interval] = field(default_factory=list)
    loading: list[Interval] = field(default_factory=list)
    transfers: list[Interval] = field(default_factory=list)
    ops: list[Interval] = field(default_factory=list)
    samples: list[Interval] = field(default_factory=list)
    """A moment, and how much time the main thread had had a core, or waited for one, until then."""


@dataclass
class Divided:
    """The time of a rank, seconds; all but `python` add up to it, with the time of the pieces of `communication`."""

    compute: float = 0.0
    python: float = 0.0
    """Part of `compute`: no operation was under way, nor a kernel."""
    loading: float = 0.0
    idle: float = 0.0
    communication: list[Piece] = field(default_factory=list)


def divide(layers: Layers) -> Divided:
    """Divide the time of `layers`, from one sample of the CPU time to the next."""
    slots = _slots(layers)
    begins = [begin for begin, _, _ in slots]
    stretches = collections.defaultdict[int, list[tuple[int, int, str]]](list)
    for begin, end, kind in _stretches(layers, begins):
        stretches[bisect.bisect_right(begins, begin) - 1].append((begin, end, kind))
    found = Divided()
    for number, (_, _, blocked) in enumerate(slots):
        _add(found, stretches[number], blocked)
    found.communication = _joined(found.communication)
    return found


def _stretches(layers: Layers, cuts: Iterable[int]) -> Iterator[tuple[int, int, str]]:
    """Yield the moments of `layers` in order, each with the layer that has it, and end a stretch at each cut."""
    events = [(cut, 0, 0) for cut in cuts] + [(layers.end, 0, 0)]
    for number, name in enumerate(LAYERS):
        for begin, end in getattr(layers, name):
            begin, end = max(begin, layers.begin), min(end, layers.end)
            if begin < end:
                events += [(begin, number, 1), (end, number, -1)]
    on, at = [0] * len(LAYERS), layers.begin
    for moment, number, step in sorted(events):
        if at < moment:
            first = next((name for name, count in zip(LAYERS, on, strict=True) if count), REST)
            yield at, moment, BOTH if first == "transfers" and on[-1] else first
            at = moment
        on[number] += step


def _slots(layers: Layers) -> list[tuple[int, int, float | None]]:
    """Return begin and end of the time between two samples, and how long the main thread was blocked; None: unknown.

    How long it has waited for a core is told when it gets one: what is more than a slot can hold was before that.
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


def _add(found: Divided, stretches: Sequence[tuple[int, int, str]], blocked: float | None) -> None:
    """Add the stretches of a slot in which the main thread was `blocked` so long; None: whenever no operation was on.

    A blocked thread waits for gloo first, then for gloo beside operations, then for its loader or idly.
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
    found.idle += idle / 1e9
    found.python += python / 1e9
    found.compute += (spent["kernels"] + spent["ops"] + spent[BOTH] - waits[BOTH] + python) / 1e9
    found.loading += spent["loading"] / 1e9
    shares = {kind: seconds / spent[kind] for kind, seconds in waits.items() if seconds > 0} | {"network": 1.0}
    found.communication += [(a, b, shares[kind]) for a, b, kind in stretches if kind in shares]


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """In order; neighbours of the same weight as one."""
    found: list[Piece] = []
    for a, b, share in sorted(pieces):
        if found and found[-1][1] == a and abs(found[-1][2] - share) < 1e-3:
            found[-1] = found[-1][0], b, found[-1][2]
        else:
            found.append((a, b, share))
    return found
