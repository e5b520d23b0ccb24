"""Background cells in JupyterLab, also if the page was closed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .lab import Lab, wait_for

WAIT = "while not Path('{name}').exists(): time.sleep(0.01)"
CELLS = {
    "start": "%load_ext ddip\n%makedip -n 2\nfrom pathlib import Path",
    "train": (
        "%%dip --bg -S all\nimport time\nfrom pathlib import Path\nimport matplotlib.pyplot as plt\n"
        "from tqdm import tqdm\nfor step in tqdm(range(4)):\n    print('step', step, 'of rank', rank)\n"
        f"    {WAIT.format(name='go-train').replace('while', 'while step == 2 and')}\n"
        "plt.figure(figsize=(2, 1)); plt.plot([rank, 1]); plt.show()\nprint('the last line of', rank)"
    ),
    "sum": "1 + 1",
    "go": "Path('go-train').touch()",
    "wait": "%dipwait",
    "closed": (
        "%%dip --bg -S all\nprint('before the page was closed')\n"
        f"{WAIT.format(name='go-closed')}\nprint('while it was closed')\nPath('said').touch()\n"
        f"{WAIT.format(name='go-opened')}\nprint('after it was opened')\nrank"
    ),
    "again": "%dipcell",
    "blocking": f"%%dip\nprint('before')\n{WAIT.format(name='go-blocking')}\nprint('after')\nPath('blocked').touch()",
    "blocked": "%dipcell",
    "fails": "%%dip --bg\nprint('to fail')\nif rank == 1: raise ValueError('only here')",
    "next": "'next'",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Lab]:
    """Open a notebook with two ranks, in which the tests run one after the other."""
    lab.start("background.ipynb", list(CELLS.values()), NUMBER["start"])
    yield lab


def wait_for_output(notebook: Lab, cell: str, words: str) -> None:
    """Wait until the output of `cell` contains `words`, in any tab."""
    output = notebook.output(NUMBER[cell])
    wait_for(lambda: output.count() and words in (output.text_content() or ""), f"{words!r} below {cell}")


def close_and_open(notebook: Lab, meanwhile: str, until: str) -> None:
    """Close the page, let the cell continue without it, and open it again.

    Creates the file `meanwhile`, and waits until the ranks have created the file `until`.
    """
    notebook.save()
    notebook.page.goto("about:blank")
    (notebook.folder / meanwhile).touch()
    wait_for((notebook.folder / until).exists, "the cell to go on")
    notebook.load("background.ipynb")


def test_the_kernel_stays_free_while_output_arrives(notebook: Lab) -> None:
    notebook.run(NUMBER["train"])
    wait_for_output(notebook, "train", "step 2 of rank 1")
    assert notebook.run(NUMBER["sum"]).split()[-1] == "2"
    output = notebook.output(NUMBER["train"])
    assert "runs in the background on ranks 0, 1" in output.inner_text()
    output.locator("label.ddip-rank").nth(1).click()
    notebook.run(NUMBER["go"])
    wait_for_output(notebook, "train", "the last line of 1")
    notebook.run(NUMBER["wait"])
    assert output.locator("label.ddip-rank").all_inner_texts() == ["rank 0", "rank 1"]
    shown = output.locator(".ddip-shown:visible")
    assert "the last line of 1" in shown.inner_text() and "4/4" in (shown.text_content() or "")
    assert shown.locator("img").evaluate("image => image.naturalWidth") > 50
    assert " ended" in output.inner_text()


def test_a_page_closed_during_a_cell_misses_no_output(notebook: Lab) -> None:
    notebook.run(NUMBER["closed"])
    wait_for_output(notebook, "closed", "before the page was closed")
    close_and_open(notebook, "go-closed", "said")
    notebook.run(NUMBER["again"])
    wait_for_output(notebook, "again", "while it was closed")
    (notebook.folder / "go-opened").touch()
    wait_for_output(notebook, "again", "after it was opened")
    wait_for_output(notebook, "again", " ended")
    text = notebook.output(NUMBER["again"]).text_content() or ""
    order = [text.index(words) for words in ("before the page", "while it was closed", "after it was opened")]
    assert order == sorted(order)


def test_a_cell_that_blocked_the_kernel_can_be_shown_again(notebook: Lab) -> None:
    notebook.begin(NUMBER["blocking"])
    wait_for_output(notebook, "blocking", "before")
    close_and_open(notebook, "go-blocking", "blocked")
    assert "before\nafter\n" in notebook.run(NUMBER["blocked"])


def test_a_failure_appears_below_its_cell_and_before_the_next(notebook: Lab) -> None:
    notebook.run(NUMBER["fails"])
    wait_for_output(notebook, "fails", "CellError: rank 1: ValueError: only here")
    assert "failed: rank 1: ValueError: only here" in notebook.run(NUMBER["next"])
