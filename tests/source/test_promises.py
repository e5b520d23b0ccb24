"""The page "Guarantees": each promise names an existing test."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from ddip.protocol import switches

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
LINES = PAGE.read_text().splitlines()
ROWS = [line for line in LINES if line.startswith("|") and not line.startswith(("| promise", "|-"))]
WITHOUT_NATIVE = PAGE.read_text().partition("## With low-level mechanisms turned off")[2]
NAMED = re.compile(r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`")


def test_the_page_contains_promises() -> None:
    assert len(ROWS) > 30


@functools.cache
def names_in(path: str) -> set[str]:
    """Return the names of the functions of a test file."""
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_existing_tests() -> None:
    for row in ROWS:
        named = NAMED.findall(row)
        assert named or "`make " in row, row
        for path, test in named:
            assert not test or test in names_in(path), f"{path} has no {test}"


def find_native() -> dict[tuple[str, str], set[str]]:
    """Return the mechanisms that tests are marked to need, by file and test name.

    The name is empty if the whole file is marked.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        for node in ast.parse(path.read_text()).body:
            marks = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
            for call in (call for mark in marks for call in ast.walk(mark) if isinstance(call, ast.Call)):
                if not isinstance(node, ast.ClassDef) and ast.unparse(call.func) == "pytest.mark.native":
                    name = node.name if isinstance(node, ast.FunctionDef) else ""
                    needs = found.setdefault((f"{path.parent.name}/{path.name}", name), set())
                    needs.update(ast.literal_eval(argument) for argument in call.args)
    return found


def test_each_promise_that_needs_a_native_mechanism_is_listed() -> None:
    marked = find_native()
    assert set().union(*marked.values()) <= {name.lower() for name in switches.LOST}
    listed = {
        test: set(re.findall("`DDIP_NATIVE_([A-Z_]+)`", row))
        for row in WITHOUT_NATIVE.splitlines()
        for test in NAMED.findall(row)
    }
    assert listed == {test: {name.upper() for name in needs} for test, needs in marked.items()}
