"""HTML and pictures of a rank, made so that they stay within their own place on the page.

What a rank shows is put between the tabs' own markup: a stray ``</div>``, a comment without an end or a quote in an
attribute would else take the page behind it along. So it is taken apart and written anew: tags that are closed within
it, attributes in quotes, and text that is only text. What is written is read by every browser in the same way, however
odd the source was; ``html.parser`` would do as well, and takes ten times as long for a table.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

VOID = {"area", "br", "col", "embed", "hr", "img", "input", "source", "track", "wbr"}
"""Elements without an end."""
DROPPED = {"html", "head", "body", "base", "meta", "link", "frameset", "frame"}
"""Tags that mean the page as a whole; what stands between them stays."""
CELLS = ("td", "th")
ROWS = (*CELLS, "tr")
SECTIONS = (*ROWS, "thead", "tbody", "tfoot", "colgroup", "caption")
OPTIONAL = {*SECTIONS, "p", "li", "dt", "dd", "option", "optgroup", "rb", "rp", "rt", "rtc"}
"""Elements that end with what they stand in, and need no end tag then: a second ``</p>`` would be a new paragraph."""
LISTS = {"ul", "ol", "menu", "dl", *CELLS, "table", "caption"}
"""In which items are those of another list."""
ITEMS = {"li": ("li",), "dt": ("dt", "dd"), "dd": ("dt", "dd")}
"""Which items end where one of these begins, with all that has been begun in them."""
CONTROLS = {"button": ("button",), **dict.fromkeys(("select", "input", "textarea"), ("select",))}
"""Which controls end, in the same way, where another begins."""
ENDS = {
    **dict.fromkeys(CELLS, CELLS),
    "tr": ROWS,
    **dict.fromkeys(("thead", "tbody", "tfoot", "colgroup", "caption"), SECTIONS),
    "p": ("p",),
    "option": ("option",),
    "optgroup": ("option", "optgroup"),
}
"""Which elements end, without an end tag, where one of these begins."""
DEEPEST = 256
"""Elements within each other; browsers have a limit, too."""
LONG = 100_000
"""Longer sources are not remembered between two updates of the tabs."""
FOREIGN = ("svg", "math")
WITHIN_FOREIGN = {"foreignobject", "desc", "title", "mi", "mo", "mn", "ms", "mtext"}
"""Elements of drawings and formulas in which HTML may stand."""
ENDS_FOREIGN = {
    *("b", "big", "blockquote", "br", "center", "code", "dd", "div", "dl", "dt", "em", "embed", "h1", "h2", "h3", "h4"),
    *("h5", "h6", "hr", "i", "img", "li", "listing", "menu", "nobr", "ol", "p", "pre", "ruby", "s", "small", "span"),
    *("strong", "strike", "sub", "sup", "table", "tt", "u", "ul", "var"),
}
"""Elements with which a drawing or a formula ends where they begin in it."""
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
"""The ends of elements in which nothing else is a tag."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
OURS = re.compile(r"(?<![\w-])ddip(?![\w])")
"""Names of the tabs' own elements."""
BEGIN, END = '<div class="ddip-html"><div class="ddip-root">', "</div></div>"
"""Around what a rank shows: the outer element holds it, and its styles say ``:root`` for the inner one."""
ROOT = re.compile(r":(?:root|host)(?![\w-])", re.IGNORECASE)
CSS_TOKEN = re.compile(
    r"/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|url\([^)]*\)|\\.|[][(){}\"'&\\]|/\*",
    re.DOTALL | re.IGNORECASE,
)
BRACKETS = {"}": "{", "]": "[", ")": "("}


