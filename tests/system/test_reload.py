"""A page that is reloaded, opened in the middle of a cell, or opened a second time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from .lab import Lab, wait_for

CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 99\n%makedip -n 2",
    "text": (
        "%%dip -S all\nimport time, pandas as pd\nfrom pathlib import Path\nprint('text of', rank)\n"
        "pd.DataFrame([rank])"
    ),
    "widgets": (
        "%%dip -S all\nimport ipywidgets\nfrom tqdm.auto import tqdm\nfor i in tqdm(range(7), desc='bar'): pass\n"
        "slider = ipywidgets.IntSlider(rank + 5)\nframe = ipywidgets.Output(layout={'border': '3px solid red'})\n"
        "with frame: print('framed', rank)\ndisplay(slider, frame)"
    ),
    "interact": "%%dip -S all\nipywidgets.interact(lambda x: print('x is', x, 'on', rank), x=5);",
    "change": "%%dip\nslider.value = 99",
    "live": (
        "%%dip -S all\nprint('first of', rank)\nPath('begun').touch()\n"
        "for i in tqdm(range(4), desc='live', mininterval=0):\n"
        "    while i == 2 and not Path('go').exists(): time.sleep(0.01)\nprint('last of', rank)"
    ),
    "again": "%dipcell",
    "background": (
        "%%dip --bg -S all\nprint('begins on', rank)\nwhile not Path('end').exists(): time.sleep(0.01)\n"
        "print('ends on', rank)"
    ),
    "watch": "%dipwatch --once",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Lab]:
    """Open a notebook with two ranks, and run its first cells; the tests run one after the other."""
    lab.start("reload.ipynb", list(CELLS.values()), NUMBER["start"])
    for name in ("text", "widgets", "interact"):
        lab.run(NUMBER[name])
    yield lab


def words(page: Page, cell: str) -> str:
    """Return the words that a person reads below a cell."""
    output = page.locator(".jp-Notebook .jp-CodeCell").nth(NUMBER[cell]).locator(".jp-Cell-outputWrapper")
    return " ".join(output.inner_text().split()) if output.count() else ""


def wait_for_words(page: Page, cell: str, *expected: str) -> None:
    """Wait until a cell shows all of `expected`."""
    try:
        wait_for(lambda: all(part in words(page, cell) for part in expected), f"{expected} below {cell}", 20)
    except AssertionError as error:
        raise AssertionError(f"{error}; it shows: {words(page, cell)}") from None


def reload(notebook: Lab, is_busy: bool = False) -> None:
    """Save and press F5, and wait until the page is connected to the kernel again, which a busy one does not show."""
    notebook.save()
    notebook.page.reload()
    notebook.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    if not is_busy:
        notebook.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)


def begin_live(notebook: Lab) -> None:
    """Begin the cell that waits for the file ``go``, and wait until it runs."""
    for name in ("begun", "go"):  # of other tests
        (notebook.folder / name).unlink(missing_ok=True)
    has_begun = (notebook.folder / "begun").exists
    notebook.begin(NUMBER["live"], has_begun)
    wait_for(has_begun, "the cell to begin")


def choose(notebook: Lab, *entries: str) -> None:
    """Click an entry of a menu, and one in it."""
    notebook.page.keyboard.press("Escape")
    for entry in entries:
        notebook.page.get_by_role("menuitem", name=entry, exact=True).click()


def assert_all_shown(page: Page, *values: int) -> None:
    """Assert that text, tabs, tables, bars and widgets are shown, the sliders with `values`."""
    wait_for_words(page, "text", "rank 0 rank 1", "text of")
    for rank, value in enumerate(values):
        wait_for_words(page, "widgets", f"it/s] {value} framed {rank}")
    assert words(page, "widgets").count("7/7") == 2


def test_everything_is_there_after_a_reload_and_live(notebook: Lab) -> None:
    reload(notebook)
    assert_all_shown(notebook.page, 5, 6)
    output = notebook.output(NUMBER["text"])
    output.locator("label.ddip-rank").nth(1).click()
    assert "text of 1" in output.locator(".ddip-shown:visible").inner_text()
    notebook.run(NUMBER["change"])
    assert_all_shown(notebook.page, 99, 99)


def test_callbacks_answer_after_a_reload(notebook: Lab) -> None:
    wait_for_words(notebook.page, "interact", "x is 5 on 0", "x is 5 on 1")
    for rank in range(2):
        notebook.output(NUMBER["interact"]).locator(".noUi-handle").nth(rank).focus()
        notebook.page.keyboard.press("ArrowRight")
        wait_for_words(notebook.page, "interact", f"x is 6 on {rank}")
    reload(notebook)
    wait_for_words(notebook.page, "interact", "x is 6 on 0", "x is 6 on 1")


def test_a_second_window_shows_everything(notebook: Lab) -> None:
    notebook.save()
    browser = notebook.page.context.browser
    assert browser is not None
    window = browser.new_page()
    try:
        window.goto(f"{notebook.url}/lab/workspaces/second/tree/reload.ipynb?reset")
        window.wait_for_selector(".jp-Notebook .jp-CodeCell")
        assert_all_shown(window, 99, 99)
    finally:
        window.close()


def test_a_reopened_page_gets_further_output_from_dipcell(notebook: Lab) -> None:
    begin_live(notebook)
    wait_for_words(notebook.page, "live", "first of 0", "2/4")
    reload(notebook, is_busy=True)
    wait_for_words(notebook.page, "live", "first of 0")
    (notebook.folder / "go").touch()
    wait_for_words(notebook.page, "live", "live: 100%", "4/4")
    assert_all_shown(notebook.page, 99, 99)
    assert "last of 0" not in words(notebook.page, "live")
    notebook.run(NUMBER["again"])
    wait_for_words(notebook.page, "again", "first of 0", "last of 0", "4/4")


def test_a_background_cell_continues_below_dipcell_after_a_reload(notebook: Lab) -> None:
    (notebook.folder / "end").unlink(missing_ok=True)
    notebook.run(NUMBER["background"])
    wait_for_words(notebook.page, "background", "begins on 0")
    reload(notebook)
    notebook.run(NUMBER["watch"])
    notebook.run(NUMBER["again"])
    (notebook.folder / "end").touch()
    wait_for_words(notebook.page, "again", "begins on 0", "ends on 0")
    reload(notebook)
    wait_for_words(notebook.page, "watch", "rank state")
    wait_for_words(notebook.page, "again", "begins on 0", "ends on 0")


def test_cleared_outputs_stay_cleared(notebook: Lab) -> None:
    begin_live(notebook)
    wait_for_words(notebook.page, "live", "2/4")
    choose(notebook, "Edit", "Clear Outputs of All Cells")
    wait_for(lambda: words(notebook.page, "text") == "", "the outputs to be cleared")
    (notebook.folder / "go").touch()
    notebook.finish(NUMBER["live"])
    reload(notebook)
    notebook.run(NUMBER["change"])
    assert words(notebook.page, "text") == words(notebook.page, "widgets") == ""


@pytest.mark.long
def test_a_saved_notebook_shows_everything_without_its_kernel(notebook: Lab) -> None:
    for name in ("text", "widgets"):
        notebook.run(NUMBER[name])
    choose(notebook, "Settings", "Save Widget State Automatically")

    def has_saved_widgets() -> bool:
        notebook.save()
        return "widgets" in json.loads((notebook.folder / "reload.ipynb").read_text())["metadata"]

    wait_for(has_saved_widgets, "the state of the widgets to be saved")
    choose(notebook, "Kernel", "Shut Down Kernel")
    notebook.page.goto("about:blank")
    notebook.load("reload.ipynb")
    assert_all_shown(notebook.page, 5, 6)
