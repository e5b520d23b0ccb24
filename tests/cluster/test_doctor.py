"""``python -m ddip doctor`` as run from a shell: it starts real ranks and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddip
from ddip.cluster.processes import ownership
from ddip.cluster.processes.processes import Proc

from .leftovers import assert_nothing_left, family_of, wait_until, with_title

PAGE = Path(__file__).parents[2] / "docs" / "when_something_goes_wrong.md"
DOCTOR = [sys.executable, "-m", "ddip", "doctor"]
NAMES = [
    "python",
    "platform",
    "packages",
    "names",
    "folder",
    "environment",
    "memory",
    "shared-memory",
    "limits",
    "loopback",
    "run-folder",
    "leftovers",
    "driver",
    "gpus",
    "torch",
    "backends",
    "torch-names",
    "start-gloo",
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Create a home folder without an IPython profile; the doctor must not create one."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def shell_environment(home: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "IPYTHONDIR": "", **variables}


def by_name(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in report["checks"]}


@pytest.mark.grid
def test_two_ranks_start_and_nothing_is_left(home: Path) -> None:
    (home / "random.py").write_text("raise ImportError('of the folder')\n")
    (home / "torch.py").write_text("raise ImportError('of the folder')\n")
    before = sorted(Path(os.environ["TMPDIR"]).iterdir())
    with subprocess.Popen(
        [*DOCTOR, "--json"],
        cwd=home,
        env=shell_environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, errors = process.communicate()
    report = json.loads(out)
    checks = by_name(report)
    assert errors == "" and list(checks)[: len(NAMES)] == NAMES
    assert (process.returncode, report["exit_code"]) == (0, 0), out
    assert re.fullmatch(
        r"ranks on the CPU: 2, started in [\d.]+ s, all_reduce in [\d.]+ s", checks["start-gloo"]["found"]
    )
    assert checks["folder"]["status"] == "warning" and checks["folder"]["found"].endswith("random.py, torch.py")
    assert_nothing_left(process.pid, 0)
    assert sorted(path.name for path in home.iterdir()) == ["random.py", "torch.py"]
    assert sorted(Path(os.environ["TMPDIR"]).iterdir()) == before


@pytest.mark.grid
@pytest.mark.parametrize(
    ("number", "code", "after"),
    [
        (signal.SIGINT, 130, "leftovers"),
        pytest.param(signal.SIGINT, 130, "backends", marks=pytest.mark.grid),
        pytest.param(signal.SIGTERM, 143, "backends", marks=pytest.mark.grid),
    ],
    ids=["Ctrl-C before the start", "Ctrl-C while ranks start", "SIGTERM while ranks start"],
)
def test_an_interrupted_doctor_leaves_nothing(home: Path, number: int, code: int, after: str) -> None:
    before = sorted(Path(os.environ["TMPDIR"]).iterdir())
    with subprocess.Popen(
        DOCTOR, cwd=home, env=shell_environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.split()[1:2] == [after]:
                if after == "backends":
                    wait_until(lambda: with_title(family_of(process.pid), "ddip engine"))
                process.send_signal(number)
        assert process.wait() == code
        output = process.stderr.read()
        assert output == ("interrupted; nothing is left running\n" if code == 130 else "")
    assert_nothing_left(process.pid, 0)
    assert sorted(Path(os.environ["TMPDIR"]).iterdir()) == before and list(home.iterdir()) == []


@pytest.mark.grid
def test_leftovers_of_another_notebook_are_reported_and_stay(home: Path) -> None:
    me = Proc.of(os.getpid())
    folder = ownership.make_run_folder()
    dead = folder.rename(folder.with_name(folder.name.replace(f"{me.started:.15g}", f"{me.started - 5:.15g}")))
    try:
        command = [*DOCTOR, "--json"]
        done = subprocess.run(
            command, cwd=home, env=shell_environment(home), capture_output=True, text=True, check=True
        )
        check = by_name(json.loads(done.stdout))["leftovers"]
        assert check["status"] == "warning" and f"process {me.pid}, which ended: {dead}" in check["found"]
        assert dead.exists()
    finally:
        ownership.remove_files(dead, "", "")


@pytest.mark.grid
def test_a_machine_that_cannot_start_ranks_fails_and_says_why(home: Path, tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not that queue')\n")
    done = subprocess.run(
        DOCTOR, cwd=home, env=shell_environment(home, PYTHONPATH=str(tmp_path)), capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr == ""
    assert f"{tmp_path}/queue.py is found instead of the standard library's queue" in done.stdout
    assert "failed   start-gloo     not tried, since torch cannot be imported" in done.stdout


@pytest.mark.parametrize(
    "module",
    ["psutil", *(pytest.param(name, marks=pytest.mark.grid) for name in ("packaging", "IPython", "ipyparallel"))],
)
def test_an_unimportable_package_is_named_while_other_checks_run(home: Path, tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('broken here')\n")
    done = subprocess.run(
        DOCTOR, cwd=home, env=shell_environment(home, PYTHONPATH=str(tmp_path)), capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr == "" and "broken here" in done.stdout
    assert "torch" in [line.split()[1] for line in done.stdout.splitlines() if not line.startswith(" ")]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 0, "python -m ddip doctor"),
        (["--help"], 0, "python -m ddip doctor"),
        (["--version"], 0, f"ddip {ddip.__version__}"),
        (["doctor", "--help"], 0, "--no-start"),
        (["docter"], 2, "python -m ddip docter: there is no such command"),
    ],
)
def test_commands_print_help_or_an_error(words: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ddip", *words], capture_output=True, text=True)
    assert done.returncode == code and said in (done.stderr if code else done.stdout)


@pytest.mark.grid
def test_without_a_start_the_checks_match_the_docs(home: Path) -> None:
    command = [*DOCTOR, "--no-start"]
    done = subprocess.run(command, cwd=home, env=shell_environment(home), capture_output=True, text=True)
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("ok ", "warning ", "failed "))]
    shown = re.search(r"\$ python -m ddip doctor\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    example = [line.split()[1] for line in shown[1].splitlines() if line.startswith(("ok ", "warning ", "failed "))]
    assert names == NAMES[:-1] and example == NAMES
