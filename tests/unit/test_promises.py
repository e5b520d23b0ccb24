"""The page "What is promised": each promise names a test that there is."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
LINES = PAGE.read_text().splitlines()
ROWS = [line for line in LINES if line.startswith("|") and not line.startswith(("| promise", "|-"))]
NAMED = re.compile(r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`")


def test_there_are_promises() -> None:
    assert len(ROWS) > 30


@functools.cache
def names_in(path: str) -> set[str]:
    """Names of the functions of a test file."""
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_tests_that_there_are() -> None:
    for row in ROWS:
        named = NAMED.findall(row)
        assert named or "`make " in row, row
        for path, test in named:
            assert not test or test in names_in(path), f"{path} has no {test}"
