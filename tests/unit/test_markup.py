"""HTML of a rank stays in its place, and unchanged.

``tests/system/test_lab.py`` shows the same sources in a browser.
"""

from __future__ import annotations

import base64
import re
import time
from html.parser import HTMLParser

import pytest

from ddip.output.page.markup import BEGIN, END, OPTIONAL, VOID, contain_html, picture_html

NASTY = [
    "</div></div></div>",
    "</body></html>",
    "<!-- no end",
    "<!--",
    "<plaintext>",
    "<div title='no end of the quote",
    '<div title="no end of the quote>',
    "<b><div></b>",
    "<p><div><span>",
    "<svg><p></svg>",
    "<svg><foreignObject><div/></foreignObject></svg>",
    "<svg></p><style><a title='</style><plaintext>'>",
    "<table><tr><td><table>",
    "<table></td></tr></table></td>",
    "<table><colgroup><div></colgroup>",
    "<td></tr></table>",
    "<select><option><div>",
    '<textarea><a title="</textarea><plaintext>">',
    '<title><a title="</title></div></div>">',
    '<xmp></div><i x="</xmp><plaintext>">',
    "<iframe></div>",
    "<noscript><i title='</noscript></div></div>'>",
    "<template><div>",
    "<form><form></form></form>",
    "<button><button></button></button></button>",
    "<ul><li><li></ul></li>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--></style></div></div>'>",
    "<style>*{display:none !important}</style>",
    "<style>} *{display:none !important} a{</style>",
    "<style>a{background:url({)}} *{display:none !important}</style>",
    "<style>a(}{) *{display:none !important}</style>",
    "<style>/* no end",
    "<style>a{content:'no end</style>",
    "<STYLE>:not(&){display:none !important}</STYLE>",
    "<style>:not(:root){display:none !important}</style>",
    "<style>:root{position:fixed;inset:0;background:black;z-index:9999}</style>over all",
    "<style>:root{contain:none !important}</style><div style='position:fixed;inset:0;background:black'>over all</div>",
    "<style>&~*{display:none !important}</style>",
    '<div style="position:fixed;inset:0;background:black;z-index:9999">over all</div>',
    '<base href="https://example.org/"><meta http-equiv="refresh" content="0">',
    "<body style='display:none'><frameset>",
    '<label class="ddip-rank">rank 9</label><div class="ddip-shown">another</div><div class="ddip">x</div>',
    "<![CDATA[ </div> ]]> <![foo[ <?php",
    "<a href='x'><a href='y'></a></a></a>",
    "<script>document.body.remove()",
]
"""HTML that would end, cover or restyle the tabs if it were shown unchanged."""


