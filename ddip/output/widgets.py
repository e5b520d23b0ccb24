"""Widgets of ranks: their messages, the interfaces that relay these, and progress bars (``tqdm.auto``) as text.

The text form of a widget is written once, when the widget is displayed; that of a bar says 0 %. GitHub, ``nbconvert``
and pages without widget state show only this text. So ddip updates it at the end of each cell that has moved a bar.

The text is derived from the widgets' messages. The rank cannot supply it: tqdm's bar is deleted when its loop ends.
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
    """Return the widget state in `message`; empty if it has none, as in a malformed message."""
    data = message["content"].get("data")
    state = data.get("state") if isinstance(data, dict) else None
    return state if isinstance(state, dict) else {}


def referenced_ids(state: object) -> set[str]:
    """Return the IDs of the widgets that `state` refers to, such as children, a layout or a style."""
    if isinstance(state, str):
        return {state.removeprefix(REFERENCE)} if state.startswith(REFERENCE) else set()
    if isinstance(state, dict):
        state = list(state.values())
    return set().union(*map(referenced_ids, state)) if isinstance(state, list | tuple) else set()


def merge_state(opened: Message, changed: Message) -> None:
    """Merge the state in `changed`, and its binary buffers, into the message that opens the widget."""
    state = state_in(opened)
    if not state:
        return  # a comm of a library, not a widget
    new, change = state_in(changed), changed["content"]["data"]
    added = list(zip(change.get("buffer_paths") or [], changed.get("buffers") or [], strict=False))
    replaced = {*new, *(path[0] for path, _ in added)}
    data, buffers = opened["content"]["data"], list(opened.get("buffers") or [])
    paths = list(data.get("buffer_paths") or [])
    kept = [(path, part) for path, part in zip(paths, buffers, strict=False) if path[0] not in replaced]
    kept += added
    state.update(new)
    data["buffer_paths"] = [path for path, _ in kept]
    opened["buffers"] = [part for _, part in kept]


BARS = ("FloatProgressModel", "IntProgressModel")
TEXTS = ("HTMLModel", "LabelModel")
BOXES = {"HBoxModel": "", "BoxModel": "", "VBoxModel": "\n"}
"""Box models, and the text that separates their children."""
KEYS = ("_model_name", "children", "value", "min", "max", "description")
"""Keys of a widget's state that are kept."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
WIDTH = 10
"""Width of a bar in characters, the same as in tqdm's text."""
KEPT_MODELS = 2_000
KEPT_BARS = 500
"""Maximum number of bars; those that moved last are kept, because a long notebook creates thousands."""
TAG = re.compile(r"<[^>]*>")


@dataclass
class ShownBar:
    """A displayed progress bar."""

    cell: Any
    """The ``CellOutput`` that shows it."""
    rank: int
    display_id: str
    data: Bundle
    metadata: Bundle
    is_closed: bool = False
    """True if the rank has closed it, as tqdm does with ``leave=False``."""


class WidgetBars:
    """The progress bars of a group in all its cells; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, dict[str, Any]] = {}
        self._shown: collections.OrderedDict[str, ShownBar] = collections.OrderedDict()
        """Bars by the ID of the displayed widget; the one that moved last is at the end."""
        self._within: dict[str, str] = {}
        """The displayed widget that contains each widget, by ID."""
        self._moved: dict[str, None] = {}
        """Displayed widgets whose bars have changed since the last call of `take_changed`, in order."""

    def open(self, model: str, state: dict[str, Any]) -> None:
        """Record a widget that a rank has created."""
        if state.get("_model_name") in (*BARS, *TEXTS, *BOXES):
            with self._lock:
                self._models[model] = {key: state[key] for key in KEYS if key in state}

    def change(self, model: str, state: dict[str, Any]) -> None:
        """Record a change of a widget's state."""
        with self._lock:
            known = self._models.get(model)
            if known is None:
                return
            known.update((key, state[key]) for key in KEYS if key in state)
            if model in self._within:
                self._moved[self._within[model]] = None

    def close(self, model: str) -> None:
        """Record that the rank has closed a widget."""
        with self._lock:
            if model in self._shown:
                self._shown[model].is_closed = True
                self._moved[model] = None

    def display(self, cell: Any, rank: int, data: Bundle, metadata: Bundle) -> str | None:
        """Record that `cell` shows a bar, and return the display ID for updates; None if `data` shows no bar."""
        view = data.get(WIDGET)
        model = view.get("model_id") if isinstance(view, dict) else None
        with self._lock:
            if not isinstance(model, str) or self._widget_text(model) is None:
                return None
            ids = list(self._widget_ids(model))
            if not any(self._models[part]["_model_name"] in BARS for part in ids):
                return None
            if model not in self._shown:
                self._shown[model] = ShownBar(cell, rank, new_id(), data, metadata)
            self._within.update(dict.fromkeys(ids, model))
            return self._shown[model].display_id

    def take_changed(self) -> list[ShownBar]:
        """Return the bars whose text has changed since the last call, and forget those that are closed."""
        with self._lock:
            moved, self._moved = list(self._moved), {}
            changed = [self._shown[model] for model in moved if self._update_text(model)]
            for model in moved:
                if self._shown[model].is_closed:
                    self._forget_bar(model)
            while len(self._shown) > KEPT_BARS:
                self._forget_bar(next(iter(self._shown)))
            for model in [model for model in self._models if model not in self._within][:-KEPT_MODELS]:
                del self._models[model]
            return changed

    def _update_text(self, model: str) -> bool:
        """Update the text of a displayed bar, and return True if it has changed."""
        shown, text = self._shown[model], self._widget_text(model)
        self._shown.move_to_end(model)
        data = shown.data if text is None else {**shown.data, "text/plain": text}
        if shown.is_closed:  # JupyterLab would show an error for a closed widget
            data = {"text/plain": ""}
        before, shown.data = shown.data, data
        return data != before

    def _forget_bar(self, model: str) -> None:
        del self._shown[model]
        for part in [part for part, whole in self._within.items() if whole == model]:
            del self._within[part]
            self._models.pop(part, None)

    def _widget_ids(self, model: str) -> Iterator[str]:
        yield model
        for child in _child_ids(self._models[model]):
            yield from self._widget_ids(child)

    def _widget_text(self, model: str) -> str | None:
        """Return the text of a widget and its children; None if one of them is of an unknown kind."""
        state = self._models.get(model)
        if state is None:
            return None
        kind = state["_model_name"]
        if kind in TEXTS:
            return html.unescape(TAG.sub("", str(state.get("value", "")))).replace("\u2007", " ")  # tqdm's blanks
        if kind in BARS:
            return f"{state.get('description') or ''} |{_draw_bar(state)}|".lstrip()
        children = _child_ids(state)
        texts = [text for text in map(self._widget_text, children) if text is not None]
        if len(texts) < len(children):
            return None
        return BOXES[kind].join(texts)


