"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import ddip

ROOT = Path(ddip.__file__).parents[1]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "ddip").rglob("*.py"))
    if ">>> " in file.read_text()
]


SLOW = {"ddip.apps.lightning.trainer_placement": pytest.mark.grid(in_ci=True)}
"""Marks of the modules that import a large library."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in MODULES])
def test_the_examples_of_a_module_are_true(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ddip"):
            raise
        pytest.skip(f"{error.name} is not installed")
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
