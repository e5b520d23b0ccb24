"""What a call of ``in_torchddp`` carries to the ranks: a function, its arguments, and what these refer to.

Functions of the notebook get the call's variables for their globals there (``rank/kernel/call_runner.py``). All that is
carried has one memo: a model and an optimizer that a function reads belong together there, too.
"""

from __future__ import annotations

import ast
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.errors import TransferError
from ddip.output.tables.tables import size_text
from ddip.protocol.objects import calls, pickling
from ddip.protocol.rank_spec import STANDING_VARIABLES

LIMIT = 1_000_000
"""Bytes of an object that is carried though nobody has named it."""


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
        self.homes = payload.homes
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
        self.standing: dict[str, str] = {}
        """Names that ddip defines on each rank, of which the notebook has others, and the function that reads it."""
        self.has_hooks = False
        """Whether a tensor or an optimizer that is carried has hooks, which stay behind."""
        self.left: dict[str, str] = {}
        """Names of `globals` that are not carried, and why."""
        self._numbers: dict[int, int] = {}
        self._namespace = namespace
        self.homes = frozenset(homes)

    def reduce(self, obj: FunctionType | type, reduced: Any) -> Any:
        """What the pickler is to write for a function or class that is pickled by value."""
        if not self._is_of_the_notebook(obj):
            return reduced
        if isinstance(obj, FunctionType):
            self._look_into(obj)
        if self._namespace.get(obj.__name__) is obj and obj.__name__ not in STANDING_VARIABLES:
            self.named[obj.__name__] = obj
        make, args, *rest = reduced
        return (calls.sent, (self._number(obj), make, args), *rest)

    def _is_of_the_notebook(self, obj: FunctionType | type) -> bool:
        home = pickling.home_of(obj) if isinstance(obj, FunctionType) else obj.__module__
        return home in self.homes

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
        for code in pickling.codes(function.__code__):
            for name in pickling.reads(code):
                if name in function.__globals__ and name in STANDING_VARIABLES:
                    self.standing.setdefault(name, function.__qualname__)
                elif name in function.__globals__ and not name.startswith("__"):
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
        self.has_hooks = pickler.has_hooks
        return file.getvalue(), buffers

    def pack_small(self, obj: Any) -> bytes:
        """Pickle it; raises _TooLarge."""
        file = _Limited()
        _Pickler(file, self).dump(obj)
        return file.getvalue()


def _reached(package: ModuleType, code: CodeType) -> set[str]:
    """Modules inside of `package` that `code` can mean: with ``import a.b`` it says ``a.b``, and has only ``a``."""
    prefix = f"{package.__name__}."
    inside = [name for name in list(sys.modules) if name.startswith(prefix)]
    return {name for name in inside if set(name.removeprefix(prefix).split(".")) <= set(code.co_names)}


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
    references: dict[str, bytes] = {}
    named = fn, args, dict(kwargs), dict(needed)
    try:
        payload.pack(named)  # to learn what it refers to, which goes first: classes may use it while they are loaded
        read = _carry(payload, needed, references)
        values = {**read, **payload.named}
        names = sorted(values, key=lambda name: pickling.loading_order(values[name]))
        packed, buffers = payload.pack(*(values[name] for name in names), named)
    except Exception as error:
        raise TransferError(f"in_torchddp: {_culprits(fn, args, kwargs, needed, payload, error)}") from None
    own = [name for name in names if payload.is_own(values[name])]
    modules = sorted(payload.modules)
    return calls.Call(packed, buffers, names, own, references, payload.left, imports, modules, payload.sources)


def _carry(payload: CallPayload, needed: Collection[str], references: dict[str, bytes]) -> dict[str, Any]:
    """Find the globals of the functions, and what these refer to, that can be carried; the others have their reason.

    Those that are only imported there are pickled by themselves, as `references`: one may be missing there.
    """
    values: dict[str, Any] = {}
    hidden = getattr(get_ipython(), "user_ns_hidden", {})  # IPython's own, which every rank has
    done = set(needed)
    while todo := [name for name in payload.globals if name not in done]:
        for name in todo:
            done.add(name)
            value = payload.globals[name]
            if name in hidden and hidden[name] is value:
                continue
            try:
                data = payload.pack_small(value)
            except _TooLarge:
                payload.left[name] = f"it is larger than {size_text(LIMIT)}; add {name} to need="
            except Exception as error:
                payload.left[name] = f"{type(error).__name__}: {error}; make it in the function"
            else:
                is_code = isinstance(value, (FunctionType, type, ModuleType, BuiltinFunctionType))
                if is_code and not payload.is_own(value):
                    references[name] = data
                else:
                    values[name] = value
    return values


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
