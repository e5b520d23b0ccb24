"""What a call of ``in_torchddp`` carries to the ranks: a function, its arguments, and what these refer to.

Functions of the notebook get the call's variables for their globals there (``rank/calls.py``), so that a name means
what the ranks have imported, or the user has named. cloudpickle would give them copies of the notebook's globals.
"""

from __future__ import annotations

import ast
import dis
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.errors import TransferError
from ddip.output.sizes import size_text
from ddip.protocol import calls, pickling

LIMIT = 1_000_000
"""Bytes of an object that is carried though nobody has named it."""
READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
ATTRIBUTES = ("__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__", "__annotations__")
"""Of a function, besides its own."""


class _TooLarge(Exception):
    """It has more than `LIMIT` bytes."""


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > LIMIT:
            raise _TooLarge
        return super().write(data)


class _Pickler(pickling.Pickler):
    """Writes functions and classes of the notebook so that the ranks know them for what they are."""

    def __init__(
        self, file: io.BytesIO, payload: CallPayload, buffers: list[pickle.PickleBuffer] | None = None
    ) -> None:
        super().__init__(file, buffers)
        self._payload = payload
        self._limited = isinstance(file, _Limited)

    def reducer_override(self, obj: Any) -> Any:
        if self._limited and _is_large_tensor(obj):
            raise _TooLarge  # before it is copied
        reduced = super().reducer_override(obj)
        if not isinstance(obj, (FunctionType, type)):
            return reduced
        if reduced is NotImplemented:  # it is imported there
            self._payload.packages.add(str(obj.__module__).partition(".")[0])
            return reduced
        return self._payload.reduce(obj, reduced)


def _is_large_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor) and obj.untyped_storage().nbytes() > LIMIT


