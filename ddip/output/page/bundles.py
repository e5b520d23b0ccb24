"""Choose the form in which a tab shows a MIME bundle, and compare the bundles of ranks."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence

from ddip.output.page import markup
from ddip.output.page.colours import to_html
from ddip.output.transcript import WIDGET, Area, Bundle, Display, Item, Text

LIVE_CHARACTERS = 20_000
"""Only the last rows of longer text are shown while the cell runs."""
LONGEST_PLACEHOLDER = 2_000
"""Longer HTML is not searched, because it is never an empty element."""
PAGE_WIDE = re.compile(r"<(script|link)\b", re.IGNORECASE)
"""Elements that run code, or add a style to the whole page."""
SCRIPT = re.compile(r"<script\b.*?</script\s*>", re.IGNORECASE | re.DOTALL)
TAG = re.compile(r"<[^>]*>")
SEEN = re.compile(r"<(audio|button|canvas|embed|hr|iframe|img|input|meter|object|progress|svg|video)\b", re.IGNORECASE)
"""Elements that are visible without text."""


def fits_in_tab(data: Bundle) -> bool:
    """Return True if a tab can show the bundle, as plain HTML without a script or renderer."""
    if any(mime.startswith("application/") and mime != "application/json" for mime in data):
        return False
    source = str(data.get("text/html", ""))
    return not PAGE_WIDE.search(source) and not _is_placeholder(source)


def _is_placeholder(source: str) -> bool:
    """Return True for an empty element with an ID, which a later bundle's script fills, as Bokeh's does."""
    if len(source) > LONGEST_PLACEHOLDER or "id=" not in source or SEEN.search(source):
        return False
    return not TAG.sub("", source).strip()


def only_loads_library(data: Bundle) -> bool:
    """Return True for an invisible bundle that only loads Bokeh or Plotly for later plots."""
    if "application/vnd.bokehjs_load.v0+json" in data:
        return True
    source = str(data.get("text/html", ""))
    return set(data) == {"text/html"} and "PlotlyConfig" in source and not SCRIPT.sub("", source).strip()


def comparable_items(items: Sequence[Item]) -> object:
    """Return a value that is equal for ranks with equal output.

    It contains all forms of each display, with metadata, and not only the visible one. Text with omitted lines equals
    no other text, because these lines are unknown.
    """
    return [_comparable_item(item) for item in items if not (isinstance(item, Text) and item.blank)]


def _comparable_item(item: Item) -> object:
    if isinstance(item, Text):
        return (item.stream, object() if item.screen.left_out else item.screen.text)
    if isinstance(item, Area):
        return comparable_items(item.items)
    data = item.data if item.first is None else item.first
    if WIDGET in data:  # widget IDs always differ, so only the text is compared
        data = {**data, WIDGET: None}
    return json.dumps([data, item.metadata], sort_keys=True, default=repr)  # compares types too: 1 == True in Python


def to_tab(items: Sequence[Item], live: bool) -> str:
    """Return the HTML of a tab; `live`: with only the last rows of long text."""
    parts = []
    for item in items:
        if isinstance(item, Text):
            if item.blank:
                continue
            stream = "stdout" if item.overwritten else item.stream  # a bar must not look like a warning
            text = item.screen.live_text(LIVE_CHARACTERS) if live else item.screen.text
            parts.append(f'<pre class="ddip-{stream}">{to_html(text)}</pre>')
        elif isinstance(item, Area):
            parts.append(f"<div>{to_tab(item.items, live)}</div>")
        elif not item.below:
            parts.append(_display_html(item))
    return "".join(parts)


def _display_html(item: Display) -> str:
    data = item.data
    if "text/html" in data:
        return markup.contain_html(str(data["text/html"]))
    shown = markup.picture_html(data, item.metadata)
    if shown is not None:
        return shown
    if "text/latex" in data:
        return f"<div>{html.escape(str(data['text/latex']), quote=False)}</div>"
    return f"<pre>{to_html(item.source)}</pre>"
