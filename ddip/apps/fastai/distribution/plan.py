"""Assign batches to ranks. All functions are pure.

The unit is a batch as a single process would make it. Batches are never split, so metrics and padding see the same
items as in one process. No item counts twice: if the last step has no batch for a rank, the rank repeats one of the
step's batches with weight 0. With ``drop_last``, such a step is dropped, as one process would drop its last batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The batches of one rank in one training epoch."""

    batches: tuple[int, ...]
    """Numbers of the batches, one per step; all ranks have the same number of steps."""
    weights: tuple[float, ...]
    """Factor of the loss in each step: 1 if all ranks have the same number of items in the step.

    The mean over the ranks of weight times mean loss is the mean over all items of the step.
    """
    items: tuple[float, ...]
    """Number of items in each step, as a mean over the ranks."""


def sizes_of(n: int, bs: int, drop_last: bool) -> list[int]:
    """Return the size of each batch of a single process, for `n` items and batch size `bs`."""
    sizes = [min(bs, n - first) for first in range(0, n, bs)]
    return [size for size in sizes if size == bs or not drop_last]


def count_steps(batches: int, size: int, *, drop_last: bool) -> int:
    """Return the number of steps that `size` ranks need for this number of `batches`.

    It is at least 1 if there is a batch. `drop_last`: leave out a last step that has no batch for some rank.
    """
    steps = batches // size if drop_last else -(-batches // size)
    return max(steps, min(batches, 1))


def assign_training_batches(
    sizes: Sequence[int], rank: int, size: int, *, in_runs: bool = False, drop_last: bool = False
) -> Plan:
    """Return the plan of one of `size` ranks for batches of these `sizes`.

    In step s, the ranks have the batches s * size, s * size + 1, ...: together, they form batch s of one process whose
    batches are `size` times as large. `drop_last` drops a last step that has no batch for some rank. With `in_runs`,
    each rank has consecutive batches, for models that carry state from batch to batch.
    """
    steps = count_steps(len(sizes), size, drop_last=drop_last)
    table = [_batches_of_step(len(sizes), step, size, in_runs) for step in range(steps)]
    batches, weights, means = [], [], []
    for row in table:
        counts = [0 if batch is None else sizes[batch] for batch in row]
        first = next(batch for batch in row if batch is not None)
        batch = row[rank]
        batches.append(first if batch is None else batch)
        weights.append(counts[rank] * size / sum(counts))
        means.append(sum(counts) / size)
    return Plan(tuple(batches), tuple(weights), tuple(means))


def _batches_of_step(whole: int, step: int, size: int, in_runs: bool) -> list[int | None]:
    """Return the number of each rank's batch in `step`; None for ranks that have none left."""
    if not in_runs:
        return [batch if batch < whole else None for batch in range(step * size, (step + 1) * size)]
    each, more = divmod(whole, size)
    begins = [rank * each + min(rank, more) for rank in range(size)]
    return [begin + step if step < each + (rank < more) else None for rank, begin in enumerate(begins)]


def assign_evaluation_batches(whole: int, rank: int, size: int) -> range:
    """Return the numbers of the batches that `rank` evaluates; each of the `whole` batches is on one rank."""
    return range(rank, whole, size)


def in_order(parts: Sequence[Sequence[T]]) -> list[T]:
    """Return the ranks' results for the batches of an `assign_evaluation_batches`, in the order of the batches."""
    rounds = max(map(len, parts), default=0)
    return [part[number] for number in range(rounds) for part in parts if number < len(part)]


def items_of(idxs: Sequence[T], bs: int, batches: Sequence[int]) -> list[T]:
    """Return the items of the batches with these numbers, in order; `idxs`: all items, `bs`: batch size."""
    return [item for batch in batches for item in idxs[batch * bs : (batch + 1) * bs]]
