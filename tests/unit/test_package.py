"""The files that describe the package."""

from __future__ import annotations

import configparser
import re
import runpy
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import ddip

from .. import dist, module_map
from ..platforms import record_run

ROOT = Path(__file__).parents[2]


def test_the_citation_is_whole_and_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([a-z-]+): *(.*)$", text, re.MULTILINE))
    assert fields["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= fields.keys()  # required by the format
    assert (fields["version"], fields["license"]) == (ddip.__version__, "Apache-2.0")


def test_the_description_for_a_package_index_has_no_relative_links() -> None:
    text = runpy.run_path(str(ROOT / "setup.py"))["long_description"]()
    assert re.findall(r"\]\((?!https?:)|<!--|<picture|\((?:versions|how)\)", text) == []
    assert re.search(r"takes [\d.]+ s\sand less", text)  # the line break after a removed comment stays


def test_the_classifiers_list_exactly_the_allowed_pythons() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = re.findall(r"Python :: 3\.(\d+)", config["metadata"]["classifiers"])
    first, after = re.findall(r"3\.(\d+)", config["options"]["python_requires"])
    assert list(map(int, named)) == list(range(int(first), int(after)))


def test_contributing_has_the_table_of_packages() -> None:
    assert module_map.TABLE.findall(module_map.PAGE.read_text()) == [module_map.package_table()]
    assert all(module_map.summary(folder / "__init__.py") for folder in module_map.packages())


def test_the_lowest_versions_of_all_requirements_are_tested() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lowest = dict(re.findall(r"^(\w+) *>=([\d.]+)", config["options"]["install_requires"], re.MULTILINE))
    tested = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / "tests/platforms/lowest.txt").read_text(), re.MULTILINE))
    assert {name: Version(tested[name]) for name in lowest} == {name: Version(low) for name, low in lowest.items()}


def test_a_run_replaces_its_row_in_the_table() -> None:
    page = record_run.PAGE.read_text()
    first = record_run.with_row(page, "| moon | 3.11 | 1 |")
    assert record_run.with_row(first, "| moon | 3.12 | 2 |").count("| moon |") == 2
    again = record_run.with_row(first, "| moon | 3.11 | 3 |")
    assert again == first.replace("| 3.11 | 1 |", "| 3.11 | 3 |")
    assert first.replace("| moon | 3.11 | 1 |\n", "") == page


def test_a_run_of_the_system_tests_updates_its_front_ends() -> None:
    page = record_run.PAGE.read_text()
    files = set(re.findall(r"`(\w+/test_\w+\.py)`", page.partition("| front end |")[2]))
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []
    after = record_run.with_front_ends(page, {"system/test_classic.py": (3, 1)})
    (changed,) = set(after.splitlines()) - set(page.splitlines())
    assert changed.startswith("| Notebook 6.5") and "| 3 passed, 1 failed, 20" in changed
    assert record_run.with_front_ends(page, {}) == page


def test_a_wheel_with_missing_or_additional_files_is_refused() -> None:
    package_files = dist.files_of_the_package()
    assert {"ddip/py.typed", "ddip/__main__.py", "ddip/apps/fastai/__init__.py"} <= set(package_files)
    dist.ensure_complete([*package_files, "ddip-0.1.0.dist-info/METADATA"], package_files)
    with pytest.raises(dist.StepFailed, match="lacks .*py.typed.* has .*dist.py"):
        dist.ensure_complete(
            [*(name for name in package_files if name != "ddip/py.typed"), "tests/dist.py"], package_files
        )


def test_a_failed_step_shows_its_output() -> None:
    with pytest.raises(dist.StepFailed, match="(?s)a step: .*3.*why"):
        dist.run_step("a step", [sys.executable, "-c", "print('why'); raise SystemExit(3)"])
