"""What ddip changes in fastai while the app is there, and how it is taken out again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fastai.callback.core import Callback


class Passing(Callback):
    """A callback of ddip's own, there for one call: a learner that is exported meanwhile does not need ddip."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Callback, ())


_undo: list[Callable[[], None]] = []
_NOTHING = object()
_THEIRS = ("fastai", "fastdownload", "fastprogress")


def patch(owner: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of a class or module, until ``restore``."""
    before = vars(owner).get(name, _NOTHING)
    setattr(owner, name, value)

    def undo() -> None:
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    _undo.append(undo)


def put_everywhere(name: str, original: Any, value: Any) -> None:
    """Set what modules of fastai have imported from each other by name: in each that holds `original`."""
    _swap(name, original, value)
    _undo.append(lambda: _swap(name, value, original))  # also in modules that are imported from here on


def _swap(name: str, old: Any, new: Any) -> None:
    for module in [module for path, module in sys.modules.items() if path.partition(".")[0] in _THEIRS]:
        if vars(module).get(name) is old:
            setattr(module, name, new)


def restore() -> None:
    """Leave fastai as it was."""
    while _undo:
        _undo.pop()()
