"""tests/gpu.sh as on an offline machine with its own Python and torch, here without a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from tests import wheelhouse

HERE = Path(__file__).parent.parent.parent
SITE = Path(importlib.metadata.distribution("torch").locate_file(""))
ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
"""Runs a command in a separate network namespace that has only loopback."""


def add_dependencies(name: str, found: set[str]) -> set[str]:
    """Return `name` and the installed packages that it needs."""
    if name not in found:
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return found
        found.add(name)
        for need in map(Requirement, requires):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                add_dependencies(need.name, found)
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a Python that has only torch, what torch needs, NumPy and pip; return its bin folder."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in add_dependencies("torch", {"numpy"}):
        files = importlib.metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists() and (SITE / top).exists():
                link.symlink_to(SITE / top)
    return folder / "bin"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheelhouse for that Python."""
    folder = tmp_path_factory.mktemp("wheels") / "wheelhouse"
    torch = importlib.metadata.version("torch").partition("+")[0]
    python = ".".join(map(str, sys.version_info[:2]))
    done = subprocess.run(
        [sys.executable, "tests/wheelhouse.py", "--python", python, "--torch", torch, "--to", str(folder)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheels_are_few_and_small_and_exclude_torch(wheels: Path) -> None:
    names = {wheel.name.partition("-")[0].lower() for wheel in wheels.iterdir()}
    assert {"ddip", "ipyparallel", "ipykernel", "pytest", "py_spy"} <= names
    assert not {name for name in names if name.startswith(("torch", "nvidia", "triton", "numpy"))}
    assert sum(wheel.stat().st_size for wheel in wheels.iterdir()) < wheelhouse.MOST_BYTES


def test_one_command_tests_offline_and_writes_a_report(bare_python: Path, wheels: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    on_cpu = "tests/cluster/test_gpu_cases_on_cpu.py::test_case[an_error_without_harm_costs_nothing, 2 ranks]"
    here = ALONE if subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0 else []
    done = subprocess.run(
        [*here, "tests/gpu.sh", str(wheels), str(report), on_cpu, "tests/cluster/test_gpus.py"],
        cwd=HERE,
        env={
            "PATH": f"{bare_python}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text()
    assert re.match(r"1 passed, \d+ skipped, in \d+ s\n", text)
    assert re.search(rf"^passed +\S+ s  {re.escape(on_cpu)}$", text, re.MULTILINE)
    assert f"\ntorch {importlib.metadata.version('torch')}" in text and "\nipyparallel " in text
    assert "skipped: there is no GPU here: nvidia-smi -L lists none" in text


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Prove that this process leaves no child process, except those of earlier ones, such as a browser."""
    before = set(psutil.Process().children(recursive=True))
    yield
    new = set(psutil.Process().children(recursive=True)) - before
    assert [process for process in new if not before.intersection(process.parents())] == []


def test_a_hanging_test_is_inspected_and_the_next_one_runs(tmp_path: Path, nothing_left: None) -> None:
    tests, report = tmp_path / "test_three.py", tmp_path / "report.txt"
    tests.write_text(
        "import subprocess, sys, time\n"
        "def test_good(): pass\n"
        "def test_hangs(): subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "def test_ends(): import os; os._exit(3)\n"
        "def test_fails(): assert 1 == 2\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.gpu_report",
            "--report",
            report,
            "--limit",
            "2",
            "--folder",
            tmp_path,
            tests.name,
        ],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = report.read_text()
    assert done.returncode == 1 and text.startswith("1 ended pytest with exit code 3, 1 failed, 1 hung, 1 passed, in ")
    assert re.search(r"(?s)--- hung: \S+::test_hangs\npid \d+, .*time\.sleep\(1000\)", text)
    assert re.search(r"(?s)--- failed: \S+::test_fails\n.*assert 1 == 2", text)


def test_the_library_of_nccl_keeps_one_architecture() -> None:
    def entry(kind: int, architecture: int, code: bytes) -> bytes:
        return struct.pack("<HHIQIIII", kind, 0, 32, len(code), 0, 0, 0, architecture) + code

    entries = entry(2, 80, b"eighty!!") + entry(2, 90, b"ninety!!") + entry(1, 90, b"portable")
    fatbin = wheelhouse.FATBIN + struct.pack("<Q", len(entries)) + entries
    library = bytearray(b"\x7fELF" + fatbin + b"between" + fatbin + b"end")
    wheelhouse.keep_architecture(library, 90)
    assert library.count(b"ninety!!") == 2 and library.startswith(b"\x7fELF") and library.endswith(b"end")
    assert b"eighty!!" not in library and b"portable" not in library and b"between" in library
