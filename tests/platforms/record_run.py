"""Write the result of a run of the default tests into the table of docs/compatibility.md.

    python tests/platforms/record_run.py NAME JUNIT_XML

Run it with the Python of the tests. The row of the same name and Python is replaced.
"""

from __future__ import annotations

import platform
import sys
import xml.etree.ElementTree as ElementTree
from datetime import date
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
PACKAGES = ("ipython", "ipykernel", "jupyter_client", "ipyparallel", "torch")
HEAD = f"| packages | Python | {' | '.join(PACKAGES)} | passed | failed | date |"


def count_results(report: Path) -> tuple[int, int]:
    """Return the numbers of passed and of failed tests in a report of pytest."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    count = lambda name: sum(int(suite.get(name, 0)) for suite in suites)  # noqa: E731
    failed = count("failures") + count("errors")
    return count("tests") - count("skipped") - failed, failed


def with_row(page: str, row: str) -> str:
    """Return `page` with `row` in the table below HEAD, in place of the row that begins with the same two cells."""
    before, _, after = page.partition(f"{HEAD}\n")
    dashes, *lines = after.splitlines()
    table = [line for line in lines[: lines.index("")] if line.split("|")[1:3] != row.split("|")[1:3]]
    return "\n".join([before + HEAD, dashes, *sorted([*table, row]), *lines[lines.index("") :], ""])


def main(name: str, report: str) -> None:
    passed, failed = count_results(Path(report))
    versions = [metadata.version(package) for package in PACKAGES]
    python = ".".join(platform.python_version_tuple()[:2])
    row = f"| {' | '.join([name, python, *versions, str(passed), str(failed), str(date.today())])} |"
    PAGE.write_text(with_row(PAGE.read_text(), row))


if __name__ == "__main__":
    main(*sys.argv[1:])
