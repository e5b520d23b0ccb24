"""Pack a call of ``in_torchddp`` for the ranks: a function, its arguments, and the objects that these refer to.

On a rank, the call's variables become the globals of the notebook's functions (``rank/kernel/call_runner.py``). All
objects share one pickle memo, so that a model and an optimizer that refers to its parameters still belong together.
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

from ddip.errors import BadInput, TransferError
from ddip.output.tables.tables import size_text
from ddip.protocol.objects import calls, pickling
from ddip.protocol.rank_spec import STANDING_VARIABLES

LIMIT = 1_000_000
"""Maximum bytes of an object that is sent without being named in ``need``."""


class _TooLarge(Exception):
    """An object takes more than `LIMIT` bytes."""


class _LimitedBuffer(io.BytesIO):
    """A buffer that raises _TooLarge instead of growing beyond `LIMIT` bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > LIMIT:
            raise _TooLarge
        return super().write(data)


class _Pickler(pickling.Pickler):
    """Pickle functions and classes of the notebook with numbers that identify them in the result."""

    def __init__(
        self, file: io.BytesIO, payload: CallPayload, buffers: list[pickle.PickleBuffer] | None = None
    ) -> None:
        super().__init__(file, buffers)
        self.homes = payload.homes
        self._payload = payload
        self._limited = isinstance(file, _LimitedBuffer)

    def reducer_override(self, obj: Any) -> Any:
        if self._limited and _is_large_tensor(obj):
            raise _TooLarge  # before pickling copies it
        reduced = super().reducer_override(obj)
        if not isinstance(obj, (FunctionType, type)):
            return reduced
        if reduced is NotImplemented:  # pickled by reference: the rank imports it
            self._payload.packages.add(str(obj.__module__).partition(".")[0])
            return reduced
        return self._payload.reduce(obj, reduced)


def _is_large_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor) and obj.untyped_storage().nbytes() > LIMIT


