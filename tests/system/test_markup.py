"""Output of ranks between the markup of the tabs, as a browser reads it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from ddip.output.page.markup import contain_html
from ddip.output.page.tab_page import STYLE
from tests.unit.test_markup import NASTY

from .lab import Lab

BEFORE = (
    '<div class="ddip" id="tabs"><label class="ddip-rank" id="first">rank 0</label><div class="ddip-shown" id="shown">'
)
AFTER = '</div><label class="ddip-rank" id="second">rank 1</label></div><p id="after">the next cell</p>'
PLACES = """() => {
    const at = id => document.getElementById(id)
    const seen = id => {
        const box = at(id).getBoundingClientRect()
        return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === at(id)
    }
    return [
        at("shown").parentElement.id, at("second").parentElement.id, at("after").parentElement.id,
        at("shown").children.length, at("tabs").children.length, at("second").textContent, at("after").textContent,
        seen("first"), seen("second"), seen("after"),
    ]
}"""


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator[Page]:
    """Open another page of the browser."""
    assert lab.page.context.browser is not None
    page = lab.page.context.browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("whole", [True, False], ids=["a page of its own", "put into a page"])
@pytest.mark.parametrize("source", NASTY)
def test_nothing_breaks_out_of_its_tab(page: Page, source: str, whole: bool) -> None:
    """Test the page as nbconvert writes it, and as JupyterLab inserts it."""
    body = f"{BEFORE}{contain_html(source)}{AFTER}"
    if whole:
        page.set_content(f"<!DOCTYPE html><head>{STYLE}</head><body><main id='main'>{body}</main></body>")
    else:
        page.set_content(f"<!DOCTYPE html><head>{STYLE}</head><body><main id='main'></main></body>")
        page.evaluate("body => { document.getElementById('main').innerHTML = body }", body)
    assert page.evaluate(PLACES) == ["tabs", "tabs", "main", 1, 3, "rank 1", "the next cell", True, True, True]


def test_the_sources_break_out_of_unprotected_pages(page: Page) -> None:
    """Prove that the sources are dangerous; otherwise this file would prove nothing."""
    broken = 0
    for source in NASTY:
        whole = f"<!DOCTYPE html><head>{STYLE}</head><body><main id='main'>{BEFORE}{source}{AFTER}</main></body>"
        try:
            page.set_content(whole)
            places = page.evaluate(PLACES)
        except Exception:  # the places are missing, or the source has opened another page
            places = []
        broken += places != ["tabs", "tabs", "main", 1, 3, "rank 1", "the next cell", True, True, True]
    assert broken > len(NASTY) * 0.75


def test_a_style_of_the_rank_applies_to_its_own_output(page: Page) -> None:
    styled = contain_html("<style>#T_1 td { color: rgb(1, 2, 3) } td { top: 1px }</style><table id='T_1'><td>x</table>")
    page.set_content(f"<!DOCTYPE html>{STYLE}<div class='ddip-shown'>{styled}</div><table><td>y</table>")
    colours = page.evaluate("() => [...document.querySelectorAll('td')].map(cell => getComputedStyle(cell).color)")
    assert colours == ["rgb(1, 2, 3)", "rgb(0, 0, 0)"]


ELEMENTS = """
a b i nobr span div p ul ol li dl dt dd table thead tbody tfoot tr td th caption colgroup col select option
optgroup button form fieldset h1 h2 pre listing textarea title style svg math mi mtext annotation-xml foreignObject desc
br hr img input details summary iframe noscript template ruby rt rp rb rtc object marquee address section main center
label dialog menu blockquote font big em mglyph g video nav
"""
IN_PLACE = """sources => sources.filter(source => [false, true].some(whole => {
    let page = document.implementation.createHTMLDocument("")
    page.body.innerHTML = "<main id='main'></main>"
    if (whole) page = new DOMParser().parseFromString(`<!DOCTYPE html><main id="main">${source}</main>`, "text/html")
    else page.getElementById("main").innerHTML = source
    const at = id => page.getElementById(id)
    return !at("shown") || !at("second") || !at("after") || at("shown").parentElement.id !== "tabs"
        || at("second").parentElement.id !== "tabs" || at("after").parentElement.id !== "main"
        || at("shown").children.length !== 1 || at("tabs").children.length !== 3
        || at("second").textContent !== "rank 1" || at("after").textContent !== "the next cell"
}))"""


def test_no_order_of_tags_breaks_out(page: Page) -> None:
    """Test 10 000 random sequences of tags as a browser parses them."""
    draw = random.Random(12)

    def random_tag() -> str:
        name = draw.choice(ELEMENTS.split())
        return draw.choice([f"<{name}>", f"<{name}>", f"<{name}/>", f"<{name} encoding=text/html>", f"</{name}>", "x"])

    sources = ["".join(random_tag() for _ in range(draw.randrange(2, 9))) for _ in range(10_000)]
    assert page.evaluate(IN_PLACE, [f"{BEFORE}{contain_html(source)}{AFTER}" for source in sources]) == []
    assert len(page.evaluate(IN_PLACE, [f"{BEFORE}{source}{AFTER}" for source in sources])) > 1000


def test_wide_output_can_be_scrolled(page: Page) -> None:
    wide = contain_html("<table><tr>" + "<td>a cell</td>" * 200 + "</table>")
    page.set_content(f"<!DOCTYPE html>{STYLE}<div class='ddip-shown'>{wide}</div>")
    scrolled = """() => {
        const last = [...document.querySelectorAll("td")].pop()
        last.scrollIntoView()
        const box = last.getBoundingClientRect()
        return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === last
    }"""
    assert page.evaluate(scrolled)
    bar = """() => [...document.querySelectorAll("div")].some(
        box => getComputedStyle(box).overflowX === "auto" && box.scrollWidth > box.clientWidth
    )"""
    assert page.evaluate(bar)
