"""The tabs as people use them: by keyboard, with a screen reader, in each theme, and without style."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page

from .lab import Lab, wait_for

CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip -n 3",
    "seen": (
        "%%dip -S all\nimport sys\nimport pandas as pd\nfrom IPython.display import JSON, Markdown\n"
        "print(f'on rank {rank}:', *(f'\\x1b[{c}mcolour\\x1b[0m' for c in (*range(30, 48), *range(90, 98))))\n"
        "print('\\x1b[32mwarned\\x1b[0m', file=sys.stderr)\n"
        "display(Markdown(f'# *{rank}*'), JSON({'rank': rank}))\n"
        "pd.DataFrame([[rank] * 60])"
    ),
    "same": "%%dip -S all\nprint('the same' if rank else 'not the same')",
    "error": "%%dip -S all\nprint('before')\nif rank == 2: 1 / 0",
    "plain": "print('plain')",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Lab]:
    """Open a notebook with three ranks, and run it to its end."""
    lab.start("tabs.ipynb", list(CELLS.values()), NUMBER["start"])
    for name in CELLS:
        if name != "start":
            lab.run(NUMBER[name])
    lab.save()
    yield lab


OURS = """targets => targets.map(target => {
    const found = document.querySelector(target)
    return Boolean(found && found.closest(".ddip, .ddip-ranks") && !found.closest(".ddip-html"))
})"""
"""Selects the elements that ddip has written. HTML of the ranks does not count."""


def audit_page(page: Page) -> tuple[int, list[str]]:
    """Return how many of ddip's texts axe-core has measured for contrast, and its findings."""
    # otherwise axe-core treats all text as hidden, because the body is 0 px high and clips it
    page.add_style_tag(content="body { overflow: visible !important }")
    found = Axe().run(page, options={"resultTypes": ["violations", "passes"]}).response
    nodes = [
        (kind, rule["id"], node["target"][0], node["html"][:200], [one["message"] for one in node["any"]])
        for kind in ("violations", "passes")
        for rule in found[kind]
        for node in rule["nodes"]
    ]
    ours = page.evaluate(OURS, [node[2] for node in nodes])
    nodes = [node for node, mine in zip(nodes, ours, strict=True) if mine]
    measured = sum(node[1] == "color-contrast" for node in nodes)
    return measured, [str(node) for node in nodes if node[0] == "violations"]


def choose_theme(notebook: Lab, name: str) -> None:
    """Choose a theme in the menu."""
    page = notebook.page
    page.locator(".lm-MenuBar-item", has_text="Settings").click()
    page.locator(".lm-Menu-item", has_text=re.compile("^Theme$")).hover()
    page.locator(".lm-Menu-item", has_text=re.compile(f"^{name}$")).click()
    ground = "() => getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()"
    wait_for(lambda: page.evaluate(ground) == ("#111" if "Dark" in name else "white"), name)


def tab_buttons(notebook: Lab, cell: str) -> Locator:
    """Return the tabs as a screen reader finds them."""
    return notebook.output(NUMBER[cell]).get_by_role("radio")


@pytest.mark.parametrize("name", ["JupyterLab Light", "JupyterLab Dark"])
def test_axe_finds_nothing_in_our_markup(notebook: Lab, name: str) -> None:
    choose_theme(notebook, name)
    measured, violations = 0, ["nothing yet"]

    def has_measured() -> bool:  # axe-core measures no colours while the theme changes
        nonlocal measured, violations
        measured, violations = audit_page(notebook.page)
        return measured > 20

    try:
        wait_for(has_measured, "axe-core to measure colours")
        assert violations == []
    finally:
        choose_theme(notebook, "JupyterLab Light")


def test_arrow_keys_move_between_tabs_with_a_visible_focus(notebook: Lab) -> None:
    tabs, output = tab_buttons(notebook, "seen"), notebook.output(NUMBER["seen"])
    wait_for(lambda: tabs.count() == 3, "the page to be drawn in its theme")
    assert [tab.get_attribute("aria-label") for tab in tabs.all()] == ["rank 0", "rank 1", "rank 2"]
    labels = output.locator("label.ddip-rank")
    tabs.first.focus()
    for key, rank in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowRight", 0), ("ArrowLeft", 2)):
        notebook.page.keyboard.press(key)
        assert f"on rank {rank}:" in output.locator(".ddip-shown:visible").inner_text()
        rings = labels.evaluate_all("all => all.map(label => getComputedStyle(label).outlineStyle)")
        assert rings == ["solid" if other == rank else "none" for other in range(3)]
    box = labels.nth(2).bounding_box()
    assert box is not None and box["height"] > 15


