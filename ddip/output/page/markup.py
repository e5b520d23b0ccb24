"""Contain the HTML and pictures of a rank, so that they cannot affect the rest of the page.

Output of a rank is inserted between the markup of the tabs, where a stray ``</div>``, an unclosed comment or a quote in
an attribute would break everything after it. So the HTML is parsed and written again with all tags closed, attributes
quoted and text escaped. Every browser reads the result in the same way, however malformed the source was.
``html.parser`` would also serve, but takes ten times as long for a table.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

VOID = {"area", "br", "col", "embed", "hr", "img", "input", "source", "track", "wbr"}
"""Elements without an end tag."""
DROPPED = {"html", "head", "body", "base", "meta", "link", "frameset", "frame"}
"""Tags that affect the whole page; they are removed, but not their content."""
CELLS = ("td", "th")
ROWS = (*CELLS, "tr")
SECTIONS = (*ROWS, "thead", "tbody", "tfoot", "colgroup", "caption")
OPTIONAL = {*SECTIONS, "p", "li", "dt", "dd", "option", "optgroup", "rb", "rp", "rt", "rtc"}
"""Elements that end with their parent without an end tag; a superfluous ``</p>`` would begin a new paragraph."""
LISTS = {"ul", "ol", "menu", "dl", *CELLS, "table", "caption"}
"""Elements whose items belong to another list than the items around them."""
ITEMS = {"li": ("li",), "dt": ("dt", "dd"), "dd": ("dt", "dd")}
"""Items that end, with all open elements in them, where the item in the key begins."""
CONTROLS = {"button": ("button",), **dict.fromkeys(("select", "input", "textarea"), ("select",))}
"""Controls that end, with all open elements in them, where the control in the key begins."""
ENDS = {
    **dict.fromkeys(CELLS, CELLS),
    "tr": ROWS,
    **dict.fromkeys(("thead", "tbody", "tfoot", "colgroup", "caption"), SECTIONS),
    "p": ("p",),
    "option": ("option",),
    "optgroup": ("option", "optgroup"),
}
"""Elements that end without an end tag, if they are innermost where the element in the key begins."""
DEEPEST = 256
"""Maximum depth of nested elements; browsers also have a limit."""
LONG = 100_000
"""Maximum characters of a source whose result is cached between two updates of the tabs."""
FOREIGN = ("svg", "math")
WITHIN_FOREIGN = {"foreignobject", "desc", "title", "mi", "mo", "mn", "ms", "mtext"}
"""Elements of drawings and formulas that may contain HTML."""
ENDS_FOREIGN = {
    *("b", "big", "blockquote", "br", "center", "code", "dd", "div", "dl", "dt", "em", "embed", "h1", "h2", "h3", "h4"),
    *("h5", "h6", "hr", "i", "img", "li", "listing", "menu", "nobr", "ol", "p", "pre", "ruby", "s", "small", "span"),
    *("strong", "strike", "sub", "sup", "table", "tt", "u", "ul", "var"),
}
"""Elements that end a drawing or a formula if they begin in it."""
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
TOKEN = re.compile(
    r"<!--|<[!?][^>]*>"  # comments and declarations
    r"|<(?P<end>/?)(?P<tag>[a-zA-Z][a-zA-Z0-9:_.-]*)"
    r"(?:(?P<attributes>(?:[\s/]+[^\s\"'<>/=]+(?:\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s\"'<>`]+))?)*)[\s/]*>|[^<>]*>)",
    re.DOTALL,
)
ATTRIBUTE = re.compile(r"[\s/]+([^\s\"'<>/=]+)(?:\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'<>`]+)))?")
RAW = {
    tag: re.compile(rf"</{tag}(?=[\s/>])", re.IGNORECASE)
    for tag in ("style", "script", "textarea", "title", "xmp", "iframe", "noembed", "noframes", "noscript")
}
"""End tags of elements whose content is not parsed for tags."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
DDIP_NAMES = re.compile(r"(?<![\w-])ddip(?![\w])")
"""Beginning of the names that the tabs use for their elements."""
BEGIN, END = '<div class="ddip-html"><div class="ddip-root">', "</div></div>"
"""Markup around the HTML of a rank: its styles apply to the outer element; the inner one replaces ``:root``."""
ROOT = re.compile(r":(?:root|host)(?![\w-])", re.IGNORECASE)
CSS_TOKEN = re.compile(
    r"/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|url\([^)]*\)|\\.|[][(){}\"'&\\]|/\*",
    re.DOTALL | re.IGNORECASE,
)
BRACKETS = {"}": "{", "]": "[", ")": "("}