class _Writer:
    """Writes what was read, and ends what it has begun."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._open: list[str] = []

    def read(self, source: str) -> None:
        """All of `source`."""
        at = 0
        while (found := TOKEN.search(source, at)) is not None:
            self._text(source[at : found.start()])
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
                    self.parts.append(_style(text) if closing else "")
                elif tag != "script":
                    self._begin(tag, found["attributes"] or "", False)
                    self._text(text)
                    self._end(tag)
            elif tag and tag not in DROPPED:
                tag = "pre" if tag == "plaintext" else tag  # which nothing ends
                if found["end"]:
                    self._end(tag)
                else:
                    self._begin(tag, found["attributes"] or "", found[0].endswith("/>"))
        self._text(source[at:])
        self._end_within(0)

    def _text(self, text: str) -> None:
        self.parts.append(text.replace("<", "&lt;"))

    def _begin(self, tag: str, attributes: str, empty: bool) -> None:
        if len(self._open) == DEEPEST or (tag in SECTIONS and "table" not in self._open):
            return
        self._end_before(tag)
        while self._open and self._open[-1] in ENDS.get(tag, ()):
            self._open.pop()
        self.parts.append(f"<{tag}{ATTRIBUTE.sub(_attribute, attributes)}>")
        if tag not in VOID:
            self._open.append(tag)
            if empty and any(name in self._open for name in FOREIGN):  # elsewhere the stroke means nothing
                self._end(tag)

    def _end(self, tag: str) -> None:
        if tag in self._open:
            depth = len(self._open) - 1 - self._open[::-1].index(tag)
            self._end_within(depth + 1)
            self._open.pop()
            self.parts.append(f"</{tag}>")

    def _end_before(self, tag: str) -> None:
        """End, with all that is in it, what a browser ends where `tag` begins, however deep that stands."""
        if tag in ENDS_FOREIGN:
            self._end_from(FOREIGN, WITHIN_FOREIGN)
        if tag == "table":
            self._end_from((tag,), (*CELLS, "caption"))
        if tag in CONTROLS:
            self._end_from(CONTROLS[tag], ())
        if tag in ITEMS:
            self._end_from(ITEMS[tag], LISTS)
        if tag in SECTIONS:
            for depth in reversed(range(len(self._open))):
                if self._open[depth] in (*SECTIONS, "table"):
                    return self._end_within(depth + 1)
        return None

    def _end_from(self, tags: Collection[str], within: Collection[str]) -> None:
        """End the innermost element that has one of `tags`, unless one of `within` is around this place first."""
        for depth in reversed(range(len(self._open))):
            if self._open[depth] in within:
                return None
            if self._open[depth] in tags:
                return self._end_within(depth)
        return None

    def _end_within(self, depth: int) -> None:
        """End all but the outer `depth` elements."""
        # a paragraph within a drawing or a formula is not ended by the end of that
        all_ends = any(name in self._open for name in FOREIGN)
        self.parts += [f"</{tag}>" for tag in reversed(self._open[depth:]) if all_ends or tag not in OPTIONAL]
        del self._open[depth:]


def _attribute(found: re.Match[str]) -> str:
    name = found[1].lower()
    value = next((value for value in found.group(2, 3, 4) if value is not None), None)
    if value is None:
        return f" {name}"
    if name in ("id", "class", "name", "for"):
        value = OURS.sub("x-ddip", value)
    value = value.replace('"', "&quot;")
    return f' {name}="{value}"'


def _style(css: str) -> str:
    """The rules of a rank for what that rank shows, and nothing else: nested in a rule for its place.

    Rules that would end that one, or name it, are left out, and what cannot stand in it: browsers pass over the latter.
    """
    css = css.replace("<!--", " ").replace("-->", " ")  # for browsers that knew no styles
    stack: list[str] = []
    for token in CSS_TOKEN.findall(css):
        if token in ("{", "[", "("):
            stack.append(token)
        elif token in BRACKETS:
            if not stack or stack.pop() != BRACKETS[token]:
                return ""
        elif len(token) == 1 or token == "/*":  # a quote, a stroke or a comment without an end; or an ampersand
            return ""
    if stack or "</" in css:
        return ""
    css = ROOT.sub(".ddip-root", css).replace("<", r"\3c ")
    return f"<style>.ddip-html{{{css}\n}}</style>"


def contained(source: str) -> str:
    """`source`, HTML of a rank, in an element of its own that nothing in it ends, covers or restyles what is around."""
    return (_contained if len(source) < LONG else _contained.__wrapped__)(source)


@lru_cache(maxsize=64)
def _contained(source: str) -> str:
    writer = _Writer()
    writer.read(source)
    return f"{BEGIN}{''.join(writer.parts)}{END}"


def picture(data: dict[str, Any], metadata: dict[str, Any]) -> str | None:
    """The picture in a MIME bundle, as an element that no program in it can leave; None if there is none."""
    mime = next((mime for mime in ("image/svg+xml", *PICTURES) if mime in data), None)
    if mime is None:
        return None
    text = str(data.get("text/plain", ""))
    source = data[mime] if isinstance(data[mime], str) else ""
    encoded = _svg(source) if mime == "image/svg+xml" else "".join(source.split())
    if not BASE64.fullmatch(encoded):
        return f"<pre>{html.escape(f'{text} ({mime}, but its data are not base64)', quote=False)}</pre>"
    size = metadata.get(mime) or {}
    given = "".join(f' {side}="{html.escape(str(size[side]))}"' for side in ("width", "height") if side in size)
    return f'<div><img src="data:{mime};base64,{encoded}" alt="{html.escape(text)}"{given}></div>'


def _svg(source: str) -> str:
    """`source` as a file of its own, which needs the name of its language."""
    if "xmlns=" not in source:
        source = re.sub(r"<svg\b", '<svg xmlns="http://www.w3.org/2000/svg"', source, count=1)
    return base64.b64encode(source.encode(errors="replace")).decode()
