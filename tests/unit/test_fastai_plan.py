"""The assignment of batches to ranks."""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ddip

PATH = Path(ddip.__file__).parent / "apps" / "fastai" / "distribution" / "plan.py"  # loaded by path, without fastai
spec = importlib.util.spec_from_file_location("plan_of_fastai", PATH)
assert spec is not None and spec.loader is not None
plan = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = plan
spec.loader.exec_module(plan)

CASES = list(product([1, 7, 8, 9, 31, 32, 33, 101], [1, 4, 8], [False, True], [1, 2, 3, 4]))


@pytest.mark.parametrize("in_runs", [False, True])
def test_every_batch_counts_once_and_ranks_have_equal_steps(in_runs: bool) -> None:
    for n, bs, drop_last, size in CASES:
        sizes = plan.sizes_of(n, bs, drop_last)
        plans = [plan.assign_training_batches(sizes, rank, size, in_runs=in_runs) for rank in range(size)]
        assert len({len(one.batches) for one in plans}) == 1
        counted = [batch for one in plans for batch, weight in zip(one.batches, one.weights, strict=True) if weight]
        assert sorted(counted) == list(range(n // bs if drop_last else -(-n // bs)))


def plans_of(n: int, bs: int, drop_last: bool, size: int) -> list[Any]:
    """Return the plan of each rank."""
    sizes = plan.sizes_of(n, bs, drop_last)
    return [plan.assign_training_batches(sizes, rank, size, drop_last=drop_last) for rank in range(size)]


def test_steps_are_the_larger_batches_of_a_single_process() -> None:
    for n, bs, drop_last, size in CASES:
        plans = plans_of(n, bs, drop_last, size)
        larger = plan.sizes_of(n, bs * size, drop_last) or plan.sizes_of(n, bs, drop_last)[:1]
        assert len(plans[0].batches) == len(larger)
        kept = n // bs * bs if drop_last else n
        whole = list(range(kept))
        for step in range(len(plans[0].batches)):
            shares = [plan.items_of(whole, bs, [one.batches[step]]) for one in plans if one.weights[step]]
            assert sum(shares, []) == whole[step * bs * size : (step + 1) * bs * size]


def test_weighted_means_over_ranks_equal_the_mean_over_items() -> None:
    for n, bs, drop_last, size in CASES:
        plans = plans_of(n, bs, drop_last, size)
        whole = list(range(n // bs * bs if drop_last else n))
        for step in range(len(plans[0].batches)):
            shares = [plan.items_of(whole, bs, [one.batches[step]]) for one in plans]
            mean = sum(one.weights[step] * sum(s) / len(s) for one, s in zip(plans, shares, strict=True)) / size
            items = whole[step * bs * size : (step + 1) * bs * size]
            assert mean == pytest.approx(sum(items) / len(items))
            assert plans[0].items[step] * size == pytest.approx(len(items))


def test_each_rank_reads_consecutive_batches() -> None:
    for rank in range(3):
        batches = plan.assign_training_batches([10] * 10, rank, 3, in_runs=True)
        real = [batch for batch, weight in zip(batches.batches, batches.weights, strict=True) if weight]
        assert real == list(range(real[0], real[0] + len(real)))


def test_results_of_ranks_return_in_the_order_of_items() -> None:
    for whole, size in product(range(8), [1, 2, 3, 4]):
        parts = [list(plan.assign_evaluation_batches(whole, rank, size)) for rank in range(size)]
        assert plan.in_order(parts) == list(range(whole))
