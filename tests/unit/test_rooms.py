"""The house: who imports whom. The contracts are in ``pyproject.toml``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DDIP = Path(__file__).parents[2] / "ddip"
ROOMS = {"notebook", "call", "group", "output", "cluster", "protocol", "rank", "sharded", "apps", "doctor", "server"}


def test_the_rooms_import_each_other_as_agreed() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=DDIP.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_every_module_has_a_room() -> None:
    assert {path.name for path in DDIP.iterdir() if (path / "__init__.py").exists()} == ROOMS
    assert {path.name for path in DDIP.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "settings.py"}


def test_no_module_is_longer_than_a_reader_bears() -> None:
    lines = {str(path.relative_to(DDIP)): path.read_text().count("\n") for path in DDIP.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > 350} == {}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ddip", ["torch", "ipyparallel", "IPython", "numpy", "ddip.doctor"]),
        ("ddip.__main__", ["torch", "ipyparallel", "IPython", "numpy", "ddip.doctor"]),
        ("ddip.doctor.command", ["torch", "ipyparallel", "IPython", "numpy", "psutil"]),
        ("ddip.doctor.torch_build", ["torch", "ipyparallel", "IPython", "numpy"]),
        ("ddip.notebook.loading", ["torch", "ipyparallel", "numpy"]),
        ("ddip.group.group", ["torch"]),
        ("ddip.cluster.ownership", ["torch", "ipyparallel", "IPython"]),
        ("ddip.cluster.preload_client", ["torch", "ipyparallel", "IPython"]),
    ],
)
def test_what_is_slow_to_import_is_not_imported(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
