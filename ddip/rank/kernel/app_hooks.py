"""Run an app's own code on this rank; ``ddip/apps/__init__.py`` says what an app is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ddip.rank.runtime import stacks, tracebacks

before: Callable[[], None] | None = None
"""Called before each cell, where the app that is prepared here has such a hook."""
after: Callable[[BaseException | None], None] | None = None
"""Called after each cell, with its error."""


def _call(module: str, function: str, *args: Any) -> None:
    run = getattr(importlib.import_module(module), function, None)
    if run is not None:
        run(*args)


def prepare(module: str) -> None:
    """The app's set-up, when the rank has joined the group."""
    global before, after
    _call(module, "prepare")
    app = sys.modules[module]
    before, after = getattr(app, "begin_cell", None), getattr(app, "end_cell", None)


def rejoined(module: str) -> None:
    """The rank has joined the group once more, in which the app is prepared on all ranks."""
    _call(module, "rejoined")


def release(module: str) -> None:
    """The end of the app on this rank, before it leaves the group."""
    global before, after
    before = after = None
    _call(module, "release")


@stacks.calls_users_code
def call_hook(hook: Callable[..., None], *args: Any) -> None:
    """Call what an app has around cells. Its error is shown, and not the cell's; an interrupt is the cell's."""
    try:
        hook(*args)
    except Exception as error:
        failed = f"ddip: {hook.__name__}() of the app {hook.__module__} failed:"
        print(failed, *tracebacks.tell(error, None).traceback, sep="\n", file=sys.stderr)


def command(module: str, text: str) -> str | None:
    """A command of ``%%dip -a``; returns the text that the app answers."""
    run = getattr(importlib.import_module(module), "command", None)
    if run is None:
        raise ValueError(f"the app {module} takes no commands; typed: {text}")
    answer = run(text)
    return answer if isinstance(answer, str) else None
