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
from collections.abc import Callable, Iterator
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.protocol import pickling
from ddip.protocol.calls import NAME, Answer, Call, Source, forget_sent, number_of, own
from ddip.rank import apps, namespace

IMPORTS = "<imports of in_torchddp>"


# -- the call


def run(call: Call) -> None:
    """Run `call` here; on rank 0 the `Answer` takes the place of the call."""
    __tracebackhide__ = True
    here = namespace()
    here.pop(NAME, None)
    _show_sources({**call.sources, IMPORTS: Source(call.imports.splitlines(True), None)})
    answer = None
    try:
        with _main(here) as names:
            fn, args, kwargs = _unpack(call, names)
            try:
                result = fn(*args, **kwargs)
            except NameError as error:
                _explain(call, error)
                raise
            if os.environ["RANK"] == "0":
                answer = _pack(result)
    finally:
        forget_sent()
        if call.app:
            apps.release(call.app)
    if answer is not None:
        here[NAME] = answer


def _unpack(call: Call, names: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    __tracebackhide__ = True
    exec(compile(call.imports, IMPORTS, "exec"), names)
    for module in call.modules:
        with contextlib.suppress(ImportError):  # it may be optional; else the function says what it misses
            importlib.import_module(module)
    for name, data in call.others.items():
        if name not in names:
            _take(call, names, name, data)
    for name, data in call.own.items():
        _take(call, names, name, data)
    unpickler = pickle.Unpickler(io.BytesIO(call.packed), buffers=call.buffers)
    call.packed, call.buffers = b"", []
    fn, args, kwargs, needed = unpickler.load()
    names.update(unpickler.load())
    names.update(needed)
    return fn, args, kwargs


def _take(call: Call, names: dict[str, Any], name: str, data: bytes) -> None:
    try:
        names[name] = pickle.loads(data)
    except Exception as error:
        call.left[name] = f"{type(error).__name__}: {error}; import it there, or make it in the function"


def _explain(call: Call, error: NameError) -> None:
    name = getattr(error, "name", None)
    if name in call.left:
        what = f"name {name!r} is not defined on the ranks; the notebook has it, but did not send it unasked"
        error.args = (f"{what}: {call.left[name]}",)


class _Pickler(pickling.Pickler):
    """Writes what the notebook has sent as its number."""

    def reducer_override(self, obj: Any) -> Any:
        number = number_of(obj)
        return super().reducer_override(obj) if number is None else (own, (number,))


def _pack(result: Any) -> Answer:
    file, kind, buffers = io.BytesIO(), type(result).__name__, list[pickle.PickleBuffer]()
    try:
        _Pickler(file, buffers).dump(result)
    except Exception as error:
        return Answer(kind, error=f"{type(error).__name__}: {error}")
    return Answer(kind, file.getvalue(), buffers)


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
