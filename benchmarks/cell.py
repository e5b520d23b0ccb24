"""One empty cell on every rank: ddip against ipyparallel's own execute, on the same engines, in turns.

Usage: cell.py [CELLS] [RANKS ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from ddip import Group


def milliseconds(run: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Print one table."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"one empty cell, median of {cells} in turns, milliseconds")
    print(f"{'ranks':>5} {'ddip':>7} {'raw':>7} {'ddip/raw':>9}")
    for size in sys.argv[2:] or ["2", "4"]:
        with Group(int(size)) as group:
            client = group.cluster.client
            view = client.direct_view([member.engine for member in group.members])
            raw_run = lambda: view.execute("pass", silent=False, block=True)  # noqa: B023, E731
            pairs = [(milliseconds(lambda: group.run("pass")), milliseconds(raw_run)) for _ in range(cells)]
        ours, raw = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{size:>5} {ours:7.1f} {raw:7.1f} {ours / raw:9.2f}")


if __name__ == "__main__":
    main()
