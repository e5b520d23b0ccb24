"""Every notebook runs from start to end and is stored executed; some run in tests/system and frameworks."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from ..hosts.network import why_not_on_nb
from .answers import AnsweringClient
from .conftest import whole_preload

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


LESSONS = {path: path.stem for path in NOTEBOOKS if path.stem.startswith("fastai_")}
FRAMEWORKS = [path for path in NOTEBOOKS if path.stem.startswith(("hf_", "course_", "lightning"))]
"""Notebooks that need packages which ``make test`` does not install; ``tests/frameworks`` runs them."""
HOSTS = FOLDER / "several_hosts.ipynb"
"""A notebook that ``tests/hosts`` runs."""
NO_HOSTS = why_not_on_nb()
PLATFORMS = FOLDER / "kaggle_colab.ipynb"
"""A notebook that ``make test-platform`` runs with the packages that Kaggle and Colab pin."""
OTHERS = [
    pytest.param(
        path,
        id=path.stem,
        marks=[pytest.mark.grid, pytest.mark.skipif(path == HOSTS and NO_HOSTS is not None, reason=str(NO_HOSTS))],
    )
    for path in NOTEBOOKS
    if path not in LESSONS and path not in FRAMEWORKS and path != PLATFORMS
]


def checksum_of_code(notebook: nbformat.NotebookNode) -> str:
    """Return the checksum of the code of a notebook's cells."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def run_notebook(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run the notebook at `path` in `folder`; fail unless exactly the cells that are meant to raise do."""
    notebook = nbformat.read(path, as_version=4)
    with whole_preload():
        AnsweringClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        errors = [out.ename for out in cell.get("outputs", []) if out.output_type == "error"]
        assert bool(errors) == ("raises-exception" in cell.metadata.get("tags", [])), (cell.source, errors)
    return notebook


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", OTHERS)
def test_the_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = run_notebook(path, tmp_path)
    if path.stem == "01_quickstart":
        shown = [out for cell in notebook.cells for out in cell.get("outputs", [])]
        assert any("image/png" in out.get("data", {}) for out in shown), "no plot of the loss"
        assert any("parameters identical on all ranks: True" in out.get("text", "") for out in shown)
    if path.stem == "scripts":
        texts = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
        by_torchrun, by_ddip = re.findall(r"lr 0.1: last loss (\S+)", texts)
        assert by_torchrun == by_ddip
    if path.stem == "multi_process_tutorial":
        shown = [out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", [])]
        assert sum("parameters identical: True" in text for text in shown) == 2
        assert sum("this call of init_process_group may stay" in text for text in shown) == 4


@pytest.mark.grid
def test_the_kaggle_notebook_trains_and_saves_under_nbclient(tmp_path: Path) -> None:
    assert_trained(run_notebook(PLATFORMS, tmp_path), tmp_path)


@pytest.mark.grid
@pytest.mark.skipif(importlib.util.find_spec("papermill") is None, reason="pip install papermill")
def test_the_kaggle_notebook_trains_and_saves_under_papermill(tmp_path: Path) -> None:
    """Kaggle's "Save & Run All" runs a notebook with papermill."""
    command = [sys.executable, "-m", "papermill", str(PLATFORMS), "done.ipynb", "--no-progress-bar"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert_trained(nbformat.read(tmp_path / "done.ipynb", as_version=4), tmp_path)


def assert_trained(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Assert that the notebook for Kaggle and Colab has trained on two ranks and saved to `folder`."""
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "epoch 10: loss 0.0" in text and "ddip: ended 2 ranks" in text
    assert {path.name for path in folder.iterdir()} - {"done.ipynb"} == {"loss.png", "model.pt"}


MACHINES = re.compile(r"(?<![\w.])/(home|root|Users|work|tmp|opt)/")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_notebook_is_stored_executed_and_fresh(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.get("ddip", {}).get("cells") == checksum_of_code(notebook), (
        f"make notebooks NAMES={path.stem}"
    )
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert MACHINES.findall(json.dumps([cell.outputs for cell in cells])) == []
