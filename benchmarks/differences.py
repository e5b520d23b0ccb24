"""Measure what comparing the ranks costs, after a fault and beside good cells.

Usage: differences.py [ROUNDS] [MILLIONS OF PARAMETERS ...]

Two ranks hold a model and Adam's state, which has two more numbers per parameter. A cell fails on both ranks; the next
cell waits until the ranks are compared. Alternating with it: a cell that sums the same bytes once, and an empty cell
after a good one, with and without these variables.
"""

from __future__ import annotations

import contextlib
import sys
import time

from rows import Row, report_rows, time_call

from ddip import CellError, Group

MAKE = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range(10)])
opt = torch.optim.Adam(net.parameters())
net(torch.ones(1, {width})).sum().backward()
opt.step()
opt.zero_grad()
tensors = [*net.parameters(), *(part for state in opt.state.values() for part in state.values())]
"""
PASS = """
for one in tensors:
    flat = one.detach().reshape(-1)
    flat[: len(flat) // 2 * 2].view(torch.int64).sum()
"""
CELLS, IDLE_SECONDS = 20, 2.0


def empty_cells(group: Group) -> float:
    """Time empty cells, one right after the other; return the milliseconds of each."""

    def run_all() -> None:
        for _ in range(CELLS):
            group.run("pass")

    return 1e3 * time_call(run_all) / CELLS


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    rows = []
    for millions in map(int, sys.argv[2:] or ["1", "10", "100"]):
        width = round((millions * 1e5) ** 0.5)
        with Group(2, timeout=120) as group, Group(2, timeout=120) as bare:
            group.run(MAKE.format(width=width))
            faults, passes, cells, without = [], [], [], []
            for _ in range(rounds):
                time.sleep(IDLE_SECONDS)
                with contextlib.suppress(CellError):
                    group.run("raise ValueError")
                faults.append(1e3 * time_call(lambda: group.run("pass")))
                passes.append(1e3 * time_call(lambda: group.run(PASS)))
                cells.append(empty_cells(group))
                without.append(empty_cells(bare))
            what = f"{millions} M parameters and Adam"
            rows.append(
                Row(f"the next cell after a fault, {what}", "ms", 2, faults, {"one pass over the bytes": passes})
            )
            rows.append(Row(f"an empty cell, {what}", "ms", 2, cells, {"without variables": without}))
    report_rows("differences", rows)


if __name__ == "__main__":
    main()
