"""Time an empty cell on every rank against ipyparallel's execute, alternating on the same engines.

Usage: cell.py [CELLS] [RANKS ...]

Then time both after a pause that lets the cores enter sleep states, and after as many cells that failed on all ranks.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from rows import Row, report_rows, time_call

from ddip import CellError, Group
from ddip.cluster.ipyparallel.own_cluster import OwnCluster

PAUSE = 0.3


def measure_cells(
    cells: int, group: Group, before: Callable[[], object] = lambda: None
) -> tuple[list[float], list[float]]:
    """Return the milliseconds per cell of ddip and ipyparallel, alternating; call `before` each time."""
    assert isinstance(group.cluster, OwnCluster)
    client = group.cluster.client
    view = client.direct_view([member.engine for member in group.members])
    ours, raw = [], []
    for _ in range(cells):
        before()
        ours.append(1e3 * time_call(lambda: group.run("pass")))
        before()
        raw.append(1e3 * time_call(lambda: view.execute("pass", silent=False, block=True)))
    return ours, raw


def main() -> None:
    """Print one table of results."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    rows = []
    for size in map(int, sys.argv[2:] or ["2", "4", "8", "16"]):

        def add_row(what: str, ours: list[float], raw: list[float]) -> None:
            rows.append(Row(what, "ms", size, ours, {"ipyparallel's execute": raw}))  # noqa: B023

        with Group(size, timeout=120) as group:
            group.run("pass")
            add_row("an empty cell", *measure_cells(cells, group))
            add_row("an empty cell after a pause", *measure_cells(cells // 10, group, lambda: time.sleep(PAUSE)))
            for _ in range(cells):
                with contextlib.suppress(CellError):
                    group.run("raise ValueError")
            add_row(f"an empty cell after {cells} that failed", *measure_cells(cells, group))
    report_rows("cell", rows)


if __name__ == "__main__":
    main()
