"""Which batches are whose: pure functions.

The unit is a batch as one process alone would make it, so that every batch is whole, and what a metric or a padding
sees is what it would have seen there. Nothing is seen twice: a rank for which the last step has no batch gets one of
that step's once more, with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What one rank trains on in one epoch."""

    batches: tuple[int, ...]
    """Numbers of its batches, a step each; every rank has as many."""
    weights: tuple[float, ...]
    """What the loss of each step counts: 1 when all ranks have the same number of items in it.

    The mean over the ranks of weight times mean loss is then the mean over all items of the step.
    """
    items: tuple[float, ...]
    """Items of each step, as a mean over the ranks."""


def sizes_of(n: int, bs: int, drop_last: bool) -> list[int]:
    """The batches of one process alone: how many of `n` items each has."""
    sizes = [min(bs, n - first) for first in range(0, n, bs)]
    return [size for size in sizes if size == bs or not drop_last]


def training(sizes: Sequence[int], rank: int, size: int, *, in_runs: bool = False) -> Plan:
    """The share of `rank` of `size` in batches of these `sizes`.

    At step s the ranks have the batches s * size, s * size + 1, ...: together the batch s of one process whose batches
    are `size` times as large. With `in_runs` each rank has batches that follow one another, for models that carry a
    state along.
    """
    table = [_row(len(sizes), step, size, in_runs) for step in range(-(-len(sizes) // size))]
    batches, weights, means = [], [], []
    for row in table:
        counts = [0 if batch is None else sizes[batch] for batch in row]
        first = next(batch for batch in row if batch is not None)
        batch = row[rank]
        batches.append(first if batch is None else batch)
        weights.append(counts[rank] * size / sum(counts))
        means.append(sum(counts) / size)
    return Plan(tuple(batches), tuple(weights), tuple(means))


def _row(whole: int, step: int, size: int, in_runs: bool) -> list[int | None]:
    """The batch of each rank at `step`; None where there is none left."""
    if not in_runs:
        return [batch if batch < whole else None for batch in range(step * size, (step + 1) * size)]
    each, more = divmod(whole, size)
    begins = [rank * each + min(rank, more) for rank in range(size)]
    return [begin + step if step < each + (rank < more) else None for rank, begin in enumerate(begins)]


def evaluation(whole: int, rank: int, size: int) -> range:
    """The batches of `rank`: no two ranks have the same, and some may have one more."""
    return range(rank, whole, size)


def in_order(parts: Sequence[Sequence[T]]) -> list[T]:
    """What the ranks have made of their batches of an ``evaluation``, in the order of the batches."""
    rounds = max(map(len, parts), default=0)
    return [part[number] for number in range(rounds) for part in parts if number < len(part)]


def items_of(idxs: Sequence[T], bs: int, batches: Sequence[int]) -> list[T]:
    """The items of these batches, one after the other."""
    return [item for batch in batches for item in idxs[batch * bs : (batch + 1) * bs]]
