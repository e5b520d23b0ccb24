"""Run a call of ``in_torchddp`` on this rank.

    notebook  --Call-->  every rank: a cell with ``_in_torchddp()`` in it  --Answer of rank 0-->  notebook

The call runs in a temporary ``__main__`` module, which begins as a copy of the rank's variables. Names that it imports
or assigns there disappear when it returns, and the rank's variables are unchanged.
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

from ddip.protocol.objects import calls, definitions, pickling
from ddip.protocol.objects.calls import NAME, Answer, Call, Source, forget_sent, notebook_definition, number_of
from ddip.protocol.reports import CallNotes
from ddip.rank import user_namespace
from ddip.rank.kernel import app_hooks
from ddip.rank.runtime import stacks

IMPORTS = "<imports of in_torchddp>"
_notes: CallNotes = {"other": [], "used": {}}
"""Notes on the last call, until `drop_call_answer` returns them."""


# -- the call


def run_call(call: Call) -> None:
    """Run `call`; on rank 0, store the `Answer` in the variable that held the call."""
    __tracebackhide__ = True
    variables = user_namespace()
    variables.pop(NAME, None)
    _register_sources({**call.sources, IMPORTS: Source(call.imports.splitlines(True), None)})
    answer = None
    try:
        with _temporary_main(variables) as names:
            fn, args, kwargs = _unpack_call(call, names)
            try:
                result = fn(*args, **kwargs)
            except NameError as error:
                _explain_name_error(call, error)
                raise
            if os.environ["RANK"] == "0":
                answer = _pack_result(result, {*call.values, *call.references, *call.left, *call.known})
    finally:
        forget_sent()
        if call.app:
            app_hooks.release_app(call.app)
    if answer is not None:
        variables[NAME] = answer


calls.runner = run_call


def _unpack_call(call: Call, names: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Add the names that `call` carries to `names`; return its function, arguments and keyword arguments.

    Names of ``need`` and of the notebook's own functions win over imports, imports over other values of the notebook,
    and these over the rank's variables, which are already in `names`.
    """
    __tracebackhide__ = True
    imported: dict[str, Any] = {}
    exec(compile(call.imports, IMPORTS, "exec"), names, imported)
    names.update(imported)
    for module in call.modules:
        with contextlib.suppress(ImportError):  # may be optional; otherwise the function raises its own error
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
            names[name] = found[name] = value  # unpickling the next value may run code that reads this name
    fn, args, kwargs, needed = unpickler.load()
    found.update(needed)
    local = user_namespace()
    _notes["other"] = [name for name, value in found.items() if name in local and _is_different(local[name], value)]
    _notes["used"] = {name: why for name, why in call.left.items() if name in local and name not in imported}
    names.update(found)
    return fn, args, kwargs


def _is_different(local: Any, sent: Any) -> bool:
    """Return whether `local`, this rank's value of a variable, differs from `sent`, the notebook's.

    Functions and classes are compared by their definitions, other values by their pickles, then with ``==``. Returns
    True if they cannot be compared.
    """
    if local is sent:
        return False
    if isinstance(local, (types.FunctionType, type)) and isinstance(sent, (types.FunctionType, type)):
        return definitions.compute_digest(local) != definitions.compute_digest(sent)
    if type(local) is not type(sent):
        return type(local).__qualname__ != type(sent).__qualname__
    try:
        local_pickle, sent_pickle = pickling.pickle_value(local)[0], pickling.pickle_value(sent)[0]
        return local_pickle.joined() != sent_pickle.joined() and not bool(local == sent)
    except Exception:
        return True


def _explain_name_error(call: Call, error: NameError) -> None:
    """Say in `error` why the notebook did not send the missing name, if the notebook has it."""
    name = getattr(error, "name", None)
    if name in call.left:
        what = f"name {name!r} is not defined on the ranks; the notebook has it, but did not send it"
        error.args = (f"{what}: {call.left[name]}",)


class _Pickler(pickling.Pickler):
    """A pickler that replaces functions and classes of the notebook with the notebook's numbers for them."""

    def reducer_override(self, obj: Any) -> Any:
        number = number_of(obj)
        return super().reducer_override(obj) if number is None else (notebook_definition, (number,))


def _pack_result(result: Any, known: Collection[str]) -> Answer:
    """Pickle `result` with the variables that its functions read, except for those in `known`."""
    dumped = pickling.dump_all({"": result}, lambda names: [name for name in names if name not in known], make=_Pickler)
    kind, errors = type(result).__name__, [f"{name} {error}".strip() for name, error in dumped.errors.items()]
    if errors:
        return Answer(kind, error="; ".join(errors))
    return Answer(kind, {name: [*map(pickle.PickleBuffer, pickled.parts)] for name, pickled in dumped.pickled.items()})


def drop_call_answer() -> CallNotes:
    """Drop the answer of the last call and return the notes on that call; may run while a cell runs."""
    user_namespace().pop(NAME, None)
    notes: CallNotes = {"other": _notes["other"], "used": _notes["used"]}
    _notes["other"], _notes["used"] = [], {}
    return notes


# -- the call's surroundings


@contextlib.contextmanager
def _temporary_main(variables: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Install a temporary ``__main__`` with a copy of `variables`, in which pickle finds the call's names.

    Yields the variables of that module.
    """
    former = sys.modules["__main__"]
    module = types.ModuleType("__main__")
    vars(module).update(variables)
    sys.modules["__main__"] = module
    try:
        yield vars(module)
    finally:
        sys.modules["__main__"] = former


def _register_sources(sources: dict[str, Source]) -> None:
    """Register source lines by file name, so that tracebacks show the notebook's lines and cell numbers."""
    for name, source in sources.items():
        linecache.cache[name] = (sum(map(len, source.lines)), None, source.lines, name)
        if source.number is not None:
            stacks.cell_files[name] = source.number
