"""What each process pays for a rank more, and what follows for many hosts: a model, beside what was measured.

Usage: scale.py [CELLS] [RANKS ...]

The CPU time that an empty cell and a start take in the notebook, in the controller, and in each rank is measured at
several sizes; a straight line through each says what one rank more costs. On one machine, whose cores do all of that,
it gives the seconds that a cell takes: they stand beside those that were measured. Where the ranks have cores of their
own, only the notebook and the controller grow, each on one core, and both work at the same time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from rows import Row, seconds, show

from ddip import Group
from ddip.cluster.processes import preload_client

MANY = 1000
"""Ranks of the prediction."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of something, by whose they are."""

    notebook: float
    controller: float
    """With the preload process, which forks."""
    rank: float
    """Of one of them, on average."""

    @classmethod
    def of(cls, do: Callable[[], Group]) -> tuple[Cost, Group]:
        """What `do` costs; the group that it returns has the ranks."""
        before = _used(psutil.Process().children(recursive=True))
        mine = _seconds(psutil.Process())
        group = do()
        mine = _seconds(psutil.Process()) - mine
        after = _used(psutil.Process().children(recursive=True))
        spent = {pid: used - before.get(pid, 0.0) for pid, used in after.items()}
        ranks = [spent.pop(member.pid) for member in group.members]
        return cls(mine, sum(spent.values()), statistics.mean(ranks)), group

    def over(self, times: int) -> Cost:
        """Of one of so many."""
        return Cost(self.notebook / times, self.controller / times, self.rank / times)


def _seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _used(processes: Sequence[psutil.Process]) -> dict[int, float]:
    return {process.pid: _seconds(process) for process in processes}


def line(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """What there is without a rank, and for each rank more."""
    more, once = statistics.linear_regression(sizes, values)
    return once, more


def main() -> None:
    """Print one table."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    sizes = list(map(int, sys.argv[2:])) or [2, 4, 8, 16, 32, 64]
    found: dict[str, list[Cost]] = {"an empty cell": [], "a start": []}
    took: dict[str, list[list[float]]] = {"an empty cell": [], "a start": []}
    preload_client.begin().asleep.wait()
    for size in sizes:
        began = time.perf_counter()
        start, group = Cost.of(lambda: Group(size, timeout=120))  # noqa: B023
        took["a start"].append([time.perf_counter() - began])
        found["a start"].append(start)
        with group:
            group.run("pass")

            def run() -> Group:
                took["an empty cell"].append([seconds(lambda: group.run("pass")) for _ in range(cells)])  # noqa: B023
                return group  # noqa: B023

            found["an empty cell"].append(Cost.of(run)[0].over(cells))
    rows, cores = [], os.cpu_count() or 1
    for what, costs in found.items():
        once, more = line(sizes, [cost.notebook for cost in costs])
        controller_once, controller_more = line(sizes, [cost.controller for cost in costs])
        rank_once, rank_more = line(sizes, [cost.rank for cost in costs])
        for size, measured in zip(sizes, took[what], strict=True):
            alone = once + controller_once + (more + controller_more + rank_once + rank_more * size) * size
            model = {f"the model, {cores} cores": [1e3 * alone / cores] * len(measured)}
            rows.append(Row(what, "ms", size, [1e3 * one for one in measured], model))
        for name, costs_more in (("the notebook", more), ("the controller", controller_more), ("a rank", rank_more)):
            rows.append(Row(f"{what}: CPU of {name} for each rank more", "ms", 1, [1e3 * costs_more]))
        rows.append(Row(f"{what}: CPU of a rank by itself", "ms", 1, [1e3 * rank_once]))
        slowest = max(once + more * MANY, controller_once + controller_more * MANY)
        rows.append(Row(f"{what}: the model, with cores for all ranks", "ms", MANY, [1e3 * slowest]))
    show("scale", rows)


if __name__ == "__main__":
    main()
