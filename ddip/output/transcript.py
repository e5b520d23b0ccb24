"""What one rank has shown in one cell: text, displays and errors, in order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ddip.output.terminal_text import Screen, moves, plain

Bundle = dict[str, Any]
WIDGET = "application/vnd.jupyter.widget-view+json"
OUR_IDS = "ddip-"
"""With what the ids begin that the notebook's side gives."""


@dataclass
class Text:
    """What was written to one stream, until something else came."""

    stream: str
    screen: Screen
    first: int
    """Lines of the stream before these."""
    overwritten: bool = False
    """Has a bar, or the like, been drawn here?"""

    @property
    def blank(self) -> bool:
        """Is it all that is left of a bar that wiped itself out?"""
        return self.overwritten and not self.screen.left_out and not self.screen.text.strip()


@dataclass
class Display:
    """A MIME bundle."""

    data: Bundle
    metadata: Bundle = field(default_factory=dict)
    display_id: str | None = None
    below: bool = False
    """Is it shown below the tabs?"""
    first: Bundle | None = None
    """Of a bar whose text was written anew: as it was displayed. Ranks with the same bars have shown the same, however
    fast each was."""

    def shows(self, model: str) -> bool:
        """Is it a view of this widget?"""
        return bool(self.data.get(WIDGET, {}).get("model_id") == model)

    @property
    def source(self) -> str:
        """As text: Markdown and JSON by what they say, not by the name of their class."""
        markdown, text = self.data.get("text/markdown"), str(self.data.get("text/plain", ""))
        if markdown is not None and "text/html" not in self.data:
            return str(markdown)
        if "application/json" in self.data:
            return json.dumps(self.data["application/json"], indent=2, ensure_ascii=False, default=repr)
        return text


@dataclass(eq=False)
class Area:
    """What an Output widget has captured."""

    items: list[Item] = field(default_factory=list)


Item: TypeAlias = "Text | Display | Area"


class RankTranscript:
    """The output of one rank, as it grows."""

    def __init__(self, limit: int) -> None:
        self.items: list[Item] = []
        self.changed = False
        """Since somebody has set this to False."""
        self._limit = limit
        self._lines: dict[str, int] = {}
        self._areas: dict[str, Area] = {}
        self._captured: list[str] = []
        self._clear_next: list[Item] | None = None

    def text(self, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """More text; with `line` it replaces the end of what was there (``Screen.jump``)."""
        self._before()
        item = self._open_text(stream)
        item.overwritten = item.overwritten or moves(text)
        if line is None:
            item.screen.write(text)
            self._lines[stream] = self._lines.get(stream, 0) + text.count("\n")
        else:
            item.screen.jump(line - item.first, text, cut)
            self._lines[stream] = line + text.count("\n")

    def _open_text(self, stream: str) -> Text:
        """Where text goes on: the last item, or an earlier one that waits for the rest of its line."""
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
        """Something displayed; `below` the tabs, if they cannot show it."""
        self._before()
        model = data.get(WIDGET, {}).get("model_id")
        if model in self._areas:
            if self._areas[model] not in self._target:
                self._target.append(self._areas[model])
            return
        self._target.append(Display(data, metadata or {}, display_id, below))

    @property
    def empty(self) -> bool:
        """Is there nothing to show, but for what is below the tabs?"""
        return _is_empty(self.items)

    @property
    def has_widgets(self) -> bool:
        """Are there any? Each is one rank's, whatever it looks like."""
        return any(WIDGET in item.data for item in _displays(self.items))

    @property
    def below(self) -> list[Display]:
        """What is shown below the tabs."""
        return [item for item in _displays(self.items) if item.below]

    def update(self, data: Bundle, metadata: Bundle | None, display_id: str, below: bool = False) -> bool:
        """Change what was displayed with `display_id`, `below` the tabs from here on if they cannot show it; returns
        whether there is any such."""
        found = [item for item in _displays(self.items) if item.display_id == display_id]
        for item in found:
            if is_ours(display_id):
                item.first = item.first or item.data
            item.data, item.metadata = data, metadata or {}
            item.below = item.below or below
        self.changed = self.changed or bool(found)
        return bool(found)

    def close_widget(self, model: str) -> None:
        """It is not there any more."""
        for items in (self.items, *(area.items for area in self._areas.values())):
            items[:] = [item for item in items if not (isinstance(item, Display) and item.shows(model))]
        self.changed = True

    def clear(self, wait: bool) -> None:
        """Forget what was shown, now or when something new comes."""
        self._clear_next = self._target if wait else None
        if not wait:
            self._target.clear()
            self.changed = True

    def is_area(self, model: str) -> bool:
        """Is `model` an Output widget?"""
        return model in self._areas

    def add_area(self, model: str) -> None:
        """There is an Output widget."""
        self._areas[model] = Area()

    def drop_areas(self, models: Iterable[str]) -> dict[str, list[Item]]:
        """These Output widgets are shown by the page from here on, inside others; returns what they have captured."""
        dropped = {model: self._areas.pop(model) for model in list(models) if model in self._areas}
        return {model: list(area.items) for model, area in dropped.items()}

    @property
    def outside(self) -> bool:
        """Is what is shown now captured by a widget that the page shows?"""
        return bool(self._captured) and self._captured[-1] not in self._areas

    def capture(self, model: str, on: bool) -> None:
        """From here on, what is shown goes into the Output widget `model`, or no longer."""
        if on:
            self._captured.append(model)
        elif model in self._captured:
            self._captured.remove(model)

    @property
    def _target(self) -> list[Item]:
        return self._areas[self._captured[-1]].items if self._captured and not self.outside else self.items

    def _before(self) -> None:
        self.changed = True
        if self._clear_next is not None and self._clear_next is self._target:
            self._clear_next = None
            self._target.clear()


def _is_empty(items: Sequence[Item]) -> bool:
    for item in items:
        if isinstance(item, Area):
            seen = not _is_empty(item.items)
        else:
            seen = not item.blank if isinstance(item, Text) else not item.below
        if seen:
            return False
    return True


def _displays(items: list[Item]) -> list[Display]:
    found = []
    for item in items:
        if isinstance(item, Display):
            found.append(item)
        elif isinstance(item, Area):
            found += _displays(item.items)
    return found


def labelled(label: str, data: Bundle) -> Bundle:
    """`data` with its label before its text; rich forms stay as they are."""
    text = data.get("text/plain", "")
    return {**data, "text/plain": f"{label} {text}" if "\n" not in text else f"{label}\n{text}"}


def is_ours(display_id: str) -> bool:
    """Did the notebook's side give this id?"""
    return display_id.startswith(OUR_IDS)


def own_id(rank: int, display_id: str | None) -> str | None:
    """Ranks may take the same id for different displays; the notebook's side does not."""
    return display_id if display_id is None or is_ours(display_id) else f"{display_id}-rank{rank}"


def plain_of(items: Sequence[Item], most: int | None = None) -> str:
    """All of it as text without colours; of text longer than `most` characters the last rows."""
    parts = []
    for item in items:
        if isinstance(item, Text):
            if item.blank:
                continue
            text = item.screen.text if most is None else item.screen.live_text(most)
            parts.append(plain(text).rstrip("\n"))
        elif isinstance(item, Area):
            parts.append(plain_of(item.items, most))
        elif not item.below:
            parts.append(plain(item.source))
    return "\n".join(part for part in parts if part)
