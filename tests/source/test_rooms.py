"""Rules for imports between packages. The contracts are in ``pyproject.toml``."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp", reason="only make test's environment has import-linter")

DDIP = Path(__file__).parents[2] / "ddip"
ROOMS = {
    "notebook",
    "call",
    "kept",
    "group",
    "output",
    "cluster",
    "protocol",
    "rank",
    "sharded",
    "apps",
    "doctor",
    "server",
    "export",
}


def test_every_module_has_a_room() -> None:
    assert {path.name for path in DDIP.iterdir() if (path / "__init__.py").exists()} == ROOMS
    assert {path.name for path in DDIP.glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "errors.py",
        "guard.py",
        "settings.py",
    }


def test_module_names_in_strings_form_no_import_cycle() -> None:
    """Add imports for module names in strings: calls on a rank, and starts of processes.

    ``on_rank.py``, the declared table of functions that the notebook calls, is excluded.
    """
    graph = grimp.build_graph("ddip")
    packages = set()
    for module in graph.modules:
        path = DDIP.parent.joinpath(*module.split("."))
        if path.is_dir():
            packages.add(module)
            continue
        for node in ast.walk(ast.parse(path.with_suffix(".py").read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            named = {node.value}
            if module.startswith("ddip.rank."):
                named.add(f"ddip.rank.{node.value.rpartition('.')[0]}")
            for other in named & graph.modules - {module, "ddip"}:
                if not DDIP.parent.joinpath(*other.split(".")).is_dir():
                    graph.add_import(importer=module, imported=other)
    assert {package: graph.nominate_cycle_breakers(package) for package in packages} == {
        package: set() for package in packages
    }


def test_no_two_files_have_the_same_name() -> None:
    names = Counter(path.name for path in DDIP.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


NEEDED_LATER = ["ddip.export.record", "ddip.group.cells.cell", "ddip.group.objects.transfer", "ddip.kept.kept_objects"]
"""Modules that only a group, a kept group or an export needs, and that would make ``%load_ext`` slower."""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ddip", ["torch", "ipyparallel", "IPython", "numpy", "ddip.doctor"]),
        ("ddip.__main__", ["torch", "ipyparallel", "IPython", "numpy", "ddip.doctor"]),
        ("ddip.doctor.command", ["torch", "ipyparallel", "IPython", "numpy", "psutil"]),
        ("ddip.doctor.torch_build", ["torch", "ipyparallel", "IPython", "numpy"]),
        ("ddip.notebook.loading", ["torch", "ipyparallel", "numpy", *NEEDED_LATER]),
        ("ddip.group.group", ["torch"]),
        ("ddip.cluster.processes.ownership", ["torch", "ipyparallel", "IPython"]),
        ("ddip.cluster.processes.preload_client", ["torch", "ipyparallel", "IPython"]),
    ],
)
def test_slow_modules_are_not_imported(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
