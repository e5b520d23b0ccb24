"""Change a framework while an app is active, and undo the changes when it leaves."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_undo: list[Callable[[], object]] = []
_NOTHING = object()
_PATCHED_PACKAGES = (
    *("fastai", "fastdownload", "fastprogress", "accelerate", "transformers", "datasets", "huggingface_hub", "peft"),
    *("trl", "tokenizers", "diffusers", "sentence_transformers", "evaluate", "__main__"),
)
"""Packages whose modules hold names imported from each other; ``__main__`` holds what cells imported earlier."""


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of the class or module `owner` until `undo_all`."""
    before = vars(owner).get(name, _NOTHING)
    setattr(owner, name, value)

    def restore_attribute() -> None:
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    _undo.append(restore_attribute)


def wrap_function(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the function `name` of the class or module `owner` until `undo_all`.

    A call with some arguments becomes ``around(original, *arguments)``, with the original function.
    """
    set_attribute(owner, name, wrap_call(getattr(owner, name), around))


def wrap_call(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the name of `original` that calls ``around(original, *arguments)``."""

    @functools.wraps(original)
    def call_around(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves out this frame
        return around(original, *args, **kwargs)

    return call_around


def replace_imports(name: str, original: Any, value: Any) -> None:
    """Replace `original` with `value` in every module that has imported it as `name`, until `undo_all`."""
    _replace_imported(name, original, value)
    _undo.append(lambda: _replace_imported(name, value, original))  # it also reaches modules that are imported later


def _replace_imported(name: str, old: Any, new: Any) -> None:
    for module in [module for path, module in sys.modules.items() if path.partition(".")[0] in _PATCHED_PACKAGES]:
        if isinstance(module, ModuleType) and vars(module).get(name) is old:
            setattr(module, name, new)


def set_variable(name: str, value: str) -> None:
    """Set the environment variable `name` until `undo_all`."""
    before = os.environ.get(name)
    os.environ[name] = value
    _undo.append(lambda: os.environ.pop(name, None) if before is None else os.environ.update({name: before}))


def undo_all() -> None:
    """Undo all changes, the latest first."""
    while _undo:
        _undo.pop()()
