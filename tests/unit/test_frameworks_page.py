"""The page "Framework test results": its table lists each script that the tests run, with its app."""

from __future__ import annotations

import re
from pathlib import Path

from tests.frameworks.table import SCRIPTS

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
ROW = re.compile(r"^\|[^|]+\| (?:\[?`(\w+)`(?:\]\(\S+\))? )?\| `(\w+)\.py` \|(.*)\|$", re.MULTILINE)


def test_the_table_has_the_scripts_that_are_tested() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert sorted((name, app) for app, name, _ in rows) == sorted((script.name, script.app or "") for script in SCRIPTS)
    assert {cell.strip() for _, _, cells in rows for cell in cells.split("|")} == {"yes"}
