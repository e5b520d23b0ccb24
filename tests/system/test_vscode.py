"""The tabs in a page that behaves like VS Code's notebook renderer, as in its sources.

`extensions/notebook-renderers/src/index.ts` sets ``innerHTML``, `backLayerWebView.ts` creates the page around it,
`webview/browser/pre/index.html` has its first styles. The themes' values are those of VS Code 1.91.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from ddip.errors import RankError
from ddip.output.views.tabs import Tabs
from tests.unit.test_views import Page as Shown

from .lab import Lab, wait_for
from .test_tabs import audit_page

CODES = [*range(30, 48), *range(90, 98)]
COLOURS = " ".join(f"\x1b[{code}mcolour\x1b[0m" for code in CODES)
THEMES = {
    "vscode-dark": {
        "--vscode-editor-foreground": "#cccccc",
        "--vscode-editor-background": "#1f1f1f",
        "--vscode-panel-border": "#2b2b2b",
        "--vscode-focusBorder": "#0078d4",
    },
    "vscode-light": {
        "--vscode-editor-foreground": "#3b3b3b",
        "--vscode-editor-background": "#ffffff",
        "--vscode-panel-border": "#e5e5e5",
        "--vscode-focusBorder": "#005fb8",
    },
}
TEXT = {
    "--vscode-font-family": "system-ui",
    "--vscode-font-size": "13px",
    "--notebook-cell-output-font-family": "serif",
    "--notebook-cell-output-font-size": "15px",
    "--notebook-cell-output-line-height": "21px",
}
HOSTS = "'self' https://*.vscode-cdn.net"
POLICY = f"""default-src 'none'; script-src {HOSTS} 'unsafe-inline' 'unsafe-eval'; style-src {HOSTS} 'unsafe-inline';
img-src {HOSTS} https: http: data:; font-src {HOSTS} https:; connect-src https:; child-src https: data:"""
AROUND = """
<html lang="en" style="{style}"><head><meta charset="UTF-8"><title>notebook</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>
body {{ color: var(--vscode-editor-foreground); background: var(--vscode-editor-background); margin: 0; padding: 0;
 font-family: var(--vscode-font-family); font-size: var(--vscode-font-size) }}
img, video {{ max-width: 100%; max-height: 100% }}
input:focus {{ outline: 1px solid -webkit-focus-ring-color; outline-offset: -1px }}
#container > div > div > div.output {{ font-size: var(--notebook-cell-output-font-size); box-sizing: border-box }}
#container > div > div:not(.preview) > div {{ overflow-x: auto }}
table, thead, tr, th, td, tbody {{ border: none !important; border-spacing: 0; border-collapse: collapse }}
</style></head>
<body class="{theme}" style="overflow: hidden"><main id="container" style="position: absolute; width: 100%; top: 0">
<div class="cell_container"></div></main></body></html>
"""
RENDER = """([number, html]) => {
    const cell = document.querySelector(".cell_container")
    while (cell.children.length <= number) {
        const output = document.createElement("div")
        output.className = "output"
        cell.appendChild(document.createElement("div")).className = "output_container"
        cell.lastChild.appendChild(output)
    }
    const place = document.querySelectorAll(".output")[number]
    if (place.html === html) return  // only what has changed
    place.html = html
    while (place.firstChild) place.firstChild.remove()
    const element = document.createElement("div")
    element.innerHTML = html
    element.tabIndex = 0
    place.appendChild(element)
}"""


def render_displays(page: Page, shown: Shown) -> None:
    """Show each display in its place."""
    for number, data in enumerate(shown.shown):
        page.evaluate(RENDER, [number, data["text/html"]])


@pytest.fixture(params=list(THEMES))
def page(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open an empty VS Code notebook."""
    assert lab.page.context.browser is not None
    page = lab.page.context.browser.new_page()
    style = ";".join(f"{name}:{value}" for name, value in {**THEMES[request.param], **TEXT}.items())
    page.set_content(AROUND.format(style=style, theme=request.param, policy=POLICY))
    yield page
    page.close()


@pytest.fixture
def shown() -> Shown:
    """Return the record of what the tabs of a running cell display."""
    return Shown()


@pytest.fixture
def view(shown: Shown) -> Tabs:
    """Create the tabs while their cell runs."""
    view = Tabs(shown, [0, 1, 2], 100_000)  # type: ignore[arg-type]
    for rank in range(3):
        view.text(rank, "stdout", f"on rank {rank}: {COLOURS}\n", None)
        view.text(rank, "stderr", f"warned {COLOURS}\n", None)
        table = f"<table><tr><td>{rank}</td></tr></table>"
        view.display(rank, {"text/html": table, "text/plain": "table"}, {}, None)
    view.draw()
    return view


def test_axe_finds_nothing_in_our_markup(page: Page, shown: Shown, view: Tabs) -> None:
    render_displays(page, shown)
    measured, violations = audit_page(page)
    assert violations == [] and measured > 2 * len(CODES)
    view.close({1: RankError("ZeroDivisionError", "division by zero", "\x1b[31mtraceback\x1b[0m")}, "ranks 0-2 · 1 s")
    render_displays(page, shown)
    measured, violations = audit_page(page)
    assert violations == [] and measured > 2 * len(CODES)
    assert "traceback" in page.locator(".ddip-shown:visible").inner_text()


def test_a_selected_tab_outlives_an_update(page: Page, shown: Shown, view: Tabs) -> None:
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text) if message.type == "error" else None)
    render_displays(page, shown)
    assert "on rank 0" in page.locator(".ddip-shown:visible").inner_text()
    page.locator("label", has_text="rank 2").click()
    wait_for(lambda: "on rank 2" in page.locator(".ddip-shown:visible").inner_text(), "the tab")
    view.text(2, "stdout", "more\n", None)
    view.close({}, "")
    render_displays(page, shown)
    assert "more" in page.locator(".ddip-shown:visible").inner_text()
    page.get_by_role("radio", name="rank 2").focus()
    page.keyboard.press("ArrowLeft")
    assert "on rank 1" in page.locator(".ddip-shown:visible").inner_text()
    assert refused == []


def test_text_in_tabs_follows_the_settings_for_outputs(page: Page, shown: Shown, view: Tabs) -> None:
    render_displays(page, shown)
    style = "e => [getComputedStyle(e).fontFamily, getComputedStyle(e).fontSize, getComputedStyle(e).lineHeight]"
    assert page.locator(".ddip-shown:visible pre").first.evaluate(style) == ["serif", "15px", "21px"]
    page.get_by_role("radio", name="rank 0").focus()
    page.keyboard.press("ArrowRight")
    ring = page.locator("label", has_text="rank 1").evaluate("e => getComputedStyle(e).outlineColor")
    page.evaluate("() => { document.body.style.outline = '1px solid var(--vscode-focusBorder)' }")
    assert ring == page.evaluate("() => getComputedStyle(document.body).outlineColor")