class Balance(HTMLParser):
    """Check that every opened element is closed and no other, apart from those that need no end tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID | OPTIONAL:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in OPTIONAL:
            assert self.open and self.open.pop() == tag


@pytest.mark.parametrize("source", NASTY)
def test_every_opened_element_is_closed_and_no_other(source: str) -> None:
    page = contain_html(source)
    balance = Balance()
    balance.feed(page)
    balance.close()
    assert balance.open == []
    assert page.startswith(BEGIN) and page.endswith(END)
    assert not re.search(r"<(/?body|base|meta|plaintext|script|!)", page)
    assert contain_html(page).count("<") == page.count("<") + 4  # nothing else to repair


@pytest.mark.parametrize(
    "source",
    [
        '<table border="1" class="dataframe">\n<tr><th></th><td>1 &lt; 2 &amp; 3&nbsp;</td></tr></table>',
        "<ul><li>one<li>two</ul><p>a<p>b<br>",
        '<svg viewBox="0 0 1 1"><path d="M0 0"></path></svg>',
        '<img src="data:image/png;base64,AAAA" alt=""><progress value="1" max="2"></progress>',
        "<details open><summary onclick=\"f('x')\">more</summary></details>",
    ],
)
def test_well_formed_markup_stays_unchanged(source: str) -> None:
    assert contain_html(source).lower() == f"{BEGIN}{source}{END}".lower()


@pytest.mark.parametrize(
    ("source", "page"),
    [
        ("<dl><dt><div><dd></dl>", "<dl><dt><div></div><dd></dl>"),
        ("<ul><li><div><ul><li></ul><li></ul>", "<ul><li><div><ul><li></ul></div><li></ul>"),
        ("<math><annotation-xml><p>", "<math><annotation-xml></annotation-xml></math><p>"),
        ("<math><mtext><p></mtext></math>", "<math><mtext><p></p></mtext></math>"),
        ("<svg><main><hr>", "<svg><main></main></svg><hr>"),
        ("<table><a><td>", "<table><a></a><td></table>"),
        ("<table><main><table>", "<table><main></main></table><table></table>"),
        ("<select><main><select>", "<select><main></main></select><select></select>"),
        ("<button><main><button>", "<button><main></main></button><button></button>"),
    ],
)
def test_an_element_that_browsers_end_is_ended_with_its_content(source: str, page: str) -> None:
    """Otherwise an end tag written for it would end an element of the page."""
    assert contain_html(source) == f"{BEGIN}{page}{END}"


def test_styles_apply_only_to_the_output_of_ranks() -> None:
    rules = ".dataframe th { color: red; }\n@media print { #T_1 > td { content: '}' } }"
    assert contain_html(f"<style scoped>{rules}</style>x") == (f"{BEGIN}<style>.ddip-html{{{rules}\n}}</style>x{END}")
    assert ".ddip-root{--color:red}" in contain_html("<style>:root{--color:red}</style>")
    # As exported by Word
    assert ".ddip-html{ a{--color:red} \n}" in contain_html("<style><!--a{--color:red}--></style>")
    for source in (
        "<style>} *{x:y} a{</style>",
        "<style>a{</style>",
        "<style>:not(&){x:y}</style>",
        "<style>a{x:'y</style>",
    ):
        assert "<style>" not in contain_html(source)


def test_names_of_the_tabs_own_elements_are_changed() -> None:
    page = contain_html("<i id=ddip-1 class='a ddip-shown b' name=ddip for=myddip data-x=ddip>")
    assert '<i id="x-ddip-1" class="a x-ddip-shown b" name="x-ddip" for="myddip" data-x="ddip">' in page


@pytest.mark.parametrize(
    "piece",
    [
        "<!--",
        "<a b=\"'",
        "<a ",
        "<a x ",
        "<",
        "<style>",
        "<a b= ",
        "</div>",
        "<b>",
        "<b/>",
        "<p></b>",
        "<table><td>",
        "{",
    ],
)
def test_long_malformed_markup_is_processed_in_linear_time(piece: str) -> None:
    began = time.process_time()
    contain_html(piece * (200_000 // len(piece)))
    contain_html(f"<style>{piece * (200_000 // len(piece))}</style>")
    assert time.process_time() - began < 5


def test_a_picture_contains_only_image_data() -> None:
    good = {"image/png": "AAAA\nBBB=\n", "text/plain": '<"Figure">'}
    assert picture_html(good, {"image/png": {"width": '3" onload="x'}}) == (
        '<div><img src="data:image/png;base64,AAAABBB=" alt="&lt;&quot;Figure&quot;&gt;" '
        'width="3&quot; onload=&quot;x"></div>'
    )
    for bad in ('"><script>', "AA=A", "", 7, None):
        page = picture_html({"image/png": bad}, {}) or ""
        assert page.startswith("<pre>") and "<img" not in page and "<script" not in page
    assert picture_html({"text/plain": "x"}, {}) is None


def test_a_drawing_runs_nothing_and_restyles_nothing() -> None:
    source = '<?xml version="1.0"?><svg width="3"><style>*{display:none}</style><script>alert(1)</script></div>'
    page = picture_html({"image/svg+xml": source}, {}) or ""
    encoded = re.fullmatch(r'<div><img src="data:image/svg\+xml;base64,([\w+/=]+)" alt=""></div>', page)
    assert encoded is not None
    drawn = base64.b64decode(encoded[1]).decode()
    assert drawn == source.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
