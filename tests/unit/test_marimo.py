"""marimo has no magics, and ddip says so; each in a process of its own, which imports ddip for the first time."""

from __future__ import annotations

import subprocess
import sys

import ddip

MARIMO = """
import sys, types
sys.modules["marimo"] = marimo = types.ModuleType("marimo")
marimo.running_in_notebook = lambda: {inside}
import ddip
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_an_import_in_marimo_points_to_group() -> None:
    done = _run(MARIMO.format(inside=True) + "ddip.Group")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"ddip: {ddip.NO_MAGICS_IN_MARIMO}\n")
    assert "ddip.Group" in ddip.NO_MAGICS_IN_MARIMO and "from_python" in ddip.NO_MAGICS_IN_MARIMO


def test_the_extension_is_refused_in_marimo() -> None:
    done = _run(MARIMO.format(inside=True) + "ddip.load_ipython_extension(None)")
    assert done.stderr.splitlines()[-1] == f"ddip.errors.BadInput: {ddip.NO_MAGICS_IN_MARIMO}"


def test_a_script_that_imports_marimo_is_a_script() -> None:
    done = _run(MARIMO.format(inside=False))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_marimo_without_that_question_is_a_script() -> None:
    done = _run("import sys, types; sys.modules['marimo'] = types.ModuleType('marimo'); import ddip")
    assert (done.returncode, done.stderr) == (0, "")
