"""Run an app's own code on this rank; ``ddip/apps/__init__.py`` says what an app is."""

from __future__ import annotations

import importlib
from typing import Any


def _call(module: str, function: str, *args: Any) -> None:
    run = getattr(importlib.import_module(module), function, None)
    if run is not None:
        run(*args)


def prepare(module: str) -> None:
    """The app's set-up, when the rank has joined the group."""
    _call(module, "prepare")


def release(module: str) -> None:
    """The end of the app on this rank, before it leaves the group."""
    _call(module, "release")


def command(module: str, text: str) -> str | None:
    """A command of ``%%dip -a``; returns the text that the app answers."""
    run = getattr(importlib.import_module(module), "command", None)
    if run is None:
        raise ValueError(f"the app {module} takes no commands; typed: {text}")
    answer = run(text)
    return answer if isinstance(answer, str) else None
