"""What a person sees, and when: a cell on ranks against the same cell in the notebook's own kernel, in turns.

Usage: output.py [ROUNDS] [RANKS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from jupyter_client.manager import start_new_kernel

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


def main() -> None:
    """Print one table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    kernel = Kernel()
    rows: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, ours: float, notebook: float) -> None:
        rows.setdefault(name, []).append((ours, notebook))

    try:
        kernel.run(f"%load_ext ddip\n%makedip -n {size}\n{MODEL}")
        kernel.run(f"%%dip\n{MODEL}")
        for kind, code in (("complete", "model."), ("inspect", "model.forward")):
            kernel.ask(kind, code), kernel.ask(kind, f"%%dip\n{code}")  # the first has imports to do
        for _ in range(rounds):
            note("a line is there after, ms", kernel.latency("%%dip\n"), kernel.latency(""))
            note("the same of all ranks, in labels", _all(kernel), kernel.latency(""))
            note(f"{PRINTS:,} prints, s", kernel.run(f"%%dip\n{LOOP}"), kernel.run(LOOP))
            note("Tab after model., ms", kernel.ask("complete", "%%dip\nmodel."), kernel.ask("complete", "model."))
            inspected = [kernel.ask("inspect", f"{magic}model.forward") for magic in ("%%dip\n", "")]
            note("help on model.forward, ms", *inspected)
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel()
    print(f"a cell on {size} ranks, and in the notebook's own kernel; median of {rounds} in turns")
    print(f"{'':36} {'ddip':>7} {'kernel':>7} {'ratio':>6}")
    for name, pairs in rows.items():
        ours, notebook = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:36} {ours:7.1f} {notebook:7.1f} {ours / notebook:6.2f}")


def _all(kernel: Kernel) -> float:
    kernel.run("%config DipMagics.style = 'labels'")
    late: list[float] = []
    kernel.run("%%dip -S all\n" + WRITE, lambda text: late.append(1e3 * (time.time() - float(text.split()[2]))))
    return late[0]


if __name__ == "__main__":
    main()
