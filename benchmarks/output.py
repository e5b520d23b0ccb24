"""Time what a person sees: a cell on ranks against the same cell in the notebook's kernel, alternating.

Usage: output.py [ROUNDS] [RANKS]
"""

from __future__ import annotations

import sys
import time

from kernel import Kernel, running_kernel
from rows import Row, report_rows

PRINTS = 200_000
WRITE = "import time\nprint(time.time())\ntime.sleep(0.6)"
LOOP = f"for i in range({PRINTS}): print('line', i)"
MODEL = "import torch\nmodel = torch.nn.Linear(2, 2)"


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
            add_pair("a printed line is there", "ms", _latency(notebook, "%%dip\n"), _latency(notebook, ""))
            add_pair("the same, of all ranks, in labels", "ms", _latency_of_all_ranks(notebook), _latency(notebook, ""))
            add_pair(f"{PRINTS} prints", "s", notebook.run(f"%%dip\n{LOOP}"), notebook.run(LOOP))
            for kind, code in (("complete", "model."), ("inspect", "model.forward")):
                ours, in_kernel_only = (notebook.ask(kind, f"{magic}{code}") for magic in ("%%dip\n", ""))
                add_pair(f"{'Tab after' if kind == 'complete' else 'help on'} {code}", "ms", ours, in_kernel_only)
    rows = []
    for (what, unit), pairs in found.items():
        on_ranks, in_kernel = zip(*pairs, strict=True)
        rows.append(Row(what, unit, size, on_ranks, {"the notebook's own kernel": in_kernel}))
    report_rows("output", rows)


def _latency(notebook: Kernel, magic: str) -> float:
    """Return the milliseconds from printing a line until it arrives here."""
    late: list[float] = []
    notebook.run(magic + WRITE, lambda text: late.append(1e3 * (time.time() - float(text))))
    return late[0]


def _latency_of_all_ranks(notebook: Kernel) -> float:
    notebook.run("%config DipMagics.style = 'labels'")
    late: list[float] = []
    notebook.run("%%dip -S all\n" + WRITE, lambda text: late.append(1e3 * (time.time() - float(text.split()[2]))))
    return late[0]


if __name__ == "__main__":
    main()