class CallPayload:
    """All that travels with one call."""

    def __init__(self, namespace: Mapping[str, Any], homes: Iterable[str]) -> None:
        self.sent: list[Any] = []
        """Functions and classes of the notebook, by the number under which they may come back."""
        self.named: dict[str, Any] = {}
        """Those that the notebook has under their own names."""
        self.globals: dict[str, Any] = {}
        """What the functions refer to."""
        self.packages: set[str] = set()
        """Top packages of what the ranks import when they unpickle."""
        self.modules: set[str] = set()
        """Modules inside of packages that functions reach through the packages."""
        self.sources: dict[str, calls.Source] = {}
        self._numbers: dict[int, int] = {}
        self._namespace = namespace
        self._homes = frozenset(homes)

    def reduce(self, obj: FunctionType | type, reduced: Any) -> Any:
        """What the pickler is to write for a function or class that is pickled by value."""
        if not self._is_of_the_notebook(obj):
            return reduced
        if isinstance(obj, FunctionType):
            self._look_into(obj)
            reduced = (calls.function, (obj.__code__, obj.__name__), _state(obj), None, None, calls.fill)
        if self._namespace.get(obj.__name__) is obj:
            self.named[obj.__name__] = obj
        make, args, *rest = reduced
        return (calls.sent, (self._number(obj), make, args), *rest)

    def _is_of_the_notebook(self, obj: FunctionType | type) -> bool:
        home = obj.__globals__.get("__name__") if isinstance(obj, FunctionType) else obj.__module__
        return home in self._homes

    def is_own(self, obj: Any) -> bool:
        """Is it a function or class of the notebook that has been packed?"""
        return id(obj) in self._numbers

    def _number(self, obj: Any) -> int:
        number = self._numbers.setdefault(id(obj), len(self.sent))
        if number == len(self.sent):
            self.sent.append(obj)
        return number

    def _look_into(self, function: FunctionType) -> None:
        """Remember what its code refers to, and the lines of its cell."""
        for code in _codes(function.__code__):
            for name in _reads(code):
                if name in function.__globals__ and not name.startswith("__"):
                    value = self.globals.setdefault(name, function.__globals__[name])
                    if isinstance(value, ModuleType):
                        self.packages.add(value.__name__.partition(".")[0])
                        self.modules |= _reached(value, code)
        file = function.__code__.co_filename
        if file not in self.sources and not Path(file).exists() and (lines := linecache.getlines(file)):
            numbers: dict[str, int] = getattr(getattr(get_ipython(), "compile", None), "_filename_map", {})
            self.sources[file] = calls.Source(lines, numbers.get(file))

    def pack(self, *objects: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
        """Pickle `objects`, one after the other, with what they share; the memory of large ones stands beside that."""
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler = _Pickler(file, self, buffers)
        for obj in objects:
            pickler.dump(obj)
        return file.getvalue(), buffers

    def pack_small(self, obj: Any) -> bytes:
        """Pickle it; raises _TooLarge."""
        file = _Limited()
        _Pickler(file, self).dump(obj)
        return file.getvalue()


def _codes(code: CodeType) -> Iterator[CodeType]:
    """`code` and those of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reads(code: CodeType) -> list[str]:
    """Global names that `code` reads."""
    return [step.argval for step in dis.get_instructions(code) if step.opname in READS]


def _reached(package: ModuleType, code: CodeType) -> set[str]:
    """Modules inside of `package` that `code` can mean: with ``import a.b`` it says ``a.b``, and has only ``a``."""
    prefix = f"{package.__name__}."
    inside = [name for name in list(sys.modules) if name.startswith(prefix)]
    return {name for name in inside if set(name.removeprefix(prefix).split(".")) <= set(code.co_names)}


def _state(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any], list[tuple[Any, ...]]]:
    """What ``calls.fill`` gives it there; a cell's content is in a tuple, which is empty where the cell is."""
    contents: list[tuple[Any, ...]] = []
    for cell in function.__closure__ or ():
        try:
            contents.append((cell.cell_contents,))
        except ValueError:
            contents.append(())
    return dict(vars(function)), {name: getattr(function, name) for name in ATTRIBUTES}, contents


def packages_of(imports: str) -> set[str]:
    """Top packages that the statements `imports` name; raises SyntaxError."""
    names = set()
    for node in ast.walk(ast.parse(imports)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


def pack(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needed: Mapping[str, Any],
    imports: str,
    payload: CallPayload,
) -> calls.Call:
    """The call that the ranks get.

    Raises TransferError that names what cannot be pickled of what the user has named; of what else the functions refer
    to, that is told where it is missed.
    """
    try:
        packed, buffers = payload.pack((fn, args, dict(kwargs), dict(needed)), payload.named)
    except Exception as error:
        raise TransferError(f"in_torchddp: {_culprits(fn, args, kwargs, needed, payload, error)}") from None
    carried, left = _carry(payload, {*needed, *payload.named})
    own = {name: data for name, data in carried.items() if payload.is_own(payload.globals[name])}
    others = {name: data for name, data in carried.items() if name not in own}
    return calls.Call(packed, buffers, own, others, left, imports, sorted(payload.modules), payload.sources)


def _carry(payload: CallPayload, there: set[str]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Pickle the globals of the functions, and what these refer to; what cannot be carried has its reason instead."""
    carried: dict[str, bytes] = {}
    left: dict[str, str] = {}
    hidden = getattr(get_ipython(), "user_ns_hidden", {})  # IPython's own, which every rank has
    done = set(there)
    while todo := [name for name in payload.globals if name not in done]:
        for name in todo:
            done.add(name)
            value = payload.globals[name]
            if name in hidden and hidden[name] is value:
                continue
            try:
                carried[name] = payload.pack_small(value)
            except _TooLarge:
                left[name] = f"it is larger than {size_text(LIMIT)}; add {name} to need="
            except Exception as error:
                left[name] = f"{type(error).__name__}: {error}; make it in the function"
    return carried, left


def _culprits(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needed: Mapping[str, Any],
    payload: CallPayload,
    whole: Exception,
) -> str:
    """Which of what the user has named cannot be pickled, and why."""
    arguments = {f"argument {number}": value for number, value in enumerate(args, 1)}
    named = {f"argument {name}=": value for name, value in kwargs.items()}
    found = []
    for name, value in {"the function": fn, **arguments, **named, **needed}.items():
        try:
            payload.pack(value)
        except Exception as error:
            found.append(f"{name} cannot be pickled: {type(error).__name__}: {error}")
    return "; ".join(found) or f"{type(whole).__name__}: {whole}"
