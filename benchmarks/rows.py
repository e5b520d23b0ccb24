"""What a benchmark has measured: rows of a table, which it prints and keeps; ``results.py`` makes a page of all."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KEPT = Path(os.environ.get("RESULTS", Path(__file__).parents[1] / "build" / "benchmarks"))
HEAD = "| | ranks | ddip | beside it, and the ratio |\n|---|---|---|---|"
SURE = 0.95


@dataclass(frozen=True)
class Row:
    """One measurement, several times; what stands beside it was measured in turns with it."""

    what: str
    unit: str
    ranks: int
    ours: Sequence[float]
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def line(self) -> str:
        """Of the table: medians, and the median ratios, with their intervals."""
        beside = []
        for name, theirs in self.others.items():
            ratios = [mine / its for mine, its in zip(self.ours, theirs, strict=True)]
            beside.append(f"{name} {text(theirs)}: **{text(ratios)}**")
        return f"| {self.what}, {self.unit} | {self.ranks} | {text(self.ours)} | {'; '.join(beside)} |"


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what `values` were drawn from lies, in 95 of 100 cases: between two of the values themselves.

    Less than six values cannot be so sure; of those it is the least and the greatest.
    """
    ordered, count, outside = sorted(values), len(values), 0.0
    for cut in range(count // 2):
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - SURE:
            return ordered[max(0, cut - 1)], ordered[-max(1, cut)]
    return ordered[0], ordered[-1]


def text(values: Sequence[float]) -> str:
    """The median, and its interval."""
    middle = _short(statistics.median(values))
    return middle if len(set(values)) == 1 else f"{middle} ({' to '.join(map(_short, interval(values)))})"


def _short(value: float) -> str:
    """Three digits, and all of a whole number."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def show(benchmark: str, rows: Sequence[Row]) -> None:
    """Print them, and keep them for ``results.py``."""
    print("\n".join([HEAD, *(row.line() for row in rows)]))
    KEPT.mkdir(parents=True, exist_ok=True)
    when = f"On {datetime.date.today()}, with torch {importlib.metadata.version('torch')}."
    kept = {"when": when, "rows": [dataclasses.asdict(row) for row in rows]}
    (KEPT / f"{benchmark}.json").write_text(json.dumps(kept))


def kept() -> dict[str, tuple[str, list[Row]]]:
    """What was kept, by benchmark: when it was measured, and with which torch, and the rows."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(KEPT.glob("*.json"))}
    return {name: (its["when"], [Row(**row) for row in its["rows"]]) for name, its in found.items()}
