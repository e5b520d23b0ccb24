"""Measure what each process pays per additional rank, and predict many hosts with a model.

Usage: scale.py [CELLS] [RANKS ...]

Measures, at several sizes, the CPU time that an empty cell and a start take in the notebook, in the controller, and in
each rank; the slope of a line fitted to each is the cost per additional rank. On one machine, whose cores do all of
that work, the model gives the seconds of a cell, printed beside the measured ones. If the ranks have their own cores,
only the notebook and the controller grow, each on one core, and both work at the same time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from rows import Row, report_rows, time_call

from ddip import Group
from ddip.cluster.processes import preload_client

MANY = 1000
"""Number of ranks that the model predicts."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of an operation, by process."""

    notebook: float
    controller: float
    """Includes the preload process, which forks."""
    rank: float
    """Mean over ranks."""

    @classmethod
    def measure(cls, do: Callable[[], Group]) -> tuple[Cost, Group]:
        """Measure what `do` costs; it returns a group with the ranks."""
        before = _cpu_seconds_by_pid(psutil.Process().children(recursive=True))
        mine = _cpu_seconds(psutil.Process())
        group = do()
        mine = _cpu_seconds(psutil.Process()) - mine
        after = _cpu_seconds_by_pid(psutil.Process().children(recursive=True))
        spent = {pid: used - before.get(pid, 0.0) for pid, used in after.items()}
        ranks = [spent.pop(member.pid) for member in group.members]
        return cls(mine, sum(spent.values()), statistics.mean(ranks)), group

    def divided_by(self, times: int) -> Cost:
        """Divide by a number of repetitions."""
        return Cost(self.notebook / times, self.controller / times, self.rank / times)


def _cpu_seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _cpu_seconds_by_pid(processes: Sequence[psutil.Process]) -> dict[int, float]:
    return {process.pid: _cpu_seconds(process) for process in processes}


def fit_line(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Fit a line; return the cost without ranks and the cost per additional rank."""
    more, once = statistics.linear_regression(sizes, values)
    return once, more


def main() -> None:
    """Print one table of results."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    sizes = list(map(int, sys.argv[2:])) or [2, 4, 8, 16, 32, 64]
    found: dict[str, list[Cost]] = {"an empty cell": [], "a start": []}
    took: dict[str, list[list[float]]] = {"an empty cell": [], "a start": []}
    preload_client.ensure_process().asleep.wait()
    for size in sizes:
        began = time.perf_counter()
        start, group = Cost.measure(lambda: Group(size, timeout=120))  # noqa: B023
        took["a start"].append([time.perf_counter() - began])
        found["a start"].append(start)
        with group:
            group.run("pass")

            def run_cells() -> Group:
                took["an empty cell"].append([time_call(lambda: group.run("pass")) for _ in range(cells)])  # noqa: B023
                return group  # noqa: B023

            found["an empty cell"].append(Cost.measure(run_cells)[0].divided_by(cells))
    rows, cores = [], os.cpu_count() or 1
    for what, costs in found.items():
        once, more = fit_line(sizes, [cost.notebook for cost in costs])
        controller_once, controller_more = fit_line(sizes, [cost.controller for cost in costs])
        rank_once, rank_more = fit_line(sizes, [cost.rank for cost in costs])
        for size, measured in zip(sizes, took[what], strict=True):
            alone = once + controller_once + (more + controller_more + rank_once + rank_more * size) * size
            model = {f"the model, {cores} cores": [1e3 * alone / cores] * len(measured)}
            rows.append(Row(what, "ms", size, [1e3 * one for one in measured], model))
        for name, costs_more in (("the notebook", more), ("the controller", controller_more), ("a rank", rank_more)):
            rows.append(Row(f"{what}: CPU of {name} for each rank more", "ms", 1, [1e3 * costs_more]))
        rows.append(Row(f"{what}: CPU of a rank by itself", "ms", 1, [1e3 * rank_once]))
        slowest = max(once + more * MANY, controller_once + controller_more * MANY)
        rows.append(Row(f"{what}: the model, with cores for all ranks", "ms", MANY, [1e3 * slowest]))
    report_rows("scale", rows)


if __name__ == "__main__":
    main()
