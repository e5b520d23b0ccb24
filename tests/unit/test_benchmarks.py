"""What the benchmarks say of their measurements."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    """``benchmarks/rows.py``, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("rows", Path(__file__).parents[2] / "benchmarks" / "rows.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["rows"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("count", "between"), [(1, (1, 1)), (3, (1, 3)), (6, (1, 6)), (9, (2, 8)), (20, (6, 15)), (100, (40, 61))]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(
    rows: ModuleType, count: int, between: tuple[int, int]
) -> None:
    assert rows.interval(list(range(count, 0, -1))) == between


def test_a_ratio_is_that_of_the_rounds(rows: ModuleType) -> None:
    row = rows.Row("a cell", "ms", 4, [1.0, 2.0, 30.0], {"other": [2.0, 4.0, 10.0]})
    assert row.line() == "| a cell, ms | 4 | 2 (1 to 30) | other 4 (2 to 10): **0.5 (0.5 to 3)** |"
    assert rows.Row("a start", "s", 2, [1234.5]).line() == "| a start, s | 2 | 1234 |  |"


def test_what_is_kept_comes_back(rows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "KEPT", tmp_path / "kept")
    row = rows.Row("a cell", "ms", 4, [1.0, 2.0], {"other": [2.0, 4.0]})
    rows.show("cell", [row])
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text(re.sub(r"On \S+,", "On 2001-01-01,", file.read_text()))  # not of the day on which the page is made
    assert rows.kept() == {"cell": (f"On 2001-01-01, with torch {importlib.metadata.version('torch')}.", [row])}
