"""What crosses between the notebook and its ranks for a call of ``in_torchddp`` (``call/``, ``rank/calls.py``).

Functions and classes of the notebook travel as calls of what is here: empty first, then filled.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

NAME = "_in_torchddp"
"""The variable of the rank that holds the call, and then its answer."""

_sent: dict[int, tuple[Any, int]] = {}
"""On a rank: functions and classes that the notebook has sent, by id, and its numbers for them."""
_own: list[Any] = []
"""In the notebook, while it unpacks an answer: what it has sent, by number."""


# -- how functions and classes of the notebook travel


def sent(number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function or class of the notebook, which is its `number` for it."""
    made = make(*args)
    _sent[id(made)] = (made, number)
    return made


def own(number: int) -> Any:
    """What the notebook has sent, when it comes back."""
    return _own[number]


def function(code: types.CodeType, name: str) -> types.FunctionType:
    """A function of the notebook, still empty; its globals are those of the call."""
    closure = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, vars(sys.modules["__main__"]), name, None, closure)


def fill(made: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any], list[tuple[Any, ...]]]) -> None:
    """Give a function its own attributes, those that every function has, and the contents of its cells."""
    own_attributes, attributes, contents = state
    vars(made).update(own_attributes)
    for name, value in attributes.items():
        setattr(made, name, value)
    for cell, content in zip(made.__closure__ or (), contents, strict=True):
        if content:
            cell.cell_contents = content[0]


def number_of(obj: Any) -> int | None:
    """On a rank: the notebook's number for what it has sent; None for anything else."""
    known = _sent.get(id(obj))
    return None if known is None else known[1]


def forget_sent() -> None:
    """On a rank: the call is over."""
    _sent.clear()


@dataclass
class Source:
    """Lines that were typed in the notebook, for tracebacks."""

    lines: list[str]
    number: int | None
    """Of the cell; None where it has none."""


@dataclass
class Call:
    """A function, its arguments, and all that it needs; a cell calls it on every rank, once."""

    packed: bytes
    """The function, its arguments and `need`; after them, by name, the notebook's functions and classes among these."""
    buffers: list[Any]
    """Memory of arrays and tensors among these: PickleBuffers, which arrive as what they have become."""
    own: dict[str, bytes]
    """Functions and classes of the notebook that these refer to."""
    others: dict[str, bytes]
    """What else they refer to, for where the rank has no such name."""
    left: dict[str, str]
    """Names that they refer to and that are not carried, and why."""
    imports: str
    modules: list[str]
    """Modules inside of packages that the functions take for imported."""
    sources: dict[str, Source]
    """By the name of the file that Python takes them for."""
    app: str = ""
    """Module of an app that was prepared for the call alone."""

    def __call__(self) -> None:
        """Run it here, on a rank; on rank 0 the `Answer` takes the place of the call."""
        __tracebackhide__ = True
        importlib.import_module("ddip.rank.calls").run(self)


@dataclass
class Answer:
    """What the function has returned on rank 0."""

    kind: str
    """Name of its type."""
    packed: bytes = b""
    buffers: list[Any] = field(default_factory=list)
    """As those of a `Call`."""
    error: str = ""
    """Why it could not be packed."""


def unpack(answer: Answer, sent: Sequence[Any]) -> Any:
    """In the notebook: the result; functions and classes that were `sent` are the notebook's own again."""
    _own[:] = sent
    try:
        return pickle.loads(answer.packed, buffers=answer.buffers)
    finally:
        _own.clear()
