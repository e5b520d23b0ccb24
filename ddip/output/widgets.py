"""Widgets of ranks: what their messages say, who passes them on, and progress bars (``tqdm.auto``) as text.

The text of a widget is written once, when it is displayed: of a bar it says 0 %. It is all that GitHub, ``nbconvert``
and a page without the state of widgets have. So it is written anew at the end of each cell in which a bar has moved.

It is made of what the messages of the widgets say, not asked of the rank: there, tqdm's bar is gone when its loop ends.
"""

from __future__ import annotations

import collections
import html
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ddip.output.area import CellOutputArea, new_id
from ddip.output.transcript import WIDGET, Area, Bundle, Display, Item, Text
from ddip.output.views.views import Plain

Message = dict[str, Any]
REFERENCE = "IPY_MODEL_"


def state_in(message: Message) -> dict[str, Any]:
    """What of a widget changes with `message`; what a rank sends may be odd."""
    data = message["content"].get("data")
    state = data.get("state") if isinstance(data, dict) else None
    return state if isinstance(state, dict) else {}


def parts(state: object) -> set[str]:
    """The widgets that stand in `state`: children, a layout, a style."""
    if isinstance(state, str):
        return {state.removeprefix(REFERENCE)} if state.startswith(REFERENCE) else set()
    if isinstance(state, dict):
        state = list(state.values())
    return set().union(*map(parts, state)) if isinstance(state, list | tuple) else set()


def merge(opened: Message, changed: Message) -> None:
    """Have the message that opens a widget say what has changed since; values of bytes are in its buffers."""
    state = state_in(opened)
    if not state:
        return  # no widget: a library's own
    new = state_in(changed)
    data, buffers = opened["content"]["data"], list(opened.get("buffers") or [])
    paths = list(data.get("buffer_paths") or [])
    kept = [(path, part) for path, part in zip(paths, buffers, strict=False) if path[0] not in new]
    added = zip(changed["content"]["data"].get("buffer_paths") or [], changed.get("buffers") or [], strict=False)
    kept += added
    state.update(new)
    data["buffer_paths"] = [path for path, _ in kept]
    opened["buffers"] = [part for _, part in kept]


BARS = ("FloatProgressModel", "IntProgressModel")
TEXTS = ("HTMLModel", "LabelModel")
BOXES = {"HBoxModel": "", "BoxModel": "", "VBoxModel": "\n"}
"""And what stands between what is in them."""
KEYS = ("_model_name", "children", "value", "min", "max", "description")
"""What of a widget's state is kept."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
WIDTH = 10
"""Characters of a bar, as of tqdm's in text."""
KEPT_MODELS = 2_000
KEPT_BARS = 500
"""Those that moved last: a long notebook makes thousands."""
TAG = re.compile(r"<[^>]*>")


@dataclass
class Shown:
    """A bar that is displayed."""

    cell: Any
    """Whoever shows it: a ``CellOutput``."""
    rank: int
    display_id: str
    data: Bundle
    metadata: Bundle
    gone: bool = False
    """Has the rank closed it, as tqdm does with ``leave=False``?"""


