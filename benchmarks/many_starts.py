"""Many starts in a row, with every core busy with something else: does each one come, and how long does it take?

Usage: many_starts.py [STARTS] [RANKS ...]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from ddip import Group

REDUCE = "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); assert x == world_size"


def main() -> None:
    """Print one table; fails if a start does."""
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        print(
            f"{starts} starts in a row beside {len(load)} busy processes, seconds to the first all_reduce, and to stop"
        )
        print(f"{'ranks':>5} {'median':>7} {'longest':>8} {'stop':>7} {'longest':>8}")
        for ranks in sys.argv[2:] or ["2", "4", "8"]:
            times, stops = [], []
            for _ in range(starts):
                began = time.perf_counter()
                group = Group(int(ranks))
                group.run(REDUCE)
                ended = time.perf_counter()
                group.shutdown()
                times.append(ended - began)
                stops.append(time.perf_counter() - ended)
            medians = statistics.median(times), statistics.median(stops)
            print(f"{ranks:>5} {medians[0]:7.2f} {max(times):8.2f} {medians[1]:7.2f} {max(stops):8.2f}", flush=True)
    finally:
        for process in load:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
