"""What ``%dipwatch`` costs: CPU of all processes together, with and without it, in turns; on idle and on busy ranks.

Usage: watch.py [ROUNDS] [SECONDS] [RANKS]

Busy ranks wait for one that is slow, twice a second: what ranks that compute take would hide what is measured here,
and for a rank that waits, the view has the most to look at.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
from jupyter_client.manager import start_new_kernel
from rows import Row, show

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
        """Send a cell."""
        return str(self.client.execute(code))

    def run(self, code: str) -> None:
        """Run a cell to its end."""
        request = self.begin(code)
        while True:
            reply = self.client.get_shell_msg(timeout=180)
            if reply["parent_header"].get("msg_id") == request:
                assert reply["content"]["status"] == "ok", reply["content"]
                return

    def cpu(self) -> float:
        """Seconds that all processes have run so far; the system counts them by the nanosecond."""
        total = 0
        for process in self._processes:
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def share(self, seconds: float, busy: bool) -> float:
        """Per cent of a core that all of them take for so many seconds."""
        request = self.begin(WAIT.format(seconds=seconds + 3)) if busy else ""
        time.sleep(1.5)  # it has begun; what comes before is over
        began, before = time.monotonic(), self.cpu()
        time.sleep(seconds)
        used = 100 * (self.cpu() - before) / (time.monotonic() - began)
        while busy:
            if self.client.get_shell_msg(timeout=180)["parent_header"].get("msg_id") == request:
                break
        return used


def main() -> None:
    """Print one table."""
    rounds, seconds, size = (int(typed) for typed in [*sys.argv[1:], *["6", "20", "8"][len(sys.argv) - 1 :]])
    notebook = Notebook(size)
    rows = []
    try:
        for busy in (False, True):
            watched, alone = [], []
            for _ in range(rounds):
                notebook.run("%dipwatch")
                watched.append(notebook.share(seconds, busy))
                notebook.run("%dipwatch off")
                alone.append(notebook.share(seconds, busy))
            what = "ranks that wait" if busy else "idle ranks"
            costs = [one - other for one, other in zip(watched, alone, strict=True)]
            rows.append(Row(f"CPU of {what}, with %dipwatch", "% of a core", size, watched, {"without it": alone}))
            rows.append(Row(f"what %dipwatch costs, {what}", "% of a core", size, costs))
    finally:
        notebook.run("%makedip -k")
        notebook.client.stop_channels()
        notebook.manager.shutdown_kernel()
    show("watch", rows)


if __name__ == "__main__":
    main()
