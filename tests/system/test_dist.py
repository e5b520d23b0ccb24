"""``make dist``: the distributions work without this checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ddip

ROOT = Path(__file__).parents[2]


def test_make_dist_runs_the_tested_command() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "dist"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("bin/python tests/dist.py --to dist")


@pytest.mark.timeout(900)
def test_the_wheel_works_in_a_separate_environment(tmp_path: Path) -> None:
    command = [sys.executable, "tests/dist.py", "--to", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "ranks on the CPU: 2" in done.stdout
    version = ddip.__version__
    assert {path.name for path in tmp_path.iterdir()} == {f"ddip-{version}.tar.gz", f"ddip-{version}-py3-none-any.whl"}
