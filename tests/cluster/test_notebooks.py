"""Every notebook runs from start to end, and is stored without outputs."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


LESSONS = {path: path.stem for path in NOTEBOOKS if path.stem.startswith("fastai_")}
OTHERS = {path: path.stem for path in NOTEBOOKS if path not in LESSONS}
LOSS = re.compile(r"^(.+): loss ([\d.]+) -> ([\d.]+)$", re.MULTILINE)
PROVED = re.compile(r"^(.+): (True|False)$", re.MULTILINE)
MODELS = {"01_intro": 4, "05_pet_breeds": 2, "06_multicat": 1, "07_sizing_tta": 4, "08_collab": 16}
"""How many models each lesson trains whose loss it tells."""


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook at `path`, after a run in `folder` in which the cells that shall raise, and no others, raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        errors = [out.ename for out in cell.get("outputs", []) if out.output_type == "error"]
        assert bool(errors) == ("raises-exception" in cell.metadata.get("tags", [])), (cell.source, errors)
    return notebook


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", OTHERS, ids=OTHERS.values())
def test_the_notebook_runs(path: Path) -> None:
    notebook = run(path, FOLDER)
    if path.stem == "quickstart":
        shown = [out for cell in notebook.cells for out in cell.get("outputs", [])]
        assert any("image/png" in out.get("data", {}) for out in shown), "no plot of the loss"
        assert any("parameters identical on all ranks: True" in out.get("text", "") for out in shown)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small data sets and weights in the place of those that fastai would download."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all processes that share the tests
    folder = shared / "fastai"
    with (shared / "fastai.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run([sys.executable, FOLDER / "fastai_data.py", folder], capture_output=True, text=True)
    last = (made.stderr.strip().splitlines() or [""])[-1]
    if re.match(r"ModuleNotFoundError|ImportError|RuntimeError: operator torchvision", last):
        pytest.skip(f"fastai cannot be imported here: {last}")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", LESSONS, ids=LESSONS.values())
def test_the_lesson_trains_on_all_ranks(
    path: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAI_HOME", str(small_data))
    monkeypatch.setenv("TORCH_HOME", str(small_data / "torch"))
    notebook = run(path, tmp_path)
    text = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    losses = LOSS.findall(text)
    assert len(losses) == MODELS[path.stem.removeprefix("fastai_")], text
    assert all(float(after) < float(before) for _, before, after in losses), losses
    proved = dict(PROVED.findall(text))
    assert proved.pop("parameters identical on all ranks") == "True"
    assert set(proved.values()) <= {"True"}, proved


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
