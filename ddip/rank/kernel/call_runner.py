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
from collections.abc import Callable, Collection, Iterator
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.protocol.objects import calls, definitions, pickling
from ddip.protocol.objects.calls import NAME, Answer, Call, Source, forget_sent, number_of, own
from ddip.protocol.reports import CallNotes
from ddip.rank import namespace
from ddip.rank.kernel import app_hooks

IMPORTS = "<imports of in_torchddp>"
_notes: CallNotes = {"other": [], "used": {}}
"""Of the last call."""


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
                answer = _pack(result, {*call.values, *call.references, *call.left, *call.known})
    finally:
        forget_sent()
        if call.app:
            app_hooks.release(call.app)
    if answer is not None:
        here[NAME] = answer


calls.runner = run


def _unpack(call: Call, names: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Make `names` mean what they mean to the function: ``need``, code of the notebook, imports, the notebook's values,
    and last the rank's own."""
    __tracebackhide__ = True
    imported: dict[str, Any] = {}
    exec(compile(call.imports, IMPORTS, "exec"), names, imported)
    names.update(imported)
    for module in call.modules:
        with contextlib.suppress(ImportError):  # it may be optional; else the function says what it misses
            importlib.import_module(module)
    found: dict[str, Any] = {}
    for name, data in call.references.items():
        try:
            found[name] = pickle.loads(data)
        except Exception as error:
            call.left[name] = f"{type(error).__name__}: {error}; import it there, or make it in the function"
    unpickler = pickle.Unpickler(io.BytesIO(call.packed), buffers=call.buffers)
    call.packed, call.buffers = b"", []
    found = {name: value for name, value in found.items() if name not in imported}
    names.update(found)
    for name in call.values:
        value = unpickler.load()
        if name in call.own or name not in imported:
            names[name] = found[name] = value  # code of the next may read it
    fn, args, kwargs, needed = unpickler.load()
    found.update(needed)
    here = namespace()
    _notes["other"] = [name for name, value in found.items() if name in here and _differ(here[name], value)]
    _notes["used"] = {name: why for name, why in call.left.items() if name in here and name not in imported}
    names.update(found)
    return fn, args, kwargs


def _differ(here: Any, sent: Any) -> bool:
    """Is a variable of the rank certainly not what the notebook has sent?"""
    if here is sent:
        return False
    if isinstance(here, (types.FunctionType, type)) and isinstance(sent, (types.FunctionType, type)):
        return definitions.digest(here) != definitions.digest(sent)
    if type(here) is not type(sent):
        return type(here).__qualname__ != type(sent).__qualname__
    try:
        one, other = pickling.dump(here)[0], pickling.dump(sent)[0]
        return one.joined() != other.joined() and not bool(here == sent)
    except Exception:
        return True


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


def _pack(result: Any, known: Collection[str]) -> Answer:
    told = pickling.dump_all({"": result}, lambda names: [name for name in names if name not in known], make=_Pickler)
    kind, errors = type(result).__name__, [f"{name} {error}".strip() for name, error in told.errors.items()]
    if errors:
        return Answer(kind, error="; ".join(errors))
    return Answer(kind, {name: [*map(pickle.PickleBuffer, pickled.parts)] for name, pickled in told.pickled.items()})


def forget() -> CallNotes:
    """Drop the answer, which has been fetched, or that nobody wants; return what the call met. Works beside a cell."""
    namespace().pop(NAME, None)
    notes: CallNotes = {"other": _notes["other"], "used": _notes["used"]}
    _notes["other"], _notes["used"] = [], {}
    return notes


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
