"""Measure the kernel while a cell in the background writes on all ranks: its CPU, messages, latency, and the stop.

Usage: background.py [ROUNDS] [SECONDS] [RANKS]

Each rank writes at a rate of 100 or 1000 per second: lines, displays, updates of a display, lines that replace
themselves (as progress bars do), and values of a widget. The notebook shows all ranks, in tabs.
"""

from __future__ import annotations

import sys
import time

import psutil
from kernel import Kernel, running_kernel
from rows import Row, report_rows

KINDS = {
    "lines": ("", "print('line', i, 'of rank', rank, 'x' * 40)"),
    "displays": ("", "display(f'display {i}')"),
    "updates": ("handle = display(0, display_id=True)", "handle.update(f'update {i}')"),
    "replaced lines": ("", "print(f'\\rstep {i}', end='')"),
    "widget values": ("import ipywidgets\nbar = ipywidgets.IntProgress()\ndisplay(bar)", "bar.value = i % 100"),
}
WRITE = """%%dip --bg -S all
import time
from IPython.display import display
{before}
began, i = time.time(), 0
while True:
    {write}
    i += 1
    time.sleep(max(0, began + i / {rate} - time.time()))"""
RATES = (100, 1000)
CELLS = 20


class Measured:
    """What was measured of one kind at one rate, or of idle ranks; one value per round or cell."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.cpu_percents: list[float] = []
        self.messages: list[float] = []
        self.stops: list[float] = []

    def add_round(self, notebook: Kernel, seconds: float) -> None:
        """Measure for `seconds`, then during some cells."""
        kernel = psutil.Process(notebook.manager.provisioner.process.pid)  # type: ignore[union-attr]
        before, began = sum(kernel.cpu_times()[:2]), time.perf_counter()
        messages = notebook.count_messages(seconds)
        passed = time.perf_counter() - began
        self.cpu_percents.append(100 * (sum(kernel.cpu_times()[:2]) - before) / passed)
        self.messages.append(messages / passed)
        for _ in range(CELLS):
            self.latencies.append(1e3 * notebook.run("1 + 1"))
            time.sleep(0.05)


def main() -> None:
    """Print one table of results."""
    rounds, seconds, size = (int(typed) for typed in [*sys.argv[1:], *["3", "10", "2"][len(sys.argv) - 1 :]])
    rows = []
    with running_kernel() as notebook:
        notebook.run(f"%load_ext ddip\n%makedip -n {size}")
        for kind, (before, write) in KINDS.items():
            for rate in RATES:
                idle, busy = Measured(), Measured()
                for _ in range(rounds):
                    idle.add_round(notebook, min(seconds, 2))
                    notebook.run(WRITE.format(before=before, write=write, rate=rate))
                    busy.add_round(notebook, seconds)
                    busy.stops.append(notebook.run("%dipstop"))
                    notebook.run("%dipwait", may_fail=True)  # it reports the stopped cell
                what = f"{rate} {kind} a second"
                rows += [
                    Row(f"{what}: 1 + 1", "ms", size, busy.latencies, {"idle ranks": idle.latencies}),
                    Row(f"{what}: CPU of the kernel", "% of a core", size, busy.cpu_percents),
                    Row(f"{what}: messages to the page", "a second", size, busy.messages),
                    Row(f"{what}: %dipstop", "s", size, busy.stops),
                ]
                print(*(row.table_row() for row in rows[-4:]), sep="\n", flush=True)
    report_rows("background", rows)


if __name__ == "__main__":
    main()
