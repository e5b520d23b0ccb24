"""``make demo``: a notebook in a terminal, as a reader sees it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pexpect
import pytest

ROOT = Path(__file__).parents[2]
COLOUR = re.compile(r"\x1b\[[\d;]*3\dm")


def run_in_terminal(notebook: Path, folder: Path, **variables: str) -> tuple[str, int | None]:
    """Run the notebook in a terminal; return all that it shows, and the exit status."""
    command = [str(ROOT / "notebooks" / "run.py"), str(notebook), str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("TERM", "xterm-256color")
        for name, value in variables.items():
            patch.setenv(name, value)
        child = pexpect.spawn(
            sys.executable, command, cwd=str(ROOT), dimensions=(40, 100), encoding="utf8", timeout=200
        )
    child.expect(pexpect.EOF)
    child.close()
    return child.before.replace("\r\n", "\n"), child.exitstatus


def test_the_demo_shows_each_output_once_in_colour(tmp_path: Path) -> None:
    shown, status = run_in_terminal(ROOT / "notebooks" / "01_quickstart.ipynb", tmp_path)
    assert status == 0 and COLOUR.search(shown)
    text = re.sub(r"\x1b\[[\d;]*m", "", shown)
    for line in ("── rank 0 ──", "rank 2 of 4 computes on cpu", "ddip: 4 ranks on the CPU, gloo", "epoch 8: loss"):
        assert text.count(line) == 1, (line, text)
    end = text[text.index("01_quickstart.ipynb: done") :]
    (named,) = re.findall(r"Executed notebook: (\S+)", end)
    assert (ROOT / named).resolve() == tmp_path / "01_quickstart.ipynb" and "Try next" in end
    stored = nbformat.read(tmp_path / "01_quickstart.ipynb", as_version=4)
    assert any("text/html" in output.get("data", {}) for cell in stored.cells for output in cell.get("outputs", []))


def test_a_failed_notebook_has_its_error_and_no_colours(tmp_path: Path) -> None:
    source = "for step in range(3): print(step, end='\\r')\nprint('over')\n1 / 0"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    shown, status = run_in_terminal(tmp_path / "wrong.ipynb", tmp_path / "out", NO_COLOR="1")
    assert status == 1 and not COLOUR.search(shown)
    assert "over\n" in shown and "2\rover" not in shown
    assert shown.count("ZeroDivisionError: division by zero") == 1 and "Try next" not in shown
    assert (tmp_path / "out" / "wrong.ipynb").exists()
