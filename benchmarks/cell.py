"""One empty cell on every rank: ddip against ipyparallel's own execute, on the same engines, in turns.

Usage: cell.py [CELLS] [RANKS ...]

Then the same after a pause, in which the machine's cores have gone to sleep; and after cells that have failed on all
ranks, as many as there were before.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from rows import Row, seconds, show

from ddip import CellError, Group
from ddip.cluster.ipyparallel.own_cluster import OwnCluster

PAUSE = 0.3


def measured(cells: int, group: Group, before: Callable[[], object] = lambda: None) -> tuple[list[float], list[float]]:
    """Milliseconds of each, in turns; each time something is done before."""
    assert isinstance(group.cluster, OwnCluster)
    client = group.cluster.client
    view = client.direct_view([member.engine for member in group.members])
    ours, theirs = [], []
    for _ in range(cells):
        before()
        ours.append(1e3 * seconds(lambda: group.run("pass")))
        before()
        theirs.append(1e3 * seconds(lambda: view.execute("pass", silent=False, block=True)))
    return ours, theirs


def main() -> None:
    """Print one table."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    rows = []
    for size in map(int, sys.argv[2:] or ["2", "4", "8", "16"]):

        def row(what: str, ours: list[float], theirs: list[float]) -> None:
            rows.append(Row(what, "ms", size, ours, {"ipyparallel's execute": theirs}))  # noqa: B023

        with Group(size, timeout=120) as group:
            group.run("pass")
            row("an empty cell", *measured(cells, group))
            row("an empty cell after a pause", *measured(cells // 10, group, lambda: time.sleep(PAUSE)))
            for _ in range(cells):
                with contextlib.suppress(CellError):
                    group.run("raise ValueError")
            row(f"an empty cell after {cells} that failed", *measured(cells, group))
    show("cell", rows)


if __name__ == "__main__":
    main()
