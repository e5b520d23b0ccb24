"""A bar that is a widget, in JupyterLab live and reopened, and in a page of nbconvert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .lab import Lab, wait_for

CELLS = [
    "%load_ext ddip\n%config DipMagics.report_after = 100\n%makedip -n 2",
    "%%dip\nfrom tqdm.auto import tqdm\nfor i in tqdm(range(50)): pass",
    "%%dip\nfor i in tqdm(range(50), leave=False): pass",
    "%%dip\nbar = tqdm(total=10, mininterval=0)\nbar.update(2)\nNone",
    "%%dip\nbar.update(8)\nNone",
]


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Lab:
    """Run a notebook with bars to its end, and save it."""
    lab.start("bars.ipynb", CELLS, 0)
    for number in range(1, len(CELLS)):
        lab.run(number)
    lab.save()
    return lab


def outputs_of(notebook: Lab, number: int) -> list[Any]:
    cells = json.loads((notebook.folder / "bars.ipynb").read_text())["cells"]
    return list(cells[number]["outputs"])


def test_a_bar_is_shown_once_and_saved_as_complete(notebook: Lab) -> None:
    for number, end in ((1, "50/50"), (3, "10/10")):
        bars = notebook.output(number).locator(".widget-hprogress")
        wait_for(lambda bars=bars: bars.count() == 1, "the bar to be drawn anew")  # type: ignore[misc]
        assert bars.first.is_visible() and end in notebook.text(number)
        (saved,) = outputs_of(notebook, number)
        text = "".join(saved["data"]["text/plain"])
        assert text.startswith("100%|██████████| ") and end in text


def test_a_cleared_bar_leaves_nothing(notebook: Lab) -> None:
    assert notebook.text(2).strip() == ""
    assert ["".join(output["data"]["text/plain"]) for output in outputs_of(notebook, 2)] == [""]


@pytest.mark.parametrize("state", [True, False])
def test_an_nbconvert_page_shows_the_completed_bar(notebook: Lab, tmp_path: Path, state: bool) -> None:
    """Convert with and without widget state, which JupyterLab does not save by default."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--execute", "--output-dir", str(tmp_path)]
    command += [f"--ExecutePreprocessor.store_widget_state={state}", "bars.ipynb"]
    subprocess.run(command, cwd=notebook.folder, check=True, capture_output=True)
    page = (tmp_path / "bars.html").read_text()
    assert ("100%|██████████| 50/50" in page) == (not state)
    assert ('"value": 50.0' in page) == state