class WidgetBars:
    """The bars of a group, over all its cells; several threads may tell of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, dict[str, Any]] = {}
        self._shown: collections.OrderedDict[str, Shown] = collections.OrderedDict()
        """By the widget that is displayed; the one that moved last is the last."""
        self._within: dict[str, str] = {}
        """Widgets, and the displayed one that they are in."""
        self._moved: dict[str, None] = {}

    def open(self, model: str, state: dict[str, Any]) -> None:
        """A rank has made a widget."""
        if state.get("_model_name") in (*BARS, *TEXTS, *BOXES):
            with self._lock:
                self._models[model] = {key: state[key] for key in KEYS if key in state}

    def change(self, model: str, state: dict[str, Any]) -> None:
        """A widget's state changes."""
        with self._lock:
            known = self._models.get(model)
            if known is None:
                return
            known.update((key, state[key]) for key in KEYS if key in state)
            if model in self._within:
                self._moved[self._within[model]] = None

    def close(self, model: str) -> None:
        """The rank has closed a widget."""
        with self._lock:
            if model in self._shown:
                self._shown[model].gone = True
                self._moved[model] = None

    def display(self, cell: Any, rank: int, data: Bundle, metadata: Bundle) -> str | None:
        """The id with which `cell` displays a bundle, so that its text can be written anew; None if it is no bar."""
        view = data.get(WIDGET)
        model = view.get("model_id") if isinstance(view, dict) else None
        with self._lock:
            if not isinstance(model, str) or self._text(model) is None:
                return None
            parts = list(self._parts(model))
            if not any(self._models[part]["_model_name"] in BARS for part in parts):
                return None
            if model not in self._shown:
                self._shown[model] = Shown(cell, rank, new_id(), data, metadata)
            self._within.update(dict.fromkeys(parts, model))
            return self._shown[model].display_id

    def moved(self) -> list[Shown]:
        """The bars whose text is another one than when this was asked last."""
        with self._lock:
            moved, self._moved = list(self._moved), {}
            changed = [self._shown[model] for model in moved if self._write(model)]
            for model in moved:
                if self._shown[model].gone:
                    self._forget(model)
            while len(self._shown) > KEPT_BARS:
                self._forget(next(iter(self._shown)))
            for model in [model for model in self._models if model not in self._within][:-KEPT_MODELS]:
                del self._models[model]
            return changed

    def _write(self, model: str) -> bool:
        """Write the text anew; returns whether it is another one."""
        shown, text = self._shown[model], self._text(model)
        self._shown.move_to_end(model)
        data = shown.data if text is None else {**shown.data, "text/plain": text}
        if shown.gone:  # of a widget that is closed, JupyterLab would say that it cannot find it
            data = {"text/plain": ""}
        before, shown.data = shown.data, data
        return data != before

    def _forget(self, shown: str) -> None:
        del self._shown[shown]
        for part in [part for part, whole in self._within.items() if whole == shown]:
            del self._within[part]
            self._models.pop(part, None)

    def _parts(self, model: str) -> Iterator[str]:
        yield model
        for child in _children(self._models[model]):
            yield from self._parts(child)

    def _text(self, model: str) -> str | None:
        """None if there is something in it of which nothing is known here."""
        state = self._models.get(model)
        if state is None:
            return None
        kind = state["_model_name"]
        if kind in TEXTS:
            return html.unescape(TAG.sub("", str(state.get("value", "")))).replace("\u2007", " ")  # tqdm's blanks
        if kind in BARS:
            return f"{state.get('description') or ''} |{_drawn(state)}|".lstrip()
        children = _children(state)
        texts = [text for text in map(self._text, children) if text is not None]
        if len(texts) < len(children):
            return None
        return BOXES[kind].join(texts)


def _children(state: dict[str, Any]) -> Sequence[str]:
    children = state.get("children")
    return [str(child).removeprefix("IPY_MODEL_") for child in children] if isinstance(children, list) else []


def _drawn(state: dict[str, Any]) -> str:
    """As tqdm draws it in text."""
    numbers = [state.get(key) for key in ("min", "max", "value")]
    low, high, value = (number if isinstance(number, (int, float)) else 0 for number in numbers)
    share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
    whole, rest = divmod(int(share * WIDTH * 8), 8)
    return ("█" * whole + (EIGHTHS[rest] if whole < WIDTH else "")).ljust(WIDTH)


class WidgetCell(Protocol):
    """A cell that shows widgets, as whoever passes on their messages sees it."""

    page: CellOutputArea

    def late(self, rank: int, message: Message) -> None:
        """What came when the cell had ended."""

    def keeps(self, rank: int, model: str) -> bool:
        """Does the tab of the rank show what this Output widget captures?"""

    def take(self, rank: int, model: str) -> list[Item]:
        """What it has captured; the page shows it from here on."""

    def widget_closed(self, rank: int, model: str) -> None:
        """The rank has closed the widget."""


class Comms(Protocol):
    """Whoever passes on the messages of widgets."""

    bars: WidgetBars
    """What is known of those that are progress bars."""

    def relay(self, rank: int, message: Message, cell: WidgetCell, shown: bool = True) -> None:
        """A message of a widget of `rank`, which came with the output of `cell`."""

    def show(self, name: str, cell: WidgetCell) -> None:
        """`cell` shows the widget: what its callbacks show later belongs there."""

    def cell_of(self, name: str) -> WidgetCell | None:
        """Where the widget is shown, or was made."""

    def tell(self, name: str, page: CellOutputArea) -> None:
        """Have the page know the widget."""


def replay(view: Plain, rank: int, items: Sequence[Item]) -> None:
    """Show `items` of `rank` once more."""
    for item in items:
        if isinstance(item, Text):
            view.text(rank, item.stream, item.screen.text, None)
        elif isinstance(item, Display):
            view.display(rank, item.data, item.metadata, item.display_id)
        elif isinstance(item, Area):
            replay(view, rank, item.items)
