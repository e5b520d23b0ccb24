"""What crosses to ranks for a call of ``in_torchddp`` (``call/``, ``rank/kernel/call_runner.py``).

Functions and classes of the notebook travel as calls of what is here: empty first, then filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddip.protocol.objects.pickling import Loader, Pickled, bring, main_variables

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
    """The `values`, one after the other; then the function, its arguments and `need`."""
    buffers: list[Any]
    """Memory of arrays and tensors among these: PickleBuffers, which arrive as what they have become."""
    values: list[str]
    """The names of what the function refers to."""
    own: list[str]
    """Those of functions and classes of the notebook."""
    references: dict[str, bytes]
    """What they refer to and ranks import: modules, and functions and classes of modules."""
    left: dict[str, str]
    """Names that they refer to and that are not carried, and why."""
    imports: str
    modules: list[str]
    """Modules inside of packages that the functions take for imported."""
    sources: dict[str, Source]
    """By the name of the file that Python takes them for."""
    known: list[str] = field(default_factory=list)
    """Variables of the notebook, which need not come back with functions of the result."""
    app: str = ""
    """Module of an app that was prepared for the call alone."""

    def __call__(self) -> None:
        """Run it here, on a rank; on rank 0 the `Answer` takes the place of the call."""
        __tracebackhide__ = True
        runner(self)


def _refuse(call: Call) -> None:
    raise RuntimeError("a call of in_torchddp runs on ranks, and this process is not a rank")


runner: Callable[[Call], None] = _refuse
"""Runs a call; on a rank, that of ``rank/kernel/call_runner.py``, which puts itself here."""


@dataclass
class Answer:
    """What the function has returned on rank 0."""

    kind: str
    """Name of its type."""
    parts: dict[str, list[Any]] = field(default_factory=dict)
    """Of the result, as ``""``, and before it what its functions read and the notebook lacks, by name: PickleBuffers of
    the parts of a ``pickling.Pickled``."""
    error: str = ""
    """Why it could not be packed."""


def unpack(answer: Answer, sent: Sequence[Any]) -> Any:
    """In the notebook: the result; functions and classes that were `sent` are the notebook's own again."""
    _own[:] = sent
    loader = Loader({name: Pickled([memoryview(part) for part in parts]) for name, parts in answer.parts.items()})
    try:
        for name in answer.parts:
            value = loader.load(name)
            if name:
                bring(main_variables(), {name: value})
        return value
    finally:
        _own.clear()
