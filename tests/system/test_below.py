"""Output below the tabs, as people see and use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .lab import Lab, wait_for

CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip -n 3",
    "interact": (
        "%%dip -S all\nimport ipywidgets\nprint('beside')\n"
        "ipywidgets.interact(lambda x: print('x is', x, 'on', rank), x=5);"
    ),
    "bars": (
        "%%dip -S all\nfrom tqdm.auto import tqdm\nfor i in tqdm(range(2), desc='outer', leave=rank == 1):\n"
        "    for j in tqdm(range(3), desc='inner', leave=False): pass"
    ),
    "wiped": "%%dip -S all\nfrom tqdm import tqdm\nfor i in tqdm(range(9), leave=False): pass",
    "moves": (
        "%%dip -S all\nimport time\nfrom pathlib import Path\n"
        "def wait(name):\n    while not Path(name).exists(): time.sleep(0.01)\n"
        "if rank == 1: wait('rank-1-comes')\n"
        "slider = ipywidgets.IntSlider(rank, description=f'of {rank}')\nif rank: display(slider)\n"
        "wait('rank-2-goes')\nif rank == 2: slider.close()"
    ),
    "plots": (
        "%%dip -S all\nimport torch.distributed as dist\nfor turn in (2, 1, 0):\n    if turn == rank:\n"
        "        display({'text/html': f'<div id=\"plot-{rank}\"></div>'}, raw=True)\n"
        '        draw = f\'document.getElementById("plot-{rank}").textContent = "drawn by {rank}"\'\n'
        "        display({'application/javascript': draw}, raw=True)\n    dist.barrier()\nprint('text')"
    ),
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Lab]:
    """Open a notebook with three ranks, and run all cells but the one that waits for its test."""
    lab.start("below.ipynb", list(CELLS.values()), NUMBER["start"])
    for name in CELLS:
        if name not in ("start", "moves"):
            lab.run(NUMBER[name])
    yield lab


def lines_below(notebook: Lab, cell: str) -> list[str]:
    """Return the lines that a person reads below a cell."""
    return [line.strip() for line in notebook.text(NUMBER[cell]).splitlines() if line.strip()]


def test_each_rank_responds_to_its_own_interact_slider(notebook: Lab) -> None:
    handles = notebook.output(NUMBER["interact"]).locator(".noUi-handle")

    def wait_until_shown(*values: int) -> None:
        below = [(f"rank {rank}", "x", f"{x}", f"x is {x} on {rank}") for rank, x in enumerate(values)]
        expected = ["ranks 0-2", "beside", *(line for part in below for line in part)]
        wait_for(lambda: lines_below(notebook, "interact") == expected, f"what each rank makes of {values}")

    wait_until_shown(5, 5, 5)
    for rank, values in ((1, (5, 6, 5)), (2, (5, 6, 6)), (1, (5, 7, 6))):
        handles.nth(rank).focus()
        notebook.page.keyboard.press("ArrowRight")
        wait_until_shown(*values)


def test_closed_bars_leave_no_label_and_no_space(notebook: Lab) -> None:
    wait_for(lambda: len(lines_below(notebook, "bars")) > 1, "the bar of rank 1")
    label, bar, *_ = shown = lines_below(notebook, "bars")
    assert label == "rank 1" and bar.startswith("outer") and "rank" not in str(shown[1:])
    rooms = notebook.output(NUMBER["bars"]).locator(".jp-OutputArea-child")
    heights = rooms.evaluate_all("all => all.map(child => child.getBoundingClientRect().height)")
    assert sum(height > 0 for height in heights) == 2 < len(heights)
    assert lines_below(notebook, "wiped") == []


def test_a_replacing_widget_stays_when_the_other_one_closes(notebook: Lab) -> None:
    def wait_until_shown(*ranks: int) -> None:
        expected = [line for rank in ranks for line in (f"rank {rank}", f"of {rank}", f"{rank}")]
        wait_for(lambda: lines_below(notebook, "moves") == expected, f"the sliders of {ranks}")

    notebook.begin(NUMBER["moves"])
    wait_until_shown(2)
    (notebook.folder / "rank-1-comes").touch()
    wait_until_shown(1, 2)
    (notebook.folder / "rank-2-goes").touch()
    notebook.finish(NUMBER["moves"])
    wait_until_shown(1)


def test_plots_drawn_by_a_script_are_below_the_tabs(notebook: Lab) -> None:
    shown = [line for rank in range(3) for line in (f"rank {rank}", f"drawn by {rank}")]
    wait_for(lambda: lines_below(notebook, "plots")[-6:] == shown, "the plots, below their labels")
    assert "text" in lines_below(notebook, "plots")[:-6]
