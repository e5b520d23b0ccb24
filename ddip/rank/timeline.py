"""Where the time of a cell went on a rank: pure functions over intervals, in nanoseconds.

Each moment counts once. What stands further up has it:

    kernels     the GPU computes                                                       compute
    network     the rank waits in a collective, for certain: a kernel of nccl's, or
                a call that returns when it is done                                    communication
    loading     the next batch of a data loader is awaited, or made                    data loading
    transfers   gloo's own threads work at a collective while the main thread is
                blocked, which a sample of its CPU time says                           communication
    ops         operations of torch's on the rank's threads                            compute
    the rest    the main thread runs Python                                            compute, "in Python"
                it is blocked: it sleeps, reads a file, waits for a process            idle

What of communication is waiting for other ranks is not known here: ``group/stragglers.py``.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Piece: TypeAlias = tuple[int, int, float]
"""Begin, end, and which part of the time between them counts."""


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


@dataclass(frozen=True)
class Divided:
    """Of the time of a rank, seconds; all but `python` add up to it, with the time of the pieces of `communication`."""

    compute: float
    python: float
    """Part of `compute`: no operation was under way, nor a kernel."""
    loading: float
    idle: float
    communication: list[Piece]


def union(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """The same moments between `begin` and `end`, in order and apart."""
    found: list[Interval] = []
    for a, b in sorted(intervals):
        a, b = max(a, begin), min(b, end)
        if a >= b:
            continue
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], b)
        else:
            found.append((a, b))
    return found


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments that are in both; each is in order and apart."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        a, b = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if a < b:
            found.append((a, b))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments of `first` that are not in `second`."""
    if not first:
        return []
    begin, end = first[0][0], first[-1][1]
    edges = [begin, *itertools.chain.from_iterable(second), end]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return overlap(first, gaps)


class _Measured:
    """How much of some moments lies between two others."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self.intervals = intervals
        self._begins = [a for a, _ in intervals]
        self._before = [0, *itertools.accumulate(b - a for a, b in intervals)]

    def until(self, moment: int) -> int:
        """Of all before `moment`."""
        i = bisect.bisect_right(self._begins, moment)
        if i == 0:
            return 0
        a, b = self.intervals[i - 1]
        return self._before[i - 1] + min(moment, b) - a

    def between(self, begin: int, end: int) -> int:
        return self.until(end) - self.until(begin)

    def clipped(self, begin: int, end: int) -> list[Interval]:
        """The moments between the two."""
        first = max(0, bisect.bisect_right(self._begins, begin) - 1)
        last = bisect.bisect_left(self._begins, end)
        return [(max(a, begin), min(b, end)) for a, b in self.intervals[first:last] if b > begin]


def divide(layers: Layers) -> Divided:
    """Which part of the time of `layers` went where."""
    begin, end = layers.begin, layers.end
    kernels = union(layers.kernels, begin, end)
    network = without(union(layers.network, begin, end), kernels)
    taken = union([*kernels, *network], begin, end)
    loading = without(union(layers.loading, begin, end), taken)
    taken = union([*taken, *loading], begin, end)
    transfers = without(union(layers.transfers, begin, end), taken)
    ops = without(union(layers.ops, begin, end), taken)
    both = overlap(transfers, ops)
    gap = without([(begin, end)] if begin < end else [], union([*taken, *transfers, *ops], begin, end))
    slots = _Slots(without(transfers, ops), both, without(ops, transfers), gap, loading)
    for a, b, blocked in _blocked(layers):
        slots.add(a, b, blocked)
    total = sum(b - a for a, b in kernels)
    return Divided(
        compute=(total + slots.compute) / 1e9,
        python=slots.python / 1e9,
        loading=sum(b - a for a, b in loading) / 1e9,
        idle=slots.idle / 1e9,
        communication=_joined([*((a, b, 1.0) for a, b in network), *slots.pieces]),
    )


def _blocked(layers: Layers) -> Iterable[tuple[int, int, float | None]]:
    """Between two samples: how long the main thread was blocked; None: nobody has looked.

    How long it has waited for a core is told when it gets one: what is more than a time can hold was before that.
    """
    samples, found, earlier = sorted(layers.samples), list[tuple[int, int, float | None]](), 0
    for (a, before), (b, after) in reversed([*zip(samples, samples[1:], strict=False)]):
        used = after - before + earlier
        earlier = max(0, used - (b - a))
        begin, end = max(a, layers.begin), min(b, layers.end)
        if begin < end:
            found.append((begin, end, (1 - min(max(used, 0), b - a) / (b - a)) * (end - begin)))
    edges = [layers.begin, *itertools.chain.from_iterable((a, b) for a, b, _ in reversed(found)), layers.end]
    found += [(a, b, None) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return found


class _Slots:
    """Sums over the times between two samples of the CPU time."""

    def __init__(self, *layers: Sequence[Interval]) -> None:
        self._transfers, self._both, self._ops, self._gap, self._loading = map(_Measured, layers)
        self.compute = self.python = self.idle = 0.0
        self.pieces: list[Piece] = []

    def add(self, begin: int, end: int, blocked: float | None) -> None:
        """From `begin` to `end` the main thread was `blocked` so long; where nobody knows: whenever no op was on."""
        transfers, both = self._transfers.between(begin, end), self._both.between(begin, end)
        gap, loading = self._gap.between(begin, end), self._loading.between(begin, end)
        if blocked is None:
            waited, waited_in_ops, idle = float(transfers), 0.0, float(gap)
        else:
            waited = min(transfers, blocked)
            waited_in_ops = min(both, blocked - waited)
            rest = blocked - waited - waited_in_ops
            idle = min(gap, rest * gap / (gap + loading)) if gap else 0.0
        python = gap - idle + transfers - waited
        self.idle += idle
        self.python += python
        self.compute += self._ops.between(begin, end) + both - waited_in_ops + python
        self._add_pieces(self._transfers, begin, end, waited / transfers if transfers else 0.0)
        self._add_pieces(self._both, begin, end, waited_in_ops / both if both else 0.0)

    def _add_pieces(self, layer: _Measured, begin: int, end: int, share: float) -> None:
        if share > 0:
            self.pieces += [(a, b, share) for a, b in layer.clipped(begin, end)]


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """In order; neighbours of the same weight as one."""
    found: list[Piece] = []
    for a, b, share in sorted(pieces):
        if found and found[-1][1] == a and abs(found[-1][2] - share) < 1e-3:
            found[-1] = found[-1][0], b, found[-1][2]
        else:
            found.append((a, b, share))
    return found
