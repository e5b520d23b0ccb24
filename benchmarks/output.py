"""What a person sees, and when: a cell on ranks against the same cell in the notebook's own kernel, in turns.

Usage: output.py [ROUNDS] [RANKS]
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jupyter_client.manager import start_new_kernel
from rows import Row, show

PRINTS = 200_000
WRITE = "import time\nprint(time.time())\ntime.sleep(0.6)"
LOOP = f"for i in range({PRINTS}): print('line', i)"
MODEL = "import torch\nmodel = torch.nn.Linear(2, 2)"


class Kernel:
    """A notebook's kernel."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel()

    def run(self, code: str, first: Callable[[str], None] = lambda text: None) -> float:
        """Run a cell; `first` gets its first text as soon as that is there; returns the seconds it took."""
        began = time.perf_counter()
        request = self.client.execute(code)
        seen = False
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream" and not seen:
                seen = True
                first(message["content"]["text"])
            if message["msg_type"] == "error":
                sys.exit("\n".join(message["content"]["traceback"]))
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        self.client.get_shell_msg(timeout=10)
        return time.perf_counter() - began

    def latency(self, magic: str) -> float:
        """Milliseconds from writing a line until it is here."""
        late: list[float] = []
        self.run(magic + WRITE, lambda text: late.append(1e3 * (time.time() - float(text))))
        return late[0]

    def ask(self, kind: str, code: str) -> float:
        """Milliseconds until Tab, or help, is answered."""
        began = time.perf_counter()
        getattr(self.client, kind)(code, len(code))
        reply: Any = self.client.get_shell_msg(timeout=10)
        assert reply["content"].get("matches") or reply["content"].get("found"), reply["content"]
        return 1e3 * (time.perf_counter() - began)


@contextlib.contextmanager
def kernel() -> Iterator[Kernel]:
    """One, which ends."""
    started = Kernel()
    try:
        yield started
    finally:
        started.client.stop_channels()
        started.manager.shutdown_kernel()


def main() -> None:
    """Print one table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def note(what: str, unit: str, ours: float, its: float) -> None:
        found.setdefault((what, unit), []).append((ours, its))

    with kernel() as notebook:
        notebook.run(f"%load_ext ddip\n%makedip -n {size}\n{MODEL}")
        notebook.run(f"%%dip\n{MODEL}")
        for kind, code in (("complete", "model."), ("inspect", "model.forward")):
            notebook.ask(kind, code), notebook.ask(kind, f"%%dip\n{code}")  # the first has imports to do
        for _ in range(rounds):
            note("a printed line is there", "ms", notebook.latency("%%dip\n"), notebook.latency(""))
            note("the same, of all ranks, in labels", "ms", _all(notebook), notebook.latency(""))
            note(f"{PRINTS} prints", "s", notebook.run(f"%%dip\n{LOOP}"), notebook.run(LOOP))
            for kind, code in (("complete", "model."), ("inspect", "model.forward")):
                ours, its = (notebook.ask(kind, f"{magic}{code}") for magic in ("%%dip\n", ""))
                note(f"{'Tab after' if kind == 'complete' else 'help on'} {code}", "ms", ours, its)
    rows = []
    for (what, unit), pairs in found.items():
        on_ranks, in_kernel = zip(*pairs, strict=True)
        rows.append(Row(what, unit, size, on_ranks, {"the notebook's own kernel": in_kernel}))
    show("output", rows)


def _all(notebook: Kernel) -> float:
    notebook.run("%config DipMagics.style = 'labels'")
    late: list[float] = []
    notebook.run("%%dip -S all\n" + WRITE, lambda text: late.append(1e3 * (time.time() - float(text.split()[2]))))
    return late[0]


if __name__ == "__main__":
    main()
