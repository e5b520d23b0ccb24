"""What the messages of widgets say: pure functions."""

from __future__ import annotations

from typing import Any

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
