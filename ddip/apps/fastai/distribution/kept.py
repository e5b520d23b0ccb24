"""Save and restore the state that calling a function may change, so that it can be called on trial."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import nn

DEPTH = 3
"""Maximum depth of references to follow, from the function to the objects that it uses, and to the objects that these
hold."""
MOST_ELEMENTS = 2**20
"""Maximum number of elements of a tensor that is copied; running statistics are small."""
_NOTHING = object()


class SavedState:
    """Copy of the state that a call of `function` may change, to undo a trial call with `restore`.

    It covers attributes, closures, the globals that its code names, buffers and containers, up to `DEPTH` references
    away; tensors with more than `MOST_ELEMENTS` elements are not copied.
    """

    def __init__(self, function: Any) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._keep(function, DEPTH)

    def restore(self) -> None:
        """Restore the saved state."""
        for undo in self._undo:
            undo()

    def _keep(self, value: Any, depth: int) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._keep_tensor(value)
        elif isinstance(value, list | deque | dict | set):
            self._keep_container(value)
        elif depth > 0 and not isinstance(value, types.ModuleType | type):
            self._keep_parts(value, depth - 1)

    def _keep_parts(self, value: Any, depth: int) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._keep(part, depth)
        elif isinstance(value, types.MethodType):
            self._keep(value.__self__, depth + 1)
            self._keep(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._keep_cell(cell, depth)
            self._keep_names(value.__globals__, value.__code__.co_names, depth)
            self._keep_names(value.__dict__, None, depth)
        elif isinstance(value, nn.Module):
            self._keep(type(value).forward, depth)
            for module in value.modules():
                self._keep_names(vars(module), None, depth)
                for buffer in module._buffers.values():
                    self._keep(buffer, 0)
        elif isinstance(names := getattr(value, "__dict__", None), dict):
            self._keep(vars(type(value)).get("__call__"), depth)
            self._keep_names(names, None, depth)

    def _keep_names(self, names: MutableMapping[str, Any], which: Iterable[str] | None, depth: int) -> None:
        """Save the variables `which` of `names`; None means all, and `restore` then removes new ones."""
        before = dict(names) if which is None else {name: names.get(name, _NOTHING) for name in which}

        def restore_names() -> None:
            for name in list(names) if which is None else before:
                value = before.get(name, _NOTHING)
                if value is _NOTHING:
                    names.pop(name, None)
                elif names.get(name, _NOTHING) is not value:
                    names[name] = value

        self._undo.append(restore_names)
        for value in before.values():
            self._keep(value, depth)

    def _keep_cell(self, cell: types.CellType, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # the cell is still empty
            return
        self._undo.append(lambda: setattr(cell, "cell_contents", value))
        self._keep(value, depth)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad or tensor.numel() > MOST_ELEMENTS:
            return
        before = tensor.detach().clone()
        # Written through .data, or a backward pass that has saved the tensor would fail because it was modified.
        self._undo.append(lambda: _copy_into(tensor, before))

    def _keep_container(self, value: Any) -> None:
        before = list(value.items()) if isinstance(value, dict) else list(value)

        def restore_container() -> None:
            now = list(value.items()) if isinstance(value, dict) else list(value)
            if len(now) == len(before) and all(map(_is_same, now, before)):
                return
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(before)

        self._undo.append(restore_container)


def _copy_into(tensor: torch.Tensor, before: torch.Tensor) -> None:
    tensor.data.copy_(before)


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second) == 2:
        return first[0] is second[0] and first[1] is second[1]
    return first is second
