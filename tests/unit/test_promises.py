"""The page "What is promised": each promise names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
LINES = PAGE.read_text().splitlines()
ROWS = [line for line in LINES if line.startswith("|") and not line.startswith(("| promise", "|-"))]
NAMED = re.compile(r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`")


def test_there_are_promises() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_promise_names_tests_that_there_are(row: str) -> None:
    named = NAMED.findall(row)
    assert named or "`make " in row, row
    for path, test in named:
        tree = ast.parse((ROOT / "tests" / path).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not test or test in names, f"{path} has no {test}"
