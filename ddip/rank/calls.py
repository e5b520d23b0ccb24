"""A call of ``in_torchddp`` on this rank.

    notebook  --Call-->  every rank: a cell with ``_in_torchddp()`` in it  --Answer of rank 0-->  notebook

The call has a ``__main__`` of its own, which begins as a copy of the rank's variables: what it imports, needs or
assigns there is gone when it returns, and the rank's variables are as they were.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.rank import apps, namespace, pickling

NAME = "_in_torchddp"
"""The variable of the rank that holds the call, and then its answer."""
IMPORTS = "<imports of in_torchddp>"

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


# -- the call


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
        """Run it here; on rank 0 the `Answer` takes the place of the call."""
        __tracebackhide__ = True
        here = namespace()
        here.pop(NAME, None)
        _show_sources({**self.sources, IMPORTS: Source(self.imports.splitlines(True), None)})
        answer = None
        try:
            with _main(here) as names:
                fn, args, kwargs = self._unpack(names)
                try:
                    result = fn(*args, **kwargs)
                except NameError as error:
                    self._explain(error)
                    raise
                if os.environ["RANK"] == "0":
                    answer = _pack(result)
        finally:
            _sent.clear()
            if self.app:
                apps.release(self.app)
        if answer is not None:
            here[NAME] = answer

    def _unpack(self, names: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        __tracebackhide__ = True
        exec(compile(self.imports, IMPORTS, "exec"), names)
        for module in self.modules:
            with contextlib.suppress(ImportError):  # it may be optional; else the function says what it misses
                importlib.import_module(module)
        for name, data in self.others.items():
            if name not in names:
                self._take(names, name, data)
        for name, data in self.own.items():
            self._take(names, name, data)
        unpickler = pickle.Unpickler(io.BytesIO(self.packed))
        self.packed = b""
        fn, args, kwargs, needed = unpickler.load()
        names.update(unpickler.load())
        names.update(needed)
        return fn, args, kwargs

    def _take(self, names: dict[str, Any], name: str, data: bytes) -> None:
        try:
            names[name] = pickle.loads(data)
        except Exception as error:
            self.left[name] = f"{type(error).__name__}: {error}; import it there, or make it in the function"

    def _explain(self, error: NameError) -> None:
        name = getattr(error, "name", None)
        if name in self.left:
            what = f"name {name!r} is not defined on the ranks; the notebook has it, but did not send it unasked"
            error.args = (f"{what}: {self.left[name]}",)


@dataclass
class Answer:
    """What the function has returned on rank 0."""

    kind: str
    """Name of its type."""
    packed: bytes = b""
    error: str = ""
    """Why it could not be packed."""


class _Pickler(pickling.Pickler):
    """Writes what the notebook has sent as its number."""

    def reducer_override(self, obj: Any) -> Any:
        known = _sent.get(id(obj))
        return super().reducer_override(obj) if known is None else (own, (known[1],))


def _pack(result: Any) -> Answer:
    file, kind = io.BytesIO(), type(result).__name__
    try:
        _Pickler(file).dump(result)
    except Exception as error:
        return Answer(kind, error=f"{type(error).__name__}: {error}")
    return Answer(kind, file.getvalue())


def unpack(packed: bytes, sent: Sequence[Any]) -> Any:
    """In the notebook: the result; functions and classes that were `sent` are the notebook's own again."""
    _own[:] = sent
    try:
        return pickle.loads(packed)
    finally:
        _own.clear()


def forget() -> None:
    """The answer has been fetched, or nobody wants it; may be asked beside a cell."""
    namespace().pop(NAME, None)


# -- around it


@contextlib.contextmanager
def _main(here: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A ``__main__`` for the call, so that pickle finds what is there, too; yields its variables."""
    former = sys.modules["__main__"]
    module = types.ModuleType("__main__")
    vars(module).update(here)
    sys.modules["__main__"] = module
    try:
        yield vars(module)
    finally:
        sys.modules["__main__"] = former


def _show_sources(sources: dict[str, Source]) -> None:
    """Have tracebacks show the notebook's lines, with its numbers of cells."""
    shell = get_ipython()
    numbers: dict[str, int] = getattr(shell.compile, "_filename_map", {}) if shell else {}
    for name, source in sources.items():
        linecache.cache[name] = (sum(map(len, source.lines)), None, source.lines, name)
        if source.number is not None:
            numbers[name] = source.number
