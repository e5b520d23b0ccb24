"""Write the result of a run of the tests into a table of docs/compatibility.md.

    python tests/platforms/record_run.py NAME JUNIT_XML             the default tests, with the packages NAME
    python tests/platforms/record_run.py front-ends JUNIT_XML       tests/system

Run it with the Python of the tests. The row of the same name and Python is replaced. Of the front ends, the rows whose
tests have run are updated.
"""

from __future__ import annotations

import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from datetime import date
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
PACKAGES = ("ipython", "ipykernel", "jupyter_client", "ipyparallel", "torch")
HEAD = f"| packages | Python | {' | '.join(PACKAGES)} | passed | failed | date |"

FRONT_ENDS = {
    "JupyterLab 4": ["jupyterlab"],
    "Notebook 7": ["notebook"],
    "jupyter-console": ["jupyter_console"],
    "IPython in a terminal": ["ipython"],
    "nbclient, nbconvert, papermill": ["nbclient", "nbconvert", "papermill"],
}
"""Packages of each front end of the second table that runs in the environment of the tests."""


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


def count_by_file(report: Path) -> dict[str, tuple[int, int]]:
    """Return the numbers of passed and of failed tests by file, such as ``system/test_lab.py``."""
    found: dict[str, tuple[int, int]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = "/".join(re.findall(r"\w+", case.get("classname", ""))[1:3]) + ".py"
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        passed, former = found.get(file, (0, 0))
        found[file] = (passed + (not failed and "skipped" not in kinds), former + failed)
    return found


def with_front_ends(page: str, counts: dict[str, tuple[int, int]]) -> str:
    """Return `page` with new results of the front ends of which tests have run."""
    before, head, table = page.partition("| front end |")
    lines = table.split("\n")
    for number, line in enumerate(lines):
        cells = line.split("|")
        ran = [counts[file] for file in re.findall(r"`(\w+/\w+\.py)`", line) if file in counts]
        if len(cells) == 6 and ran:
            packages = FRONT_ENDS.get(cells[1].strip(), [])
            versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
            passed, failed = map(sum, zip(*ran, strict=True))
            cells[3] = f" {versions}{': ' * bool(versions)}{passed} passed, {failed} failed, {date.today()} "
            lines[number] = "|".join(cells)
    return before + head + "\n".join(lines)


def main(name: str, report: str) -> None:
    if name == "front-ends":
        PAGE.write_text(with_front_ends(PAGE.read_text(), count_by_file(Path(report))))
        return
    passed, failed = count_results(Path(report))
    versions = [metadata.version(package) for package in PACKAGES]
    python = ".".join(platform.python_version_tuple()[:2])
    row = f"| {' | '.join([name, python, *versions, str(passed), str(failed), str(date.today())])} |"
    PAGE.write_text(with_row(PAGE.read_text(), row))


if __name__ == "__main__":
    main(*sys.argv[1:])
