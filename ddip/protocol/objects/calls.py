"""Carry a call of ``in_torchddp`` to the ranks and its answer back (``call/``, ``rank/kernel/call_runner.py``).

A function or class of the notebook is pickled as a call of `make_definition`, which makes it empty; its state is set
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddip.protocol.objects.pickling import Loader, Pickled, main_variables, set_missing_variables

NAME = "_in_torchddp"
"""Variable of the rank that holds the call, and later its answer."""

_sent: dict[int, tuple[Any, int]] = {}
"""On a rank: functions and classes that the notebook has sent, with the notebook's numbers for them, by id."""
_own: list[Any] = []
"""In the notebook, while it unpacks an answer: the functions and classes that it has sent, by number."""


# -- functions and classes of the notebook


def make_definition(number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make a function or class of the notebook on this rank, and remember the notebook's `number` for it.

    Pickles of a call refer to this function: ``make(*args)`` makes the object.
    """
    made = make(*args)
    _sent[id(made)] = (made, number)
    return made


def notebook_definition(number: int) -> Any:
    """Return the notebook's own function or class for the `number` that a rank sent back.

    Works only within `unpack_answer`.
    """
    return _own[number]


def number_of(obj: Any) -> int | None:
    """Return the notebook's number for an object that it has sent to this rank; None for any other."""
    known = _sent.get(id(obj))
    return None if known is None else known[1]


def forget_sent() -> None:
    """Forget the functions and classes that the notebook has sent to this rank, at the end of the call."""
    _sent.clear()


@dataclass
class Source:
    """Lines that were typed in the notebook, for tracebacks."""

    lines: list[str]
    number: int | None
    """Number of the cell; None if the lines have none."""


@dataclass
class Call:
    """A function, its arguments, and the objects that it needs.

    A cell calls the `Call` once on every rank.
    """

    packed: bytes
    """Pickles of the `values` in order, then of the function, its arguments and ``need=``."""
    buffers: list[Any]
    """Memory of the arrays and tensors in `packed`, as PickleBuffers."""
    values: list[str]
    """Names of the values that the function refers to."""
    own: list[str]
    """Names in `values` of functions and classes that the notebook defines."""
    references: dict[str, bytes]
    """Pickles of objects that the ranks import: modules, and functions and classes of modules; by name."""
    left: dict[str, str]
    """Names that the functions refer to but the call does not carry, with the reason."""
    imports: str
    modules: list[str]
    """Submodules that the functions reach through their packages and that must be imported."""
    sources: dict[str, Source]
    """Source lines by the file name in the code objects."""
    known: list[str] = field(default_factory=list)
    """Variables of the notebook; they need not be sent back with functions in the result."""
    app: str = ""
    """Module of an app that was prepared only for this call."""

    def __call__(self) -> None:
        """Run the call on this rank. On rank 0, the `Answer` replaces the call in the variable `NAME`."""
        __tracebackhide__ = True
        runner(self)


def _refuse_call(call: Call) -> None:
    raise RuntimeError("a call of in_torchddp runs on ranks, and this process is not a rank")


runner: Callable[[Call], None] = _refuse_call
"""Function that runs a call; ``rank/kernel/call_runner.py`` sets it on a rank."""


@dataclass
class Answer:
    """Result of the function on rank 0."""

    kind: str
    """Name of the result's type."""
    parts: dict[str, list[Any]] = field(default_factory=dict)
    """PickleBuffers of the parts of each ``pickling.Pickled``, by name. The result, named ``""``, is last. The globals
    that its functions read and the notebook lacks come before it."""
    error: str = ""
    """Reason why the result could not be packed; otherwise empty."""


def unpack_answer(answer: Answer, sent: Sequence[Any]) -> Any:
    """Return the result of the call, in the notebook.

    `sent`: functions and classes that the call carried, by number; in the result, they are the notebook's own objects
    again. Sets the globals that functions of the result read and the notebook lacks. Raises what the pickled classes
    raise.
    """
    _own[:] = sent
    loader = Loader({name: Pickled([memoryview(part) for part in parts]) for name, parts in answer.parts.items()})
    try:
        for name in answer.parts:
            value = loader.load(name)
            if name:
                set_missing_variables(main_variables(), {name: value})
        return value
    finally:
        _own.clear()
