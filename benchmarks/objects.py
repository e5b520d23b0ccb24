"""One push of an array to every rank: ddip against ipyparallel's own push, on the same engines, in turns.

Usage: push.py [PUSHES] [RANKS ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from ddip import Group

SIZES = (1 << 10, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
"""Bytes."""


def seconds(push: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    push()
    return time.perf_counter() - began


def main() -> None:
    """Print one table."""
    pushes = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"one push, median of {pushes} in turns, seconds")
    print(f"{'ranks':>5} {'KiB':>8} {'ddip':>8} {'raw':>8} {'ddip/raw':>9}")
    for count in sys.argv[2:] or ["2", "4"]:
        with Group(int(count)) as group:
            client = group.cluster.client
            view = client.direct_view([member.engine for member in group.members])
            for size in SIZES:
                values = {"array": np.random.default_rng(0).integers(0, 256, size, np.uint8)}
                raw_push = lambda: view.push(values, block=True)  # noqa: B023, E731
                pairs = [(seconds(lambda: group.push(values)), seconds(raw_push)) for _ in range(pushes)]  # noqa: B023
                ours, raw = (statistics.median(column) for column in zip(*pairs, strict=True))
                print(f"{count:>5} {size >> 10:>8} {ours:8.3f} {raw:8.3f} {ours / raw:9.2f}", flush=True)


if __name__ == "__main__":
    main()
