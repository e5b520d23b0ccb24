"""Bars that are widgets in a stored notebook: what a page without widgets shows of them."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from .notebook import Notebook

WIDGET = "application/vnd.jupyter.widget-view+json"
CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 100\n%makedip -n 2",
    "one rank": "%%dip\nfrom tqdm.auto import tqdm\nfor i in tqdm(range(50), desc='<b> & c'): pass",
    "nested": (
        "%%dip\nfor i in tqdm(range(3), desc='outer'):\n    for j in tqdm(range(4), desc='inner', leave=i == 2): pass"
    ),
    "failed": "%%dip\nfor i in tqdm(range(10)):\n    if i == 4: 1 / 0",
    "all ranks": "%%dip -S all\nprint('said')\nfor i in tqdm(range(50)): pass",
    "first part": "%%dip -S all\nbar = tqdm(total=10, mininterval=0)\nbar.update(2)\nNone",
    "labels": "%config DipMagics.style = 'labels'",
    "second part": "%%dip\nbar.update(3)\nNone",
    "with labels": "%%dip -S all\nfor i in tqdm(range(50 + rank)): pass",
    "grouped": "%config DipMagics.style = 'grouped'",
    "with groups": "%%dip -S all\nfor i in tqdm(range(50)): pass\nlast = tqdm(total=10, mininterval=0)",
    "last part": "%%dip -S all\nlast.update(10)\nNone",
    "other widgets": (
        "%%dip\nimport ipywidgets\nslider = ipywidgets.IntSlider(3)\ndisplay(slider)\nslider.value = 5\n"
        "load = ipywidgets.IntProgress(description='load')\ndisplay(load)\nload.value = 55"
    ),
}


@pytest.fixture(scope="module")
def outputs(warmed_up: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[nbformat.NotebookNode]]:
    """Run the notebook, and return the outputs of each cell."""
    cells = [nbformat.v4.new_code_cell(code) for code in CELLS.values()]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    folder: Path = tmp_path_factory.mktemp("bars")
    client = NotebookClient(notebook, timeout=240, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def display_texts(outputs: list[nbformat.NotebookNode]) -> list[str]:
    """Return the texts of the displays."""
    return [str(output.data["text/plain"]) for output in outputs if output.output_type == "display_data"]


@pytest.mark.grid
def test_a_bar_is_at_its_end_and_still_a_widget(outputs: dict[str, list[nbformat.NotebookNode]]) -> None:
    (bar,) = outputs["one rank"]
    assert re.fullmatch(r"<b> & c: 100%\|██████████\| 50/50 \[.*it/s\]", bar.data["text/plain"])
    assert bar.data[WIDGET]["model_id"]


@pytest.mark.grid
def test_nested_bars_keep_the_outer_and_last_one(
    outputs: dict[str, list[nbformat.NotebookNode]],
) -> None:
    outer, *inner, last = outputs["nested"]
    assert re.match(r"outer: 100%\|██████████\| 3/3 \[", outer.data["text/plain"])
    assert re.match(r"inner: 100%\|██████████\| 4/4 \[", last.data["text/plain"])
    assert [output.data for output in inner] == 2 * [{"text/plain": ""}]


@pytest.mark.grid
def test_the_bar_of_a_failed_cell_shows_its_progress(outputs: dict[str, list[nbformat.NotebookNode]]) -> None:
    assert re.match(r" 40%\|████      \| 4/10 \[", display_texts(outputs["failed"])[0])
    assert outputs["failed"][-1].output_type == "error"


@pytest.mark.grid
def test_each_rank_has_a_bar_and_equal_ranks_share_tabs(
    outputs: dict[str, list[nbformat.NotebookNode]],
) -> None:
    shown = outputs["all ranks"]
    bars = [output.data["text/plain"] for output in shown if WIDGET in output.get("data", {})]
    assert [bar.split(" [")[0] for bar in bars] == 2 * ["100%|██████████| 50/50"]
    assert "── ranks 0, 1 ──\nsaid" in display_texts(shown)
    labels = [text.split(" [")[0] for text in display_texts(outputs["with labels"])]
    assert sorted(labels[::2]) == ["[rank 0]", "[rank 1]"]
    assert sorted(labels[1::2]) == [f"100%|██████████| {n}/{n}" for n in (50, 51)]
    assert display_texts(outputs["with groups"])[0].startswith("100%|██████████| 50/50 [")
    headings = [output.text for output in outputs["with groups"] if output.output_type == "stream"]
    assert headings == ["── rank 0 ──\n", "── rank 1 ──\n"]  # each rank has its own widget


@pytest.mark.grid
def test_a_bar_continued_by_another_cell_reaches_its_end(outputs: dict[str, list[nbformat.NotebookNode]]) -> None:
    """Any style may show either cell."""
    first = [
        output.data["text/plain"].split(" [")[0] for output in outputs["first part"] if WIDGET in output.get("data", {})
    ]
    assert first == 2 * [" 50%|█████     | 5/10"]
    assert display_texts(outputs["with groups"])[1].startswith("100%|██████████| 10/10 [")
    assert outputs["second part"] == outputs["last part"] == []


@pytest.mark.grid
def test_other_widgets_keep_their_text(outputs: dict[str, list[nbformat.NotebookNode]]) -> None:
    assert display_texts(outputs["other widgets"]) == ["IntSlider(value=3)", "load |█████▌    |"]


def test_a_bar_moved_by_a_late_thread_reaches_its_end(notebook: Notebook) -> None:
    cell = notebook.begin(
        "%%dip -r 0\nimport threading, time\nfrom pathlib import Path\nfrom tqdm.auto import tqdm\n"
        "bar = tqdm(total=4)\n"
        "def go_on():\n    while not Path('go on').exists(): time.sleep(0.01)\n    bar.update(4); bar.close()\n"
        "threading.Thread(target=go_on).start()"
    )
    shown = notebook.finish(cell)
    (display,) = (content for kind, content in shown.messages if kind == "display_data" and WIDGET in content["data"])
    assert display["data"]["text/plain"].startswith("  0%|")
    (notebook.folder / "go on").touch()
    assert "100%|██████████| 4/4 [" in notebook.late(cell, "4/4 [")
