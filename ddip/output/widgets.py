"""Widgets of ranks: the state in their messages, and progress bars (``tqdm.auto``) as text.

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
from typing import Any

from ddip.output.area import new_id
from ddip.output.transcript import WIDGET, Bundle

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
