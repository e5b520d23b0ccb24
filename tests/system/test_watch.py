"""``%dipwatch`` in JupyterLab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from .lab import Lab, wait_for
from .test_tabs import choose_theme

CELLS = {
    "start": "%load_ext ddip\n%makedip -n 3",
    "watch": "%dipwatch",
    "train": (
        "%%dip\nimport time, torch.distributed as dist\nfrom pathlib import Path\n"
        "enough = [Path('enough').unlink(missing_ok=True)]\ndist.barrier()\n"
        "while not enough[0]:\n"
        "    if rank == 1: time.sleep(0.03)\n"
        "    enough = [Path('enough').exists()]\n"
        "    dist.broadcast_object_list(enough, 0)"
    ),
    "off": "%dipwatch off",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


def audit_view(page: Page) -> tuple[int, list[str]]:
    """Return how many texts of the view axe-core has measured for contrast, and its findings."""
    page.add_style_tag(content="body { overflow: visible !important }")  # otherwise axe-core treats all text as hidden
    found = Axe().run(page, context=".ddip-live", options={"resultTypes": ["violations", "passes"]}).response
    measured = sum(len(rule["nodes"]) for rule in found["passes"] if rule["id"] == "color-contrast")
    return measured, [str((rule["id"], rule["nodes"][:2])) for rule in found["violations"]]


def test_the_view_updates_during_a_cell_and_leaves_a_line(lab: Lab) -> None:
    lab.start("watched.ipynb", list(CELLS.values()), NUMBER["start"])
    assert lab.run(NUMBER["watch"]).split()[:2] == ["rank", "state"]
    lab.begin(NUMBER["train"])
    wait_for(lambda: "rank 1 is the straggler" in lab.text(NUMBER["watch"]), "the straggler")
    view = lab.output(NUMBER["watch"])
    assert view.locator("tr.ddip-slow").inner_text().split()[0] == "1"
    assert view.locator("td.ddip-busy").count() == 3
    height = view.locator("tr.ddip-slow").bounding_box()
    assert height is not None and height["height"] < 30  # a rank is one line
    (lab.folder / "enough").touch()
    lab.finish(NUMBER["train"])
    wait_for(lambda: "last" in lab.text(NUMBER["watch"]), "the idle ranks")


@pytest.mark.parametrize("name", ["JupyterLab Light", "JupyterLab Dark"])
def test_axe_finds_nothing_in_the_view(lab: Lab, name: str) -> None:
    choose_theme(lab, name)
    looked: tuple[int, list[str]] = 0, ["nothing yet"]

    def has_measured() -> bool:  # axe-core measures no colours while the theme changes
        nonlocal looked
        looked = audit_view(lab.page)
        return looked[0] > 3

    try:
        wait_for(has_measured, "axe-core to measure colours")
        assert looked[1] == []
    finally:
        choose_theme(lab, "JupyterLab Light")


def test_the_saved_notebook_keeps_one_line_of_the_view(lab: Lab) -> None:
    lab.run(NUMBER["off"])
    wait_for(lambda: "it was turned off" in lab.text(NUMBER["watch"]), "the end of the view")
    lab.save()
    saved = json.loads(Path(lab.folder / "watched.ipynb").read_text())
    (output,) = saved["cells"][NUMBER["watch"]]["outputs"]
    assert "".join(output["data"]["text/plain"]) == "ddip: %dipwatch has ended: it was turned off"
