"""Write ``RESULTS.md`` from stored benchmark results: tables, machine, versions, and plots over ranks.

Usage: results.py [FOLDER]

The sections of benchmarks that were not run stay as they are.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from rows import HEAD, Row, format_number, interval, load_rows

TITLES = {
    "start": "Start",
    "cell": "A cell",
    "differences": "Comparing the ranks",
    "objects": "Objects",
    "saves": "Saves",
    "train": "Training",
    "recovery": "Recovery",
    "background": "Cells in the background",
    "output": "Output",
    "hosts": "Several hosts",
    "many_starts": "Many starts",
    "scale": "Scale",
    "growth": "Over a session",
    "fastai": "fastai",
    "watch": "A live view",
}
VERSIONS = ("ipyparallel", "ipykernel", "ipython", "pyzmq", "accelerate", "fastai")
PLOTS = {
    "start": ["start: to the first all_reduce", "load_ext and start: to the first all_reduce"],
    "cell": ["an empty cell", "an empty cell after a pause"],
    "objects": ["push 256 MiB"],
    "scale": ["an empty cell"],
    "recovery": [
        "a rank raises while others wait: all ranks compute again",
        "a rank raises while others wait: the cell is over",
    ],
}
"""Rows that are plotted over the number of ranks; the first row of each plot includes its comparisons."""
GROWING = ["an empty cell", "a cell that fails on one rank", "a push", "a pull", "%dipcells", "%dipcheck one", "Tab"]
"""Rows that are plotted over each axis of ``growth.py``."""


def collect_curves(rows: Iterable[Row], first: str) -> dict[str, dict[int, list[float]]]:
    """Return the measurements by number of ranks for each line of a plot.

    Comparisons are included only for the row `first`.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        found.setdefault(f"ddip, {row.what}", {})[row.ranks] = list(row.ours)
        for name, values in row.others.items() if row.what == first else ():
            found.setdefault(name, {})[row.ranks] = list(values)
    return {name: by_ranks for name, by_ranks in found.items() if len(by_ranks) > 1}


def plot_rows(rows: list[Row], file: Path) -> bool:
    """Plot medians over ranks with their intervals; return False if there is nothing to plot."""
    lines = collect_curves(rows, rows[0].what)
    if not lines:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, by_ranks in lines.items():
        sizes = sorted(by_ranks)
        middles = [statistics.median(by_ranks[size]) for size in sizes]
        bounds = [interval(by_ranks[size]) for size in sizes]
        errors = [
            [middle - low for middle, (low, _) in zip(middles, bounds, strict=True)],
            [high - middle for middle, (_, high) in zip(middles, bounds, strict=True)],
        ]
        style = "o-" if name.startswith("ddip") else "s--"
        axes.errorbar(sizes, middles, errors, fmt=style, capsize=3, markersize=4, label=name)
    sizes = sorted({size for by_ranks in lines.values() for size in by_ranks})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_xlabel(rows[0].axis or "ranks")
    axes.set_ylabel(rows[0].unit)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, framealpha=0.5)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return True


def growth_tables(rows: Sequence[Row], plots: Path) -> list[str]:
    """Return a table of medians for each axis, operations by sizes, with its plot in the folder `plots`."""
    page: list[str] = []
    for axis in dict.fromkeys(row.axis for row in rows):
        found = [row for row in rows if row.axis == axis]
        sizes = sorted({row.ranks for row in found})
        head = f"| over {axis} ({found[0].unit}) | {' | '.join(map(str, sizes))} |"
        page += ["", head, "|---" * (len(sizes) + 1) + "|"]
        for what in dict.fromkeys(row.what for row in found):
            medians = {row.ranks: format_number(statistics.median(row.ours)) for row in found if row.what == what}
            page.append(f"| {what} | {' | '.join(medians.get(size, '') for size in sizes)} |")
        file = plots / f"growth_{axis.split()[0]}.svg"
        if plot_rows([row for row in found if row.what in GROWING], file):
            page += ["", f"![{axis}](results/{file.name})"]
    return page


def sections_of(page: str) -> dict[str, list[str]]:
    """Return the lines of each section of an existing page, by title."""
    found: dict[str, list[str]] = {}
    for part in page.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        found[title] = text.strip("\n").split("\n")
    return found


def main() -> None:
    """Write the page and its plots."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ddip"})
    (folder / "results").mkdir(exist_ok=True)
    found = load_rows()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    page = [
        "# Results of the benchmarks",
        "",
        f"`make bench` writes this page. Python {platform.python_version()}, {versions}.",
        "",
        "Medians; in parentheses, their 95 % confidence interval, or the smallest and the largest value of fewer than",
        "six rounds. The measurements of a line alternated; a ratio is the median of the rounds' ratios.",
    ]
    page_path = folder / "RESULTS.md"
    former = sections_of(page_path.read_text()) if page_path.exists() else {}
    for benchmark, title in TITLES.items():
        if benchmark not in found:
            page += ["", f"## {title}", "", *former[title]] if title in former else []
            continue
        when, rows = found[benchmark]
        if benchmark == "growth":
            page += ["", f"## {title}", "", when, *growth_tables(rows, folder / "results")]
            continue
        page += ["", f"## {title}", "", when, "", HEAD, *(row.table_row() for row in rows)]
        drawn = [row for what in PLOTS.get(benchmark, ()) for row in rows if row.what == what]
        file = folder / "results" / f"{benchmark}.svg"
        if drawn and plot_rows(drawn, file):
            page += ["", f"![{title}, over the number of ranks](results/{file.name})"]
    page_path.write_text("\n".join(page) + "\n")
    print(f"{folder / 'RESULTS.md'}: {sum(len(rows) for _, rows in found.values())} measurements")


if __name__ == "__main__":
    main()
