"""Pages and notebooks about frameworks: their code runs as a reader pastes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.notebook import Notebook
from tests.cluster.test_notebooks import FRAMEWORKS, run_notebook
from tests.cluster.test_pages import WITH_CODE, name_of, needs_extra, run_blocks


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in WITH_CODE if needs_extra(page)], ids=name_of)
def test_the_blocks_of_a_page_run_as_they_are_pasted(page: Path, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    try:
        run_blocks(page, notebook, tmp_path)
    finally:
        notebook.shut_down()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", FRAMEWORKS, ids=[path.stem for path in FRAMEWORKS])
def test_the_notebook_trains_on_all_ranks(path: Path, tmp_path: Path) -> None:
    shown = [out for cell in run_notebook(path, tmp_path).cells for out in cell.get("outputs", [])]
    text = "".join(out.get("text", "") for out in shown)
    assert "parameters identical on all ranks: True" in text
