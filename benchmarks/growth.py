"""Time every kind of operation while something grows: cells of the session, names, printed text, ranks, hosts.

Usage: growth.py [ROUNDS] [AXIS ...]

Each axis has a kernel of its own, or one for each of its sizes. The axis ``hosts`` needs the network of the tests:

    as root: python -m tests.hosts.network run -- python benchmarks/growth.py

An operation is timed ROUNDS times at each size, after one call that is not counted.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kernel import Kernel, running_kernel
from rows import Row, report_rows

LINE = "x" * 99
"""A printed line has 100 bytes with its end."""

SAVE = "%dipsave of one tensor"
FAILS = "a cell that fails on one rank"
OPERATIONS = {
    "a cell of the notebook": "1 + 1",
    "an empty cell": "%%dip\npass",
    "a cell with an all_reduce": "%%dip\ndist.all_reduce(one)",
    FAILS: "%%dip\nif rank == 1: raise ValueError",
    "a push": "%dipush small",
    "a pull": "%dipull small as pulled",
    "a background cell and its end": "%%dip --bg\npass",
    "%dipcells": "%dipcells",
    "%dipcell": "%dipcell",
    "%dipstatus": "%dipstatus",
    "%dipcheck one": "%dipcheck one",
    SAVE: "%dipsave {folder} one",
    "Tab": "%%dip\nsmal",
    "help": "%%dip\nsmall",
}
REQUESTS = {"Tab": "complete", "help": "inspect"}
SETUP = "%%dip everywhere\nsmall = [1, 2, 3]"
ON_RANKS = "%%dip\nimport torch, torch.distributed as dist\none = torch.ones(1)"


def run_cells(notebook: Kernel, reached: int, size: int) -> None:
    """Run cells until the session has had `size`."""
    for _ in range(reached, size):
        notebook.run("%%dip\npass")


def assign_names(notebook: Kernel, reached: int, size: int) -> None:
    """Assign names on the ranks."""
    notebook.run(f"%%dip\nfor i in range({reached}, {size}): globals()[f'name_{{i}}'] = i")


def print_text(notebook: Kernel, reached: int, size: int) -> None:
    """Print until all cells together have printed `size` KB on each rank."""
    notebook.run(f"%%dip\nfor i in range({10 * (size - reached)}): print({LINE!r})")


@dataclass(frozen=True)
class Axis:
    """Something that grows, and how it does."""

    name: str
    unit: str
    sizes: tuple[int, ...]
    grow: Callable[[Kernel, int, int], None] | None = None
    """Increases the size in a running session; None if each size needs a new group."""
    start: str = "%makedip -n 2"


AXES = (
    Axis("cells of the session", "cells", (10, 100, 1_000, 10_000), run_cells),
    Axis("names in the namespace", "names", (100, 1_000, 10_000, 100_000), assign_names),
    Axis("printed text", "KB", (10, 100, 1_000, 10_000, 100_000), print_text),
    Axis("ranks", "ranks", (2, 4, 8, 16, 32), start="%makedip -n {size} --yes"),
    Axis("hosts with two ranks each", "hosts", (1, 2, 3), start="%makedip -n 2 --hosts {hosts}"),
)


def time_operations(notebook: Kernel, rounds: int, axis: Axis, size: int) -> dict[str, list[float]]:
    """Return the milliseconds of each operation, by its name."""
    found: dict[str, list[float]] = {}
    for name, cell in OPERATIONS.items():
        if name == SAVE:
            if axis.unit == "hosts":  # those of the tests share no folder
                continue
            cell = cell.format(folder=f"{axis.unit}-{size}")
        call = _call_of(notebook, name, cell)
        call()
        found[name] = [call() for _ in range(rounds)]
    return found


def _call_of(notebook: Kernel, name: str, cell: str) -> Callable[[], float]:
    if name in REQUESTS:
        return lambda: notebook.ask(REQUESTS[name], cell)
    if name == "a background cell and its end":
        return lambda: 1e3 * (notebook.run(cell) + notebook.run("%dipwait"))
    return lambda: 1e3 * notebook.run(cell, may_fail=name == FAILS)


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    wanted = [axis for axis in AXES if axis.unit in (sys.argv[2:] or [axis.unit for axis in AXES])]
    rows = []
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    for axis in wanted:
        for size, found in _measure(axis, rounds):
            for name, times in found.items():
                rows.append(Row(name, "ms", size, times, axis=axis.name))
            print(axis.name, size, {name: round(min(times), 1) for name, times in found.items()}, flush=True)
    shutil.rmtree(folder)
    report_rows("growth", rows)


def _measure(axis: Axis, rounds: int) -> Iterator[tuple[int, dict[str, list[float]]]]:
    if axis.grow:
        with running_kernel() as notebook:
            _start(notebook, axis.start)
            for reached, size in zip((0, *axis.sizes), axis.sizes, strict=False):
                axis.grow(notebook, reached, size)
                yield size, time_operations(notebook, rounds, axis, size)
        return
    for size in axis.sizes:
        with running_kernel() as notebook:
            _start(notebook, axis.start.format(size=size, hosts=",".join(["h1", "h2", "h3"][:size])))
            yield size, time_operations(notebook, rounds, axis, size)


def _start(notebook: Kernel, start: str) -> None:
    for cell in ("%load_ext ddip", start, SETUP, ON_RANKS):
        notebook.run(cell)


if __name__ == "__main__":
    main()
