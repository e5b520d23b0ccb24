"""What a person sees in JupyterLab."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .lab import Lab, wait_for

CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip -n 4",
    "tabs": (
        "%%dip -S all\nimport matplotlib.pyplot as plt, pandas as pd, torch\nprint('loss on rank', rank)\n"
        "plt.figure(figsize=(3, 2)); plt.plot([rank, 1]); plt.show()\npd.DataFrame({'rank': [rank]})"
    ),
    "same": "%%dip -S all\nprint('the same' if rank else 'not the same')",
    "bar": (
        "%%dip\nimport time\nfrom tqdm import tqdm\nfrom pathlib import Path\nPath('half').unlink(missing_ok=True)\n"
        "for i in tqdm(range(100), mininterval=0):\n"
        "    while i == 50 and rank == 0 and not Path('half').exists(): time.sleep(0.01)"
    ),
    "live": (
        "%%dip -S all\nPath('go').unlink(missing_ok=True)\nprint('first line of', rank)\n"
        "while rank == 0 and not Path('go').exists(): time.sleep(0.01)\nprint('last line of', rank)"
    ),
    "flow": (
        "%%dip -S all\nimport time\nfrom pathlib import Path\nPath('dry').unlink(missing_ok=True)\nnumber = 0\n"
        "while not Path('dry').exists(): number += 1; print('line', number, 'of', rank); time.sleep(0.01)"
    ),
    "error": "%%dip -S all\nprint('before')\nif rank in (1, 2): 1 / 0",
    "hang": (
        "%%dip\nimport torch.distributed as dist\nkept = rank\nPath(f'hangs-{rank}').touch()\n"
        "if rank: dist.barrier()\nwhile not rank: pass"
    ),
    "after": "%%dip\ndist.barrier()\nprint('kept', kept)",
    "tab": "%%dip\ncertain_name = 1",
    "complete": "%%dip\ncertain_na",
    "slider": "%%dip\nimport ipywidgets\nslider = ipywidgets.IntSlider(3)\nslider",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Lab]:
    """Open a notebook with four ranks, in which the tests run one after the other."""
    text = lab.start("seen.ipynb", list(CELLS.values()), NUMBER["start"])
    assert re.search(r"ddip: 4 ranks on the CPU, gloo, (\d+\.\d s|unchanged)", text)
    yield lab


def test_each_rank_has_a_tab_with_plot_and_table(notebook: Lab) -> None:
    notebook.run(NUMBER["tabs"])
    output = notebook.output(NUMBER["tabs"])
    tabs = output.locator("label.ddip-rank")
    assert tabs.all_inner_texts() == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for rank in (0, 3, 1):
        tabs.nth(rank).click()
        shown = output.locator(".ddip-shown:visible")
        assert shown.count() == 1
        assert f"loss on rank {rank}\n" in shown.inner_text()
        assert shown.locator("table").inner_text().split()[-1] == str(rank)
        assert shown.locator("img").evaluate("image => image.naturalWidth") > 100


def test_ranks_with_the_same_output_share_a_tab(notebook: Lab) -> None:
    notebook.run(NUMBER["same"])
    output = notebook.output(NUMBER["same"])
    assert output.locator("label.ddip-rank").all_inner_texts() == ["rank 0", "ranks 1-3"]
    output.locator("label.ddip-rank").nth(1).click()
    assert output.locator(".ddip-shown:visible").inner_text().strip() == "the same"


def test_a_bar_moves_and_ends_at_100_percent(notebook: Lab) -> None:
    notebook.begin(NUMBER["bar"])
    wait_for(lambda: "50/100" in notebook.text(NUMBER["bar"]), "the bar at one half")
    (notebook.folder / "half").touch()
    notebook.finish(NUMBER["bar"])
    text = notebook.text(NUMBER["bar"])
    assert "100%" in text and "100/100" in text and "50/100" not in text and len(text.splitlines()) == 1


def test_the_selected_tab_stays_while_the_cell_runs(notebook: Lab) -> None:
    notebook.begin(NUMBER["live"])
    output = notebook.output(NUMBER["live"])
    wait_for(lambda: output.locator("label.ddip-rank").count() == 4, "the tabs")
    wait_for(lambda: "last line of 2" in (output.text_content() or ""), "rank 2's output")
    running = output.locator("label.ddip-runs")
    wait_for(lambda: running.all_inner_texts() == ["rank 0"], "the others to have finished")
    output.locator("label.ddip-rank").nth(2).click()
    (notebook.folder / "go").touch()
    notebook.finish(NUMBER["live"])
    assert output.locator(".ddip-shown:visible").inner_text().split("\n")[:2] == ["first line of 2", "last line of 2"]


def test_clicks_on_tabs_are_not_lost_while_output_flows(notebook: Lab) -> None:
    notebook.begin(NUMBER["flow"])
    output = notebook.output(NUMBER["flow"])
    wait_for(lambda: "line 100 of 3" in (output.text_content() or ""), "the output of rank 3")
    for click in range(1, 21):
        rank = -click % 4
        output.locator("label.ddip-rank").nth(rank).click(delay=90)  # as long as a person presses the button
        assert output.get_by_role("radio").nth(rank).is_checked()
        assert f" of {rank}\n" in output.locator(".ddip-shown:visible").inner_text()
    (notebook.folder / "dry").touch()
    notebook.finish(NUMBER["flow"])


def test_an_error_appears_in_tabs_and_stops_the_notebook(notebook: Lab) -> None:
    text = notebook.run(NUMBER["error"])
    output = notebook.output(NUMBER["error"])
    assert output.locator("label.ddip-rank").all_inner_texts() == ["ranks 0, 3", "ranks 1, 2 ✗"]
    output.locator("label.ddip-rank").nth(1).click()
    assert "division by zero" in output.locator(".ddip-shown:visible").inner_text()
    assert "CellError: ranks 1, 2: ZeroDivisionError: division by zero" in text
    assert f"In{notebook.prompt(NUMBER['error']).rstrip(':')}, line 2" in text


def test_the_stop_button_ends_a_cell_that_hangs(notebook: Lab) -> None:
    notebook.begin(NUMBER["hang"])
    wait_for(lambda: len(list(notebook.folder.glob("hangs-*"))) == 4, "the cell to run on every rank")
    notebook.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="busy"]')
    notebook.page.locator('jp-button[data-command="notebook:interrupt-kernel"], .jp-StopButton').first.click()
    notebook.finish(NUMBER["hang"])
    assert "KeyboardInterrupt: the cell was interrupted on ranks 0-3" in notebook.text(NUMBER["hang"])
    assert notebook.run(NUMBER["after"]).strip().endswith("kept 0")


def test_tab_completes_a_name_of_the_ranks(notebook: Lab) -> None:
    notebook.run(NUMBER["tab"])
    notebook.cell(NUMBER["complete"]).locator(".cm-content").click()
    notebook.page.keyboard.press("Control+End")
    offered = notebook.page.locator(".jp-Completer-item")
    for _ in range(10):  # a busy machine may miss JupyterLab's limit of a second; a person would press Tab again
        notebook.page.keyboard.press("Tab")
        with contextlib.suppress(AssertionError):
            wait_for(lambda: "certain_name" in "".join(offered.all_inner_texts()), "the offer", 4)
            break
    notebook.page.keyboard.press("Enter")
    code = notebook.cell(NUMBER["complete"]).locator(".cm-content")
    wait_for(lambda: "certain_name" in code.inner_text(), "the completion")


def test_a_widget_of_a_rank_is_moved_by_hand(notebook: Lab) -> None:
    notebook.run(NUMBER["slider"])
    output = notebook.output(NUMBER["slider"])
    handle = output.locator(".noUi-handle")
    handle.wait_for()
    handle.focus()
    notebook.page.keyboard.press("ArrowRight")
    notebook.page.keyboard.press("ArrowRight")
    wait_for(lambda: "5" in output.locator(".widget-readout").inner_text(), "the slider")
    code = notebook.cell(NUMBER["slider"]).locator(".cm-content")
    code.click()
    notebook.page.keyboard.press("Control+a")
    notebook.page.keyboard.insert_text("%%dip\nprint('it is', slider.value)")
    assert "it is 5" in notebook.run(NUMBER["slider"])


def test_a_saved_notebook_reads_well(notebook: Lab) -> None:
    notebook.save()
    notebook.load("seen.ipynb")
    output = notebook.output(NUMBER["tabs"])
    tabs = output.locator("label.ddip-rank")
    tabs.nth(2).click()
    assert "loss on rank 2" in output.locator(".ddip-shown:visible").inner_text()
    assert "100/100" in notebook.text(NUMBER["bar"]) and "50/100" not in notebook.text(NUMBER["bar"])
    saved = json.loads((notebook.folder / "seen.ipynb").read_text())
    (bar,) = saved["cells"][NUMBER["bar"]]["outputs"]
    assert "".join(bar["data"]["text/plain"]).startswith("100%|")


def test_without_style_and_buttons_output_has_headed_sections(notebook: Lab) -> None:
    """Open a notebook that JupyterLab does not trust; GitHub also removes style and buttons."""
    saved = json.loads((notebook.folder / "seen.ipynb").read_text())
    saved["cells"][0]["source"] = ["# somebody else's notebook"]
    (notebook.folder / "others.ipynb").write_text(json.dumps(saved))
    notebook.load("others.ipynb")
    wait_for(lambda: bool(notebook.text(NUMBER["same"]).strip()), "the output to be shown")
    lines = [line for line in notebook.text(NUMBER["same"]).splitlines() if line.strip()]
    assert lines == ["rank 0", "not the same", "ranks 1-3", "the same"]


def test_an_exported_html_page_has_tabs(notebook: Lab, tmp_path: Path) -> None:
    """Convert the notebook to HTML, as nbviewer does."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", str(tmp_path), "seen.ipynb"]
    subprocess.run(command, cwd=notebook.folder, check=True, capture_output=True)
    assert notebook.page.context.browser is not None
    page = notebook.page.context.browser.new_page()
    try:
        page.goto(f"file://{tmp_path / 'seen.html'}")
        tabs = page.locator("label.ddip-rank", has_text="rank 3").first
        tabs.click()
        shown = page.locator(".ddip-shown:visible").first
        assert "loss on rank 3" in shown.inner_text()
    finally:
        page.close()


def test_notebook_7_shows_tabs_and_runs_cells(notebook: Lab) -> None:
    notebook.page.goto(f"{notebook.url}/notebooks/seen.ipynb")
    notebook.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    output = notebook.output(NUMBER["tabs"])
    output.locator("label.ddip-rank").nth(1).click()
    assert "loss on rank 1" in output.locator(".ddip-shown:visible").inner_text()
    code = notebook.cell(NUMBER["same"]).locator(".cm-content")
    code.click()
    notebook.page.keyboard.press("Control+a")
    notebook.page.keyboard.insert_text("%%dip -S all\nprint('in Notebook 7', rank)")
    notebook.run(NUMBER["same"])
    output = notebook.output(NUMBER["same"])
    output.locator("label.ddip-rank").nth(3).click()
    assert output.locator(".ddip-shown:visible").inner_text().strip() == "in Notebook 7 3"
