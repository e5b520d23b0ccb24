"""MIME bundles of ranks: which of their forms a tab shows, and which are the same."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence

from ddip.output.page import markup
from ddip.output.page.colours import to_html
from ddip.output.terminal_text import Screen
from ddip.output.transcript import WIDGET, Area, Bundle, Display, Item, Text

LIVE_CHARACTERS = 20_000
"""Longer text is shown by its last rows until the cell has ended."""
LONGEST_PLACE = 2_000
"""Longer HTML is never an empty element, and is not looked through."""
ELSEWHERE = re.compile(r"<(script|link)\b", re.IGNORECASE)
"""HTML that runs, or brings a style for the whole page."""
SCRIPT = re.compile(r"<script\b.*?</script\s*>", re.IGNORECASE | re.DOTALL)
TAG = re.compile(r"<[^>]*>")
SEEN = re.compile(r"<(audio|button|canvas|embed|hr|iframe|img|input|meter|object|progress|svg|video)\b", re.IGNORECASE)
"""Elements that show something without any text in them."""


def fits(data: Bundle) -> bool:
    """Can plain HTML show it?"""
    if any(mime.startswith("application/") and mime != "application/json" for mime in data):
        return False
    source = str(data.get("text/html", ""))
    return not ELSEWHERE.search(source) and not _is_place(source)


def _is_place(source: str) -> bool:
    """Is this HTML an empty element with a name, which a script fills that comes with the next bundle, as Bokeh's?"""
    if len(source) > LONGEST_PLACE or "id=" not in source or SEEN.search(source):
        return False
    return not TAG.sub("", source).strip()


def loads(data: Bundle) -> bool:
    """Does it only load a library, Bokeh's or Plotly's, for plots that come later: has it nothing to be seen?"""
    if "application/vnd.bokehjs_load.v0+json" in data:
        return True
    source = str(data.get("text/html", ""))
    return set(data) == {"text/html"} and "PlotlyConfig" in source and not SCRIPT.sub("", source).strip()


def comparable(items: Sequence[Item]) -> object:
    """Equal for ranks that have shown the same: all forms of each display, with their metadata, and not only the one
    that is seen. Text of which lines were left out equals no other; nobody knows what they said."""
    return [_comparable(item) for item in items if not (isinstance(item, Text) and item.blank)]


def _comparable(item: Item) -> object:
    if isinstance(item, Text):
        return (item.stream, object() if item.screen.left_out else item.screen.text)
    if isinstance(item, Area):
        return comparable(item.items)
    data = item.data if item.first is None else item.first
    if WIDGET in data:  # each has an id of its own: its text says what it is
        data = {**data, WIDGET: None}
    return json.dumps([data, item.metadata], sort_keys=True, default=repr)  # in Python, 1 and True are equal


def to_tab(items: Sequence[Item], live: bool) -> str:
    """HTML of what a tab holds; `live`: only the last rows of long text."""
    parts = []
    for item in items:
        if isinstance(item, Text):
            if item.blank:
                continue
            stream = "stdout" if item.overwritten else item.stream  # a bar is no warning
            parts.append(f'<pre class="ddip-{stream}">{to_html(_text(item.screen, live))}</pre>')
        elif isinstance(item, Area):
            parts.append(f"<div>{to_tab(item.items, live)}</div>")
        elif not item.below:
            parts.append(_bundle(item))
    return "".join(parts)


def _text(screen: Screen, live: bool) -> str:
    return screen.live_text(LIVE_CHARACTERS) if live else screen.text


def _bundle(item: Display) -> str:
    data = item.data
    if "text/html" in data:
        return markup.contained(str(data["text/html"]))
    shown = markup.picture(data, item.metadata)
    if shown is not None:
        return shown
    if "text/latex" in data:
        return f"<div>{html.escape(str(data['text/latex']), quote=False)}</div>"
    return f"<pre>{to_html(item.source)}</pre>"
