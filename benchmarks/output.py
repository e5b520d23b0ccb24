"""Time what a person sees: a cell on ranks against the same cell in the notebook's kernel, alternating.

Usage: output.py [ROUNDS] [RANKS]
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jupyter_client.manager import start_new_kernel
from rows import Row, report_rows

PRINTS = 200_000
WRITE = "import time\nprint(time.time())\ntime.sleep(0.6)"
LOOP = f"for i in range({PRINTS}): print('line', i)"
MODEL = "import torch\nmodel = torch.nn.Linear(2, 2)"


class Kernel:
    """The kernel of a notebook."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel()

    def run(self, code: str, on_first_text: Callable[[str], None] = lambda text: None) -> float:
        """Run a cell and return its seconds; `on_first_text` gets the first text as soon as it arrives."""
        began = time.perf_counter()
        request = self.client.execute(code)
        seen = False
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream" and not seen:
                seen = True
                on_first_text(message["content"]["text"])
            if message["msg_type"] == "error":
                sys.exit("\n".join(message["content"]["traceback"]))
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        self.client.get_shell_msg(timeout=10)
        return time.perf_counter() - began

    def latency(self, magic: str) -> float:
        """Return the milliseconds from printing a line until it arrives here."""
        late: list[float] = []
        self.run(magic + WRITE, lambda text: late.append(1e3 * (time.time() - float(text))))
        return late[0]

    def ask(self, kind: str, code: str) -> float:
        """Return the milliseconds until a completion or help request is answered."""
        began = time.perf_counter()
        getattr(self.client, kind)(code, len(code))
        reply: Any = self.client.get_shell_msg(timeout=10)
        assert reply["content"].get("matches") or reply["content"].get("found"), reply["content"]
        return 1e3 * (time.perf_counter() - began)


@contextlib.contextmanager
def running_kernel() -> Iterator[Kernel]:
    """Start a kernel, and shut it down at the end."""
    started = Kernel()
    try:
        yield started
    finally:
        started.client.stop_channels()
        started.manager.shutdown_kernel()


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def add_pair(what: str, unit: str, ours: float, in_kernel_only: float) -> None:
        found.setdefault((what, unit), []).append((ours, in_kernel_only))

    with running_kernel() as notebook:
        notebook.run(f"%load_ext ddip\n%makedip -n {size}\n{MODEL}")
        notebook.run(f"%%dip\n{MODEL}")
        for kind, code in (("complete", "model."), ("inspect", "model.forward")):
            notebook.ask(kind, code), notebook.ask(kind, f"%%dip\n{code}")  # the first request imports modules
        for _ in range(rounds):
            add_pair("a printed line is there", "ms", notebook.latency("%%dip\n"), notebook.latency(""))
            add_pair("the same, of all ranks, in labels", "ms", _latency_of_all_ranks(notebook), notebook.latency(""))
            add_pair(f"{PRINTS} prints", "s", notebook.run(f"%%dip\n{LOOP}"), notebook.run(LOOP))
            for kind, code in (("complete", "model."), ("inspect", "model.forward")):
                ours, in_kernel_only = (notebook.ask(kind, f"{magic}{code}") for magic in ("%%dip\n", ""))
                add_pair(f"{'Tab after' if kind == 'complete' else 'help on'} {code}", "ms", ours, in_kernel_only)
    rows = []
    for (what, unit), pairs in found.items():
        on_ranks, in_kernel = zip(*pairs, strict=True)
        rows.append(Row(what, unit, size, on_ranks, {"the notebook's own kernel": in_kernel}))
    report_rows("output", rows)


def _latency_of_all_ranks(notebook: Kernel) -> float:
    notebook.run("%config DipMagics.style = 'labels'")
    late: list[float] = []
    notebook.run("%%dip -S all\n" + WRITE, lambda text: late.append(1e3 * (time.time() - float(text.split()[2]))))
    return late[0]


if __name__ == "__main__":
    main()
