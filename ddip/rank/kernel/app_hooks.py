"""Call an app's hooks on this rank; ``ddip/apps/__init__.py`` defines what an app is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ddip.rank.inspection import lone_trainers
from ddip.rank.runtime import stacks, tracebacks

before: Callable[[], None] | None = None
"""Hook to call before each cell; None if no app is prepared or the app has no such hook."""
after: Callable[[BaseException | None], None] | None = lone_trainers.report_lone_trainers
"""Hook to call after each cell with the cell's error, or None if there was no error; without an app, ddip's own."""


def _call_if_defined(module: str, function: str, *args: Any) -> None:
    """Import `module` and call its `function`, if it has one."""
    run = getattr(importlib.import_module(module), function, None)
    if run is not None:
        run(*args)


def prepare_app(module: str) -> None:
    """Set up the app in `module` after this rank has joined the group, and install its cell hooks."""
    global before, after
    _call_if_defined(module, "prepare")
    lone_trainers.has_app = True
    app = sys.modules[module]
    before, after = getattr(app, "begin_cell", None), getattr(app, "end_cell", None)


def notify_app_rejoined(module: str) -> None:
    """Notify the app that this rank has joined a rebuilt group."""
    _call_if_defined(module, "rejoined")


def release_app(module: str) -> None:
    """Remove the app's cell hooks and call its `release`, which cleans up when its use of the group ends."""
    global before, after
    before, after, lone_trainers.has_app = None, lone_trainers.report_lone_trainers, False
    _call_if_defined(module, "release")


@stacks.calls_users_code
def call_hook(hook: Callable[..., None], *args: Any) -> None:
    """Call an app's cell hook and print its error to stderr, so that the cell does not fail.

    An interrupt is raised and ends the cell.
    """
    try:
        hook(*args)
    except Exception as error:
        header = f"ddip: {hook.__name__}() of the app {hook.__module__} failed:"
        print(header, *tracebacks.format_error(error, None).traceback, sep="\n", file=sys.stderr)


def run_app_command(module: str, text: str) -> str | None:
    """Run a ``%%dip -a`` command and return the app's text answer, or None if it is not text.

    Raises ValueError if the app takes no commands.
    """
    run = getattr(importlib.import_module(module), "command", None)
    if run is None:
        raise ValueError(f"the app {module} takes no commands; typed: {text}")
    answer = run(text)
    return answer if isinstance(answer, str) else None
