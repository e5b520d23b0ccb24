"""The house: who imports whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

DDIP = Path(__file__).parents[2] / "ddip"
ORDER = [
    "registry",
    "errors",
    "deaths",
    "placement",
    "devices",
    "owner",
    "rank",
    "look",
    "tables",
    "screen",
    "sections",
    "page",
    "progress",
    "tabs",
    "views",
    "labels",
    "grouped",
    "ipp_private",
    "apps",
    "warming",
    "launchers",
    "cluster",
]
ORDER += [
    "ranks",
    "transfer",
    "packing",
    "comms",
    "outputs",
    "formation",
    "watch",
    "cells",
    "engines",
    "group",
    "torchddp",
    "autodip",
    "hints",
]
ORDER += ["magics"]


def imports(path: Path) -> set[str]:
    """The modules of ddip that `path` imports anywhere, as ``ddip.x`` -> ``x``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "ddip" else {module}
    return {name.split(".")[1] for name in found if name.startswith("ddip.")}


def test_what_runs_on_a_rank_imports_nothing_else_of_ddip() -> None:
    for path in (DDIP / "rank").glob("*.py"):
        assert imports(path) <= {"rank"}, path


@pytest.mark.parametrize("name", ORDER)
def test_nothing_lower_imports_anything_higher(name: str) -> None:
    path = DDIP / f"{name}.py" if (DDIP / f"{name}.py").exists() else DDIP / name / "__init__.py"
    assert imports(path) <= set(ORDER[: ORDER.index(name)]) | {name}


def test_an_app_imports_what_runs_on_a_rank() -> None:
    for path in (DDIP / "apps").glob("*/*.py"):
        assert imports(path) <= {"apps", "rank"}, path


def test_the_warm_process_imports_nothing_of_ddip() -> None:
    assert imports(DDIP / "warm.py") == set()


def test_the_controller_is_small() -> None:
    assert imports(DDIP / "controller.py") == {"owner"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ddip", ["torch", "ipyparallel", "IPython", "numpy"]),
        ("ddip.magics", ["torch", "ipyparallel", "numpy"]),
        ("ddip.group", ["torch"]),
        ("ddip.owner", ["torch", "ipyparallel", "IPython"]),
        ("ddip.warming", ["torch", "ipyparallel", "IPython"]),
    ],
)
def test_what_is_slow_to_import_is_not_imported(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
