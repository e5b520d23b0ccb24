"""What a function may change when it is called, kept and put back: for a call that is a trial only."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import nn

DEPTH = 3
"""How far objects are followed: a function, an object that it uses, what that holds."""
MOST = 2**20
"""Elements of a tensor that is copied: statistics are small."""
_NOTHING = object()


class Kept:
    """The state of what `function` can reach: attributes, closures, globals that it names, buffers, containers."""

    def __init__(self, function: Any) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._keep(function, DEPTH)

    def restore(self) -> None:
        """Put everything back."""
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
        """Of an object all names, also those that are new afterwards; of a module those in `which`."""
        before = dict(names) if which is None else {name: names.get(name, _NOTHING) for name in which}

        def undo() -> None:
            for name in list(names) if which is None else before:
                value = before.get(name, _NOTHING)
                if value is _NOTHING:
                    names.pop(name, None)
                elif names.get(name, _NOTHING) is not value:
                    names[name] = value

        self._undo.append(undo)
        for value in before.values():
            self._keep(value, depth)

    def _keep_cell(self, cell: types.CellType, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # still empty
            return
        self._undo.append(lambda: setattr(cell, "cell_contents", value))
        self._keep(value, depth)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad or tensor.numel() > MOST:
            return
        before = tensor.detach().clone()
        # By .data: no backward pass that has the tensor saved takes it for changed.
        self._undo.append(lambda: _put(tensor, before))

    def _keep_container(self, value: Any) -> None:
        before = list(value.items()) if isinstance(value, dict) else list(value)

        def undo() -> None:
            now = list(value.items()) if isinstance(value, dict) else list(value)
            if len(now) == len(before) and all(map(_is_same, now, before)):
                return
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(before)

        self._undo.append(undo)


def _put(tensor: torch.Tensor, before: torch.Tensor) -> None:
    tensor.data.copy_(before)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other
