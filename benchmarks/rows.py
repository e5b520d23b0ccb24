"""Rows of benchmark results, which a benchmark prints and stores; ``results.py`` makes a page of all of them."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

KEPT = Path(os.environ.get("RESULTS", Path(__file__).parents[1] / "build" / "benchmarks"))
HEAD = "| | ranks | ddip | beside it, and the ratio |\n|---|---|---|---|"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Row:
    """One measurement, repeated; `others` was measured alternately with it."""

    what: str
    unit: str
    ranks: int
    ours: Sequence[float]
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)
    axis: str = ""
    """What `ranks` counts instead of ranks, for results over something else."""

    def table_row(self) -> str:
        """Return the table row: medians and median ratios, with their intervals; no ratio to zero."""
        beside = []
        for name, theirs in self.others.items():
            text = f"{name} {format_median(theirs)}"
            if all(theirs):
                text += f": **{format_median([ours / other for ours, other in zip(self.ours, theirs, strict=True)])}**"
            beside.append(text)
        return f"| {self.what}, {self.unit} | {self.ranks} | {format_median(self.ours)} | {'; '.join(beside)} |"


def describe_machine() -> str:
    """Describe the machine that ran the benchmarks."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = found[0].partition(": ")[2] if found else platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores ({name}), {memory:.0f} GB, {platform.system()}, no GPU used"


def time_call(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of the distribution that `values` were drawn from.

    It lies between two of the values themselves (order statistics, binomial). With fewer than six values that certainty
    is out of reach; the result is then the smallest and the largest value.
    """
    ordered, count, outside = sorted(values), len(values), 0.0
    for cut in range(count // 2):
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            return ordered[max(0, cut - 1)], ordered[-max(1, cut)]
    return ordered[0], ordered[-1]


def format_median(values: Sequence[float]) -> str:
    """Format the median and its interval."""
    middle = format_number(statistics.median(values))
    return middle if len(set(values)) == 1 else f"{middle} ({' to '.join(map(format_number, interval(values)))})"


def format_number(value: float) -> str:
    """Format a number with three digits, or all digits of its integer part."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def report_rows(benchmark: str, rows: Sequence[Row]) -> None:
    """Store rows for ``results.py``, and print them."""
    KEPT.mkdir(parents=True, exist_ok=True)
    torch = importlib.metadata.version("torch")
    when = f"On {datetime.date.today()}, with torch {torch}, on {describe_machine()}."
    stored = {"when": when, "rows": [dataclasses.asdict(row) for row in rows]}
    (KEPT / f"{benchmark}.json").write_text(json.dumps(stored))
    print("\n".join([HEAD, *(row.table_row() for row in rows)]))


def load_rows() -> dict[str, tuple[str, list[Row]]]:
    """Return the stored rows by benchmark, each with a line about its day, torch and machine."""
    stored = {file.stem: json.loads(file.read_text()) for file in sorted(KEPT.glob("*.json"))}
    return {name: (result["when"], [Row(**row) for row in result["rows"]]) for name, result in stored.items()}
