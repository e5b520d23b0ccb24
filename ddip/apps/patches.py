"""What an app changes in a framework while it is there, and how that is taken out again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_undo: list[Callable[[], object]] = []
_NOTHING = object()
_THEIRS = (
    *("fastai", "fastdownload", "fastprogress", "accelerate", "transformers", "datasets", "huggingface_hub", "peft"),
    *("trl", "tokenizers", "diffusers", "sentence_transformers", "evaluate", "__main__"),
)
"""Packages whose modules import from each other by name, and what cells have imported before the app came."""


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
    """Set what modules have imported from each other by name: in each that holds `original`."""
    _swap(name, original, value)
    _undo.append(lambda: _swap(name, value, original))  # also in modules that are imported from here on


def _swap(name: str, old: Any, new: Any) -> None:
    for module in [module for path, module in sys.modules.items() if path.partition(".")[0] in _THEIRS]:
        if isinstance(module, ModuleType) and vars(module).get(name) is old:
            setattr(module, name, new)


def set_variable(name: str, value: str) -> None:
    """Set a variable of the environment, until ``restore``."""
    before = os.environ.get(name)
    os.environ[name] = value
    _undo.append(lambda: os.environ.pop(name, None) if before is None else os.environ.update({name: before}))


def restore() -> None:
    """Leave the framework as it was."""
    while _undo:
        _undo.pop()()
