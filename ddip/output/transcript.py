"""The output of one rank in one cell: text, displays and Output widgets, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ddip.output.terminal_text import Screen, moves_cursor, strip_escapes

Bundle = dict[str, Any]
WIDGET = "application/vnd.jupyter.widget-view+json"
OUR_IDS = "ddip-"
"""Prefix of the display IDs that the notebook side assigns."""


@dataclass
class Text:
    """Text of one stream, up to the next output of another kind."""

    stream: str
    screen: Screen
    first: int
    """Number of lines in the stream before this text."""
    overwritten: bool = False
    """True if the text has overwritten itself, as a progress bar does."""

    @property
    def blank(self) -> bool:
        """True if nothing is left of the text because a bar has erased itself."""
        return self.overwritten and not self.screen.left_out and not self.screen.text.strip()


@dataclass
class Display:
    """A displayed MIME bundle."""

    data: Bundle
    metadata: Bundle = field(default_factory=dict)
    display_id: str | None = None
    below: bool = False
    """True if it is shown below the tabs."""
    first: Bundle | None = None
    """First bundle of a progress bar that has changed; comparing ranks by it ignores how fast each was."""

    def shows(self, model: str) -> bool:
        """Return True if this displays the widget `model`."""
        return bool(self.data.get(WIDGET, {}).get("model_id") == model)

    @property
    def source(self) -> str:
        """Text form: the source of Markdown and JSON rather than the name of their class."""
        markdown, text = self.data.get("text/markdown"), str(self.data.get("text/plain", ""))
        if markdown is not None and "text/html" not in self.data:
            return str(markdown)
        if "application/json" in self.data:
            return json.dumps(self.data["application/json"], indent=2, ensure_ascii=False, default=repr)
        return text


@dataclass(eq=False)
class Area:
    """Output that an Output widget has captured."""

    items: list[Item] = field(default_factory=list)


Item: TypeAlias = "Text | Display | Area"


class _Displays:
    """The displays in a list of items, found without a walk over all of them."""

    def __init__(self, items: list[Item]) -> None:
        self.by_id: dict[str | None, list[Display]] = {}
        self.below: list[Display] = []
        """Those to show below the tabs, in order."""
        for item in _all_displays(items):
            self.add(item)

    def add(self, item: Display) -> None:
        """Add a display that comes after all others."""
        self.by_id.setdefault(item.display_id, []).append(item)
        if item.below:
            self.below.append(item)


class RankTranscript:
    """The output of one rank, as it grows."""

    def __init__(self, limit: int) -> None:
        self.items: list[Item] = []
        self.changed = False
        """True after a change; the view resets it."""
        self._limit = limit
        self._lines: dict[str, int] = {}
        self._areas: dict[str, Area] = {}
        self._capturing: list[str] = []
        self._clear_next: list[Item] | None = None
        self._displays: _Displays | None = None
        """Displays in `items`; None if they have to be collected again."""

    def text(self, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """Append `text` to a stream, or replace the stream from `line` on (``Screen.jump``)."""
        self._prepare_to_add()
        item = self._open_text(stream)
        item.overwritten = item.overwritten or moves_cursor(text)
        if line is None:
            item.screen.write(text)
            self._lines[stream] = self._lines.get(stream, 0) + text.count("\n")
        else:
            item.screen.jump(line - item.first, text, cut)
            self._lines[stream] = line + text.count("\n")

    def _open_text(self, stream: str) -> Text:
        """Return the item to continue: the last one, an earlier one with an unfinished line, or a new one."""
        items = self._target
        if items and isinstance(items[-1], Text) and items[-1].stream == stream:
            return items[-1]
        for item in reversed(items):
            if isinstance(item, Text) and item.stream == stream:
                if item.screen.unfinished:
                    return item
                break
        new = Text(stream, Screen(self._limit), self._lines.get(stream, 0))
        items.append(new)
        return new

    def display(
        self, data: Bundle, metadata: Bundle | None = None, display_id: str | None = None, below: bool = False
    ) -> None:
        """Add a displayed bundle; `below`: it is shown below the tabs, which cannot hold it."""
        self._prepare_to_add()
        model = data.get(WIDGET, {}).get("model_id")
        if model in self._areas:
            if self._areas[model] not in self._target:
                self._target.append(self._areas[model])
                self._displays = None
            return
        item = Display(data, metadata or {}, display_id, below)
        displays = self._found_displays
        self._target.append(item)
        displays.add(item)
        if below and self._target is not self.items:  # the order of those below is that of `items`
            self._displays = None

    @property
    def _found_displays(self) -> _Displays:
        if self._displays is None:
            self._displays = _Displays(self.items)
        return self._displays

    @property
    def empty(self) -> bool:
        """True if there is nothing to show except displays below the tabs."""
        return _is_empty(self.items)

    @property
    def has_widgets(self) -> bool:
        """True if there are widgets, which are never merged with those of another rank."""
        return any(WIDGET in item.data for item in _all_displays(self.items))

    @property
    def below(self) -> list[Display]:
        """The displays to show below the tabs."""
        return self._found_displays.below

    def update(self, data: Bundle, metadata: Bundle | None, display_id: str, below: bool = False) -> bool:
        """Change the displays with `display_id`, and return True if there are any.

        `below`: show them below the tabs from now on, which cannot hold them.
        """
        found = self._found_displays.by_id.get(display_id, [])
        for item in found:
            if is_ours(display_id):
                item.first = item.first or item.data
            item.data, item.metadata = data, metadata or {}
            if below and not item.below:
                item.below, self._displays = True, None
        self.changed = self.changed or bool(found)
        return bool(found)

    def close_widget(self, model: str) -> None:
        """Remove the displays of the widget `model`."""
        for items in (self.items, *(area.items for area in self._areas.values())):
            items[:] = [item for item in items if not (isinstance(item, Display) and item.shows(model))]
        self._displays = None
        self.changed = True

    def clear(self, wait: bool) -> None:
        """Remove the output now, or with `wait` when the next output comes."""
        self._clear_next = self._target if wait else None
        if not wait:
            self._target.clear()
            self._displays = None
            self.changed = True

    def is_area(self, model: str) -> bool:
        """Return True if `model` is an Output widget of this transcript."""
        return model in self._areas

    def add_area(self, model: str) -> None:
        """Add the Output widget `model`."""
        self._areas[model] = Area()

    def drop_area(self, model: str) -> list[Item]:
        """Remove the Output widget `model`, which the page now shows, and return the captured items."""
        return self._areas.pop(model).items if model in self._areas else []

    def capture(self, model: str, on: bool) -> None:
        """Begin to capture output in the Output widget `model`, or end that."""
        if on:
            self._capturing.append(model)
        elif model in self._capturing:
            self._capturing.remove(model)

    @property
    def _target(self) -> list[Item]:
        model = self._capturing[-1] if self._capturing else ""
        return self._areas[model].items if model in self._areas else self.items  # the page shows the others

    def _prepare_to_add(self) -> None:
        """Apply a delayed clear, because new output comes."""
        self.changed = True
        if self._clear_next is not None and self._clear_next is self._target:
            self._clear_next = None
            self._target.clear()
            self._displays = None


def _is_empty(items: Sequence[Item]) -> bool:
    for item in items:
        if isinstance(item, Area):
            is_visible = not _is_empty(item.items)
        else:
            is_visible = not item.blank if isinstance(item, Text) else not item.below
        if is_visible:
            return False
    return True


def _all_displays(items: list[Item]) -> list[Display]:
    found = []
    for item in items:
        if isinstance(item, Display):
            found.append(item)
        elif isinstance(item, Area):
            found += _all_displays(item.items)
    return found


def add_label(label: str, data: Bundle) -> Bundle:
    """Return `data` with `label` before its plain text; rich forms do not change."""
    text = data.get("text/plain", "")
    return {**data, "text/plain": f"{label} {text}" if "\n" not in text else f"{label}\n{text}"}


def is_ours(display_id: str) -> bool:
    """Return True if the notebook side assigned this display ID."""
    return display_id.startswith(OUR_IDS)


def own_id(rank: int, display_id: str | None) -> str | None:
    """Return a display ID that is unique among ranks, which may use the same one for different displays."""
    return display_id if display_id is None or is_ours(display_id) else f"{display_id}-rank{rank}"


def plain_of(items: Sequence[Item], most: int | None = None) -> str:
    """Return `items` as text without colours; only the last rows of text longer than `most` characters."""
    parts = []
    for item in items:
        if isinstance(item, Text):
            if item.blank:
                continue
            text = item.screen.text if most is None else item.screen.live_text(most)
            parts.append(strip_escapes(text).rstrip("\n"))
        elif isinstance(item, Area):
            parts.append(plain_of(item.items, most))
        elif not item.below:
            parts.append(strip_escapes(item.source))
    return "\n".join(part for part in parts if part)