def test_ranks_sharing_a_tab_are_one_tab_for_screen_readers(notebook: Lab) -> None:
    output = notebook.output(NUMBER["same"])
    assert output.get_by_role("radiogroup", name="output by rank").count() == 1
    assert tab_buttons(notebook, "same").count() == 2
    other = output.get_by_role("radio", name="ranks 1, 2", exact=True)
    output.get_by_role("radio", name="rank 0", exact=True).focus()
    notebook.page.keyboard.press("ArrowRight")
    assert other.is_checked() and output.locator(".ddip-shown:visible").inner_text().strip() == "the same"
    assert output.get_by_role("group", name="ranks 1, 2", exact=True).count() == 1


def test_the_tab_of_the_rank_that_failed_is_open(notebook: Lab) -> None:
    output = notebook.output(NUMBER["error"])
    assert "division by zero" in output.locator(".ddip-shown:visible").inner_text()
    assert output.get_by_role("radio", name="rank 2 failed").count() == 1


def test_text_in_tabs_has_the_size_of_plain_output(notebook: Lab) -> None:
    size = "e => [getComputedStyle(e).fontSize, getComputedStyle(e).lineHeight, getComputedStyle(e).fontFamily]"
    plain = notebook.output(NUMBER["plain"]).locator("pre").first.evaluate(size)
    tabs = notebook.output(NUMBER["same"]).locator(".ddip-shown:visible pre").first.evaluate(size)
    assert tabs == plain


def saved_notebook(notebook: Lab) -> Any:
    return json.loads((notebook.folder / "tabs.ipynb").read_text())


def test_an_untrusted_notebook_has_headings_and_no_inactive_buttons(notebook: Lab) -> None:
    saved = saved_notebook(notebook)
    saved["cells"][0]["source"] = ["# somebody else's notebook"]
    (notebook.folder / "strange.ipynb").write_text(json.dumps(saved))
    notebook.load("strange.ipynb")
    try:
        output = notebook.output(NUMBER["same"])
        wait_for(lambda: bool(notebook.text(NUMBER["same"]).strip()), "the output to be shown")
        lines = [line for line in notebook.text(NUMBER["same"]).splitlines() if line.strip()]
        assert lines == ["rank 0", "not the same", "ranks 1, 2", "the same"]
        assert output.locator("input:visible, label:visible").count() == 0
        assert output.locator("strong:visible").all_inner_texts() == ["rank 0", "ranks 1, 2"]
    finally:
        notebook.load("tabs.ipynb")


def test_a_page_without_style_has_headings_and_no_css(notebook: Lab, tmp_path: Path) -> None:
    saved = saved_notebook(notebook)
    saved["cells"] = [saved["cells"][NUMBER["same"]]]
    (tmp_path / "strange.ipynb").write_text(json.dumps(saved))
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--sanitize-html", "strange.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert notebook.page.context.browser is not None
    page = notebook.page.context.browser.new_page()
    try:
        page.goto(f"file://{tmp_path / 'strange.html'}")
        text = page.locator(".jp-Cell-outputWrapper").inner_text()
    finally:
        page.close()
    assert "{" not in text and "ddip" not in text and "input" not in text
    assert [line for line in text.splitlines() if line.strip() and "style>" not in line] == [
        "rank 0",
        "not the same",
        "ranks 1, 2",
        "the same",
    ]


def test_a_browser_without_has_shows_headed_sections(notebook: Lab) -> None:
    """A name that no browser knows, in place of ``:has()``, stands for one that does not know it."""
    displays = saved_notebook(notebook)["cells"][NUMBER["same"]]["outputs"]
    known = "".join("".join(display["data"]["text/html"]) for display in displays)
    assert ":has(" in known
    assert notebook.page.context.browser is not None
    page = notebook.page.context.browser.new_page()
    try:
        page.set_content(f"<body>{known}</body>")
        assert page.locator("label:visible").all_inner_texts() == ["rank 0", "ranks 1, 2"]
        page.set_content(f"<body>{known.replace(':has(', ':unknown(')}</body>")
        assert page.locator("label:visible").count() == 0
        lines = [line for line in page.locator("body").inner_text().splitlines() if line.strip()]
        assert lines == ["rank 0", "not the same", "ranks 1, 2", "the same"]
    finally:
        page.close()
