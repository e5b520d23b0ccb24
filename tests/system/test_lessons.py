"""fastai's lesson notebooks train on all ranks, with small data in place of the downloads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.notebook import Notebook
from tests.cluster.test_exported_notebooks import assert_equal, shown_by_exports
from tests.cluster.test_notebooks import FOLDER, LESSONS, run_notebook
from tests.cluster.test_pages import WITH_CODE, name_of, needs_data, run_blocks

LOSS = re.compile(r"^(.+): loss ([\d.]+) -> ([\d.]+)$", re.MULTILINE)
PROVED = re.compile(r"^(.+): (True|False)$", re.MULTILINE)
MODELS = {"01_intro": 4, "05_pet_breeds": 2, "06_multicat": 1, "07_sizing_tta": 4, "08_collab": 16}
"""How many models each lesson trains and reports the loss of."""
LATER = ("fastai_01_intro", "fastai_05_pet_breeds", "fastai_06_multicat", "fastai_07_sizing_tta", "fastai_08_collab")
"""Lessons that ``make test-long`` runs."""


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with small data sets and weights in place of fastai's downloads."""
    folder = tmp_path_factory.mktemp("fastai")
    made = subprocess.run([sys.executable, FOLDER / "fastai_data.py", folder], capture_output=True, text=True)
    last = (made.stderr.strip().splitlines() or [""])[-1]
    if re.match(r"ModuleNotFoundError|ImportError|RuntimeError: operator torchvision", last):
        pytest.skip(f"fastai cannot be imported here: {last}")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=name, marks=[pytest.mark.long] * (name in LATER)) for path, name in LESSONS.items()],
)
def test_the_lesson_trains_on_all_ranks(
    path: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAI_HOME", str(small_data))
    monkeypatch.setenv("TORCH_HOME", str(small_data / "torch"))
    notebook = run_notebook(path, tmp_path)
    text = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    losses = LOSS.findall(text)
    assert len(losses) == MODELS[path.stem.removeprefix("fastai_")], text
    assert all(float(after) < float(before) for _, before, after in losses), losses
    proved = dict(PROVED.findall(text))
    assert proved.pop("parameters identical on all ranks") == "True"
    assert set(proved.values()) <= {"True"}, proved


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", [pytest.param(path, id=name) for path, name in LESSONS.items()])
def test_the_script_of_the_lesson_gives_its_values(
    path: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAI_HOME", str(small_data))
    monkeypatch.setenv("TORCH_HOME", str(small_data / "torch"))
    line = "%dipexport equal.py --check losses"
    assert_equal(shown_by_exports(path, tmp_path, [("%autodip off", line)])[line], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in WITH_CODE if needs_data(page)], ids=name_of)
def test_code_blocks_of_a_fastai_page_run_as_pasted(
    page: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAI_HOME", str(small_data))
    monkeypatch.setenv("TORCH_HOME", str(small_data / "torch"))
    notebook = Notebook(tmp_path)
    try:
        run_blocks(page, notebook, tmp_path)
    finally:
        notebook.shut_down()