class _Writer:
    """Parses HTML and writes it again with all elements closed."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._open: list[str] = []

    def read(self, source: str) -> None:
        """Close the elements of this HTML, drop scripts and tags for the whole page, and append it to `parts`."""
        at = 0
        while (found := TOKEN.search(source, at)) is not None:
            self._write_text(source[at : found.start()])
            at = found.end()
            tag = (found["tag"] or "").lower()
            if found[0] == "<!--":
                end = source.find("-->", at)
                at = len(source) if end == -1 else end + 3
            elif tag in RAW and not found["end"]:
                closing = RAW[tag].search(source, at)
                text = source[at : closing.start() if closing else len(source)]
                at += len(text)
                if tag == "style":
                    self.parts.append(_contain_style(text) if closing else "")
                elif tag != "script":
                    self._begin_tag(tag, found["attributes"] or "", False)
                    self._write_text(text)
                    self._end_tag(tag)
            elif tag and tag not in DROPPED:
                tag = "pre" if tag == "plaintext" else tag  # no tag would end ``plaintext``
                if found["end"]:
                    self._end_tag(tag)
                else:
                    self._begin_tag(tag, found["attributes"] or "", found[0].endswith("/>"))
        self._write_text(source[at:])
        self._end_within(0)

    def _write_text(self, text: str) -> None:
        self.parts.append(text.replace("<", "&lt;"))

    def _begin_tag(self, tag: str, attributes: str, empty: bool) -> None:
        if len(self._open) == DEEPEST or (tag in SECTIONS and "table" not in self._open):
            return
        self._end_implied(tag)
        while self._open and self._open[-1] in ENDS.get(tag, ()):
            self._open.pop()
        self.parts.append(f"<{tag}{ATTRIBUTE.sub(_clean_attribute, attributes)}>")
        if tag not in VOID:
            self._open.append(tag)
            if empty and any(name in self._open for name in FOREIGN):  # ``/>`` has no meaning in HTML
                self._end_tag(tag)

    def _end_tag(self, tag: str) -> None:
        if tag in self._open:
            depth = len(self._open) - 1 - self._open[::-1].index(tag)
            self._end_within(depth + 1)
            self._open.pop()
            self.parts.append(f"</{tag}>")

    def _end_implied(self, tag: str) -> None:
        """Close the open elements, at any depth, that a browser closes implicitly where `tag` begins."""
        if tag in ENDS_FOREIGN:
            self._end_innermost(FOREIGN, WITHIN_FOREIGN)
        if tag == "table":
            self._end_innermost((tag,), (*CELLS, "caption"))
        if tag in CONTROLS:
            self._end_innermost(CONTROLS[tag], ())
        if tag in ITEMS:
            self._end_innermost(ITEMS[tag], LISTS)
        if tag in SECTIONS:
            for depth in reversed(range(len(self._open))):
                if self._open[depth] in (*SECTIONS, "table"):
                    return self._end_within(depth + 1)
        return None

    def _end_innermost(self, tags: Collection[str], within: Collection[str]) -> None:
        """End the innermost element with one of `tags`, unless an element with one of `within` is inside it."""
        for depth in reversed(range(len(self._open))):
            if self._open[depth] in within:
                return None
            if self._open[depth] in tags:
                return self._end_within(depth)
        return None

    def _end_within(self, depth: int) -> None:
        """End all but the outer `depth` elements."""
        # elements in a drawing or formula need end tags: the end of the drawing does not end a paragraph in it
        all_ends = any(name in self._open for name in FOREIGN)
        self.parts += [f"</{tag}>" for tag in reversed(self._open[depth:]) if all_ends or tag not in OPTIONAL]
        del self._open[depth:]


def _clean_attribute(found: re.Match[str]) -> str:
    name = found[1].lower()
    value = next((value for value in found.group(2, 3, 4) if value is not None), None)
    if value is None:
        return f" {name}"
    if name in ("id", "class", "name", "for"):
        value = DDIP_NAMES.sub("x-ddip", value)
    value = value.replace('"', "&quot;")
    return f' {name}="{value}"'


def _contain_style(css: str) -> str:
    """Nest a rank's CSS in a rule for the rank's output, so that it applies to nothing else.

    Returns an empty string if the CSS could end that rule or refer to it (``&``). Browsers ignore rules that cannot be
    nested.
    """
    css = css.replace("<!--", " ").replace("-->", " ")  # hid the CSS from browsers that did not know ``style``
    stack: list[str] = []
    for token in CSS_TOKEN.findall(css):
        if token in ("{", "[", "("):
            stack.append(token)
        elif token in BRACKETS:
            if not stack or stack.pop() != BRACKETS[token]:
                return ""
        elif len(token) == 1 or token == "/*":  # an unclosed quote or comment, a trailing backslash, or an ampersand
            return ""
    if stack or "</" in css:
        return ""
    css = ROOT.sub(".ddip-root", css).replace("<", r"\3c ")
    return f"<style>.ddip-html{{{css}\n}}</style>"


def contain_html(source: str) -> str:
    """Wrap HTML of a rank in an element so that it cannot close, cover or restyle the markup around it."""
    return (_contain_cached if len(source) < LONG else _contain_cached.__wrapped__)(source)


@lru_cache(maxsize=64)
def _contain_cached(source: str) -> str:
    writer = _Writer()
    writer.read(source)
    return f"{BEGIN}{''.join(writer.parts)}{END}"


def picture_html(data: dict[str, Any], metadata: dict[str, Any]) -> str | None:
    """Return the picture in a MIME bundle as ``img``, in which scripts cannot run; None if there is none."""
    mime = next((mime for mime in ("image/svg+xml", *PICTURES) if mime in data), None)
    if mime is None:
        return None
    text = str(data.get("text/plain", ""))
    source = data[mime] if isinstance(data[mime], str) else ""
    encoded = _encode_svg(source) if mime == "image/svg+xml" else "".join(source.split())
    if not BASE64.fullmatch(encoded):
        return f"<pre>{html.escape(f'{text} ({mime}, but its data are not base64)', quote=False)}</pre>"
    size = metadata.get(mime) or {}
    attributes = "".join(f' {side}="{html.escape(str(size[side]))}"' for side in ("width", "height") if side in size)
    return f'<div><img src="data:{mime};base64,{encoded}" alt="{html.escape(text)}"{attributes}></div>'


def _encode_svg(source: str) -> str:
    """Encode an SVG element as a standalone file, which needs the name of its language."""
    if "xmlns=" not in source:
        source = re.sub(r"<svg\b", '<svg xmlns="http://www.w3.org/2000/svg"', source, count=1)
    return base64.b64encode(source.encode(errors="replace")).decode()