def _child_ids(state: dict[str, Any]) -> Sequence[str]:
    children = state.get("children")
    return [str(child).removeprefix("IPY_MODEL_") for child in children] if isinstance(children, list) else []


def _draw_bar(state: dict[str, Any]) -> str:
    """Return the bar of a progress widget with this `state` as `WIDTH` block characters."""
    numbers = [state.get(key) for key in ("min", "max", "value")]
    low, high, value = (number if isinstance(number, (int, float)) else 0 for number in numbers)
    share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
    whole, rest = divmod(int(share * WIDTH * 8), 8)
    return ("█" * whole + (EIGHTHS[rest] if whole < WIDTH else "")).ljust(WIDTH)


class WidgetCell(Protocol):
    """A cell that shows widgets: the interface for the relay of widget messages."""

    page: CellOutputArea

    def late(self, rank: int, message: Message) -> None:
        """Show a message that came after the end of the cell."""

    def keeps(self, rank: int, model: str) -> bool:
        """Return True if the rank's tab shows the captured output of this Output widget."""

    def take(self, rank: int, model: str) -> list[Item]:
        """Remove the captured output of an Output widget from the tab and return it; the page then shows it."""

    def widget_closed(self, rank: int, model: str) -> None:
        """Remove a widget that the rank has closed."""


class Comms(Protocol):
    """The relay of widget messages between ranks and pages."""

    bars: WidgetBars
    """The progress bars among the widgets."""

    def relay(self, rank: int, message: Message, cell: WidgetCell, shown: bool = True) -> None:
        """Relay a widget message of `rank` that came with the output of `cell`."""

    def show(self, name: str, cell: WidgetCell) -> None:
        """Record that `cell` shows the widget, so that later output of its callbacks belongs there."""

    def cell_of(self, name: str) -> WidgetCell | None:
        """Return the cell that shows the widget, else the one that created it; None if it is unknown."""

    def add_output(self, name: str, output: Bundle) -> None:
        """Add `output`, in the form of a notebook file, to the state of an Output widget."""

    def clear_output(self, name: str, wait: bool) -> None:
        """Remove the output in the state of an Output widget; with `wait`, when the next output comes."""

    def send_outputs(self, page: CellOutputArea, at_once: bool = False) -> None:
        """Send the changed outputs of Output widgets to `page`, at a limited rate; with `at_once`, now in any case."""

    def has_layout(self, name: str) -> bool:
        """Return True if the widget has a size, a border or another property of a layout."""

    def announce(self, name: str, page: CellOutputArea) -> None:
        """Send the widget, and those in it, to `page`, unless the page has them."""


class OutputState(CellOutputArea):
    """The output area of an Output widget after the end of the cell: the widget's state.

    A page captures only output of cells that it has run itself, and thus none after a reload.
    """

    def __init__(self, comms: Comms, model: str) -> None:
        super().__init__()
        self._comms, self._model = comms, model

    def write(self, stream: str, text: str) -> None:
        """Add text of a stream."""
        if text:
            self._comms.add_output(self._model, {"output_type": "stream", "name": stream, "text": text})

    def show(
        self, data: Bundle, metadata: Bundle | None = None, display_id: str | None = None, update: bool = False
    ) -> None:
        """Add a MIME bundle; an Output widget ignores updates."""
        if not update:
            output = {"output_type": "display_data", "data": data, "metadata": metadata or {}}
            self._comms.add_output(self._model, output)

    def clear(self, wait: bool) -> None:
        """Clear the widget; with `wait`, when the next output comes."""
        self._comms.clear_output(self._model, wait)


def replay_items(view: Plain, rank: int, items: Sequence[Item]) -> None:
    """Show `items` of `rank` again in `view`."""
    for item in items:
        if isinstance(item, Text):
            view.text(rank, item.stream, item.screen.text, None)
        elif isinstance(item, Display):
            view.display(rank, item.data, item.metadata, item.display_id)
        elif isinstance(item, Area):
            replay_items(view, rank, item.items)