class CallPayload:
    """The contents of one call, collected while its objects are pickled."""

    def __init__(self, namespace: Mapping[str, Any], homes: Iterable[str]) -> None:
        self.sent: list[Any] = []
        """Functions and classes of the notebook; the index identifies each when the result brings it back."""
        self.named: dict[str, Any] = {}
        """Functions and classes of `sent` that are notebook variables under their own names."""
        self.globals: dict[str, Any] = {}
        """Global variables that the functions read, by name."""
        self.packages: set[str] = set()
        """Top-level packages that the ranks import when they unpickle the call."""
        self.modules: set[str] = set()
        """Submodules that functions reach as attributes of a package."""
        self.sources: dict[str, calls.Source] = {}
        """Source lines of the functions' cells, by file name, for tracebacks on the ranks."""
        self.standing: dict[str, str] = {}
        """Variables that functions read although ddip defines them on each rank, such as ``rank``. The value is the
        name of one function that reads the variable."""
        self.has_hooks = False
        """True if a packed tensor or optimizer has hooks, which are not sent."""
        self.not_sent: dict[str, str] = {}
        """Names in `globals` that are not sent, and the reason."""
        self._numbers: dict[int, int] = {}
        self._namespace = namespace
        self.homes = frozenset(homes)

    def reduce(self, obj: FunctionType | type, reduced: Any) -> Any:
        """Return the pickle reduction of a function or class, with a number if it is the notebook's.

        Others keep `reduced`, the usual reduction. Also records the globals, modules and source lines that a function
        of the notebook needs.
        """
        if not self._is_from_notebook(obj):
            return reduced
        if isinstance(obj, FunctionType):
            self._collect_references(obj)
        if self._namespace.get(obj.__name__) is obj and obj.__name__ not in STANDING_VARIABLES:
            self.named[obj.__name__] = obj
        make, args, *rest = reduced
        return (calls.make_definition, (self._number(obj), make, args), *rest)

    def _is_from_notebook(self, obj: FunctionType | type) -> bool:
        home = pickling.home_of(obj) if isinstance(obj, FunctionType) else obj.__module__
        return home in self.homes

    def is_own(self, obj: Any) -> bool:
        """Return True if `obj` is a function or class of the notebook that has been packed."""
        return id(obj) in self._numbers

    def _number(self, obj: Any) -> int:
        number = self._numbers.setdefault(id(obj), len(self.sent))
        if number == len(self.sent):
            self.sent.append(obj)
        return number

    def _collect_references(self, function: FunctionType) -> None:
        """Record the globals and modules that the code of `function` reads, and the source lines of its cell."""
        for code in pickling.nested_codes(function.__code__):
            for name in pickling.global_names(code):
                if name in function.__globals__ and name in STANDING_VARIABLES:
                    self.standing.setdefault(name, function.__qualname__)
                elif name in function.__globals__ and not name.startswith("__"):
                    value = self.globals.setdefault(name, function.__globals__[name])
                    if isinstance(value, ModuleType):
                        self.packages.add(value.__name__.partition(".")[0])
                        self.modules |= _submodules_read(value, code)
        file = function.__code__.co_filename
        if file not in self.sources and not Path(file).exists() and (lines := linecache.getlines(file)):
            numbers: dict[str, int] = getattr(getattr(get_ipython(), "compile", None), "_filename_map", {})
            self.sources[file] = calls.Source(lines, numbers.get(file))

    def pack(self, *objects: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
        """Pickle `objects` one after the other with one memo; return the bytes and out-of-band buffers."""
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler = _Pickler(file, self, buffers)
        for obj in objects:
            pickler.dump(obj)
        self.has_hooks = pickler.has_hooks
        return file.getvalue(), buffers

    def pack_small(self, obj: Any) -> bytes:
        """Pickle `obj`; raise _TooLarge if that takes more than `LIMIT` bytes, and any error of pickling."""
        file = _LimitedBuffer()
        _Pickler(file, self).dump(obj)
        return file.getvalue()


def _submodules_read(package: ModuleType, code: CodeType) -> set[str]:
    """Return the submodules of `package` that `code` may read as attributes.

    ``import a.b`` binds only ``a``, and the code reads ``a.b``. Only names are compared, so there may be too many.
    """
    prefix = f"{package.__name__}."
    inside = [name for name in list(sys.modules) if name.startswith(prefix)]
    return {name for name in inside if set(name.removeprefix(prefix).split(".")) <= set(code.co_names)}


def packages_of(imports: str) -> set[str]:
    """Return the top-level packages that the statements `imports` name; raises BadInput."""
    try:
        tree = ast.parse(imports)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise BadInput(f"in_torchddp: imports=: {line!r} in line {error.lineno}: {error.msg}") from None
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


def pack_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needed: Mapping[str, Any],
    imports: str,
    payload: CallPayload,
) -> calls.Call:
    """Pack the call ``fn(*args, **kwargs)`` for the ranks; `payload` collects what is packed.

    `needed`: objects to send whatever their size, by name; `imports`: import statements to run before the call. Raises
    TransferError if the function, an argument or an object in `needed` cannot be pickled. Other globals that cannot be
    pickled are listed in ``payload.not_sent``; a rank gives that reason if the function misses one.
    """
    references: dict[str, bytes] = {}
    named = fn, args, dict(kwargs), dict(needed)
    try:
        payload.pack(named)  # finds the globals, which go first in the real pickle: loading a class may use them
        read = _select_globals(payload, needed, references)
        values = {**read, **payload.named}
        names = sorted(values, key=lambda name: pickling.loading_order(values[name]))
        packed, buffers = payload.pack(*(values[name] for name in names), named)
    except Exception as error:
        raise TransferError(f"in_torchddp: {_unpicklable_text(fn, args, kwargs, needed, payload, error)}") from None
    own_names = [name for name in names if payload.is_own(values[name])]
    modules = sorted(payload.modules)
    return calls.Call(
        packed, buffers, names, own_names, references, payload.not_sent, imports, modules, payload.sources
    )


def _select_globals(payload: CallPayload, needed: Collection[str], references: dict[str, bytes]) -> dict[str, Any]:
    """Return the globals to send, including those that other globals refer to.

    The others get a reason in ``payload.not_sent``. Modules, and code that ranks import, are pickled one by one into
    `references`, because one may be missing on a rank.
    """
    values: dict[str, Any] = {}
    hidden = getattr(get_ipython(), "user_ns_hidden", {})  # variables of IPython, which every rank has
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
                payload.not_sent[name] = f"it is larger than {size_text(LIMIT)}; add {name} to need="
            except Exception as error:
                payload.not_sent[name] = f"{type(error).__name__}: {error}; create it in the function"
            else:
                is_code = isinstance(value, (FunctionType, type, ModuleType, BuiltinFunctionType))
                if is_code and not payload.is_own(value):
                    references[name] = data
                else:
                    values[name] = value
    return values


def _unpicklable_text(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needed: Mapping[str, Any],
    payload: CallPayload,
    whole: Exception,
) -> str:
    """Describe which objects that the user named cannot be pickled; if none, describe `whole`."""
    arguments = {f"argument {number}": value for number, value in enumerate(args, 1)}
    named = {f"argument {name}=": value for name, value in kwargs.items()}
    found = []
    for name, value in {"the function": fn, **arguments, **named, **needed}.items():
        try:
            payload.pack(value)
        except Exception as error:
            found.append(f"{name} cannot be pickled: {type(error).__name__}: {error}")
    return "; ".join(found) or f"{type(whole).__name__}: {whole}"
