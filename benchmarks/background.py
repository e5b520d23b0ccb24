"""Time ``1 + 1`` in the notebook's kernel while ranks print in the background, and with idle ranks.

Usage: background.py [ROUNDS] [RANKS ...]

Each rank prints 1000 lines per second. Cells go to a real kernel over its protocol, as from JupyterLab.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from jupyter_client.manager import start_new_kernel
from rows import Row, report_rows

PRINTS = """%%dip --bg -S {see}
import time
from typing import Any
began, lines = time.time(), 0
while time.time() < began + {seconds}:
    print("line", lines, "of rank", rank, "x" * 40)
    lines += 1
    time.sleep(max(0, began + lines / 1000 - time.time()))"""
CELLS = 40


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    rows = []
    for size in map(int, sys.argv[2:] or ["4"]):
        manager, client = start_new_kernel()
        try:

            def time_cell(code: str, client: Any = client) -> float:
                began = time.perf_counter()
                reply = client.execute_interactive(code, output_hook=lambda message: None, timeout=120)
                assert reply["content"]["status"] == "ok", reply
                return 1e3 * (time.perf_counter() - began)

            def time_cells() -> list[float]:
                times = []
                for _ in range(CELLS):
                    times.append(time_cell("1 + 1"))
                    time.sleep(0.05)
                return times

            time_cell(f"%load_ext ddip\n%makedip -n {size} --yes")
            idle: list[float] = []
            one: list[float] = []
            all_ranks: list[float] = []
            for _ in range(rounds):
                idle += time_cells()
                for see, found in (("0", one), ("all", all_ranks)):
                    time_cell(PRINTS.format(see=see, seconds=4 + CELLS * 0.07))
                    time.sleep(0.5)
                    found += time_cells()
                    time_cell("%dipwait")
            rows.append(Row("1 + 1 while rank 0 prints 1000 lines a second", "ms", size, one, {"idle ranks": idle}))
            rows.append(Row("1 + 1 while all ranks do, in tabs", "ms", size, all_ranks, {"idle ranks": idle}))
        finally:
            client.stop_channels()
            manager.shutdown_kernel()
    report_rows("background", rows)


if __name__ == "__main__":
    main()
