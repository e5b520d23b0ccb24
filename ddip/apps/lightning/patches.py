"""What ddip changes in Lightning while the app is there, and how it is taken out again."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

PYTORCH = tuple(name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None)
"""The packages with a Trainer."""

_undo: list[Callable[[], None]] = []


def modules(path: str) -> list[Any]:
    """The module of this `path` in each package that is installed: ``pytorch.tuner`` is ``lightning.pytorch.tuner`` and
    ``pytorch_lightning.tuner``."""
    room, _, rest = path.partition(".")
    found = []
    for package in PYTORCH:
        root = (
            f"lightning.{room}" if package == "lightning" else {"pytorch": package, "fabric": "lightning_fabric"}[room]
        )
        found.append(importlib.import_module(f"{root}.{rest}" if rest else root))
    return found


def patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the function `name` of a class or a module, until ``restore``, by what `wrap` makes of it."""
    own = vars(owner)[name]
    setattr(owner, name, wrap(own))
    _undo.append(lambda: setattr(owner, name, own))


def restore() -> None:
    """Leave Lightning as it was."""
    with contextlib.ExitStack() as stack:
        for undo in _undo:
            stack.callback(undo)
        _undo.clear()
