"""Start many groups in a row while every core is busy: does each start succeed, and how long does it take?

Usage: many_starts.py [STARTS] [RANKS ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from rows import Row, report_rows

from ddip import Group

REDUCE = "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); assert x == world_size"


def main() -> None:
    """Print one table; fail if a start fails."""
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        rows = []
        for ranks in map(int, sys.argv[2:] or ["2", "4", "8"]):
            times, stops = [], []
            for _ in range(starts):
                began = time.perf_counter()
                group = Group(ranks)
                group.run(REDUCE)
                ended = time.perf_counter()
                group.shutdown()
                times.append(ended - began)
                stops.append(time.perf_counter() - ended)
            where = f"of {starts}, beside {len(load)} busy processes"
            rows.append(Row(f"a start {where}", "s", ranks, times))
            rows.append(Row(f"the longest start {where}", "s", ranks, [max(times)]))
            rows.append(Row(f"a stop {where}", "s", ranks, stops))
            rows.append(Row(f"the longest stop {where}", "s", ranks, [max(stops)]))
    finally:
        for process in load:
            process.kill()
            process.wait()
    report_rows("many_starts", rows)


if __name__ == "__main__":
    main()
