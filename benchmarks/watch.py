"""Measure the CPU cost of ``%dipwatch``: all processes, with and without it, alternating, idle and busy.

Usage: watch.py [ROUNDS] [SECONDS] [RANKS]

Busy ranks wait for a slow one, twice per second: the CPU time of ranks that compute would hide the cost, and a rank
that waits gives the view the most to show.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
from jupyter_client.manager import start_new_kernel
from rows import Row, report_rows

WAIT = """%%dip -q
import time, torch

until = time.time() + {seconds}
goes_on = torch.ones(())
while goes_on:
    if rank == 1: time.sleep(0.5)
    torch.distributed.barrier()
    goes_on = torch.tensor(float(time.time() < until))
    torch.distributed.broadcast(goes_on, 0)
"""


class Notebook:
    """A kernel with ranks."""

    def __init__(self, size: int) -> None:
        self.manager, self.client = start_new_kernel()
        self.run(f"%load_ext ddip\n%makedip -n {size}")
        self.run(WAIT.format(seconds=1))  # imports
        self._processes = self._family()

    def _family(self) -> list[psutil.Process]:
        kernel = psutil.Process(self.manager.provisioner.process.pid)  # type: ignore[union-attr]
        return [kernel, *kernel.children(recursive=True)]

    def begin(self, code: str) -> str:
        """Send a cell without waiting for it."""
        return str(self.client.execute(code))

    def run(self, code: str) -> None:
        """Run a cell to its end."""
        request = self.begin(code)
        while True:
            reply = self.client.get_shell_msg(timeout=180)
            if reply["parent_header"].get("msg_id") == request:
                assert reply["content"]["status"] == "ok", reply["content"]
                return

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes so far; the kernel counts them in nanoseconds."""
        total = 0
        for process in self._processes:
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def measure_cpu_percent(self, seconds: float, busy: bool) -> float:
        """Return the CPU use of all processes over `seconds`, in percent of one core."""
        request = self.begin(WAIT.format(seconds=seconds + 3)) if busy else ""
        time.sleep(1.5)  # the cell runs by now, and earlier work has ended
        began, before = time.monotonic(), self.cpu_seconds()
        time.sleep(seconds)
        used = 100 * (self.cpu_seconds() - before) / (time.monotonic() - began)
        while busy:
            if self.client.get_shell_msg(timeout=180)["parent_header"].get("msg_id") == request:
                break
        return used


def main() -> None:
    """Print one table of results."""
    rounds, seconds, size = (int(typed) for typed in [*sys.argv[1:], *["6", "20", "8"][len(sys.argv) - 1 :]])
    notebook = Notebook(size)
    rows = []
    try:
        for busy in (False, True):
            watched, alone = [], []
            for _ in range(rounds):
                notebook.run("%dipwatch")
                watched.append(notebook.measure_cpu_percent(seconds, busy))
                notebook.run("%dipwatch off")
                alone.append(notebook.measure_cpu_percent(seconds, busy))
            what = "ranks that wait" if busy else "idle ranks"
            costs = [with_view - without for with_view, without in zip(watched, alone, strict=True)]
            rows.append(Row(f"CPU of {what}, with %dipwatch", "% of a core", size, watched, {"without it": alone}))
            rows.append(Row(f"what %dipwatch costs, {what}", "% of a core", size, costs))
    finally:
        notebook.run("%makedip -k")
        notebook.client.stop_channels()
        notebook.manager.shutdown_kernel()
    report_rows("watch", rows)


if __name__ == "__main__":
    main()
