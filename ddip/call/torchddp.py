"""``in_torchddp``: run a function of the notebook on a group without magics, and return the result of rank 0."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import unicodedata
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral
from types import FrameType
from typing import Any, TypeVar

from IPython.core.getipython import get_ipython

from ddip import apps
from ddip.call import packing
from ddip.cluster.devices import gpu_names
from ddip.errors import BadInput, TransferError, ranks_text
from ddip.group import session
from ddip.group.group import Group
from ddip.group.objects.transfer import check_own, known_names
from ddip.output.area import inform, notify
from ddip.output.progress import Progress
from ddip.protocol import on_rank
from ddip.protocol.objects import calls
from ddip.protocol.reports import CallNotes

QUIET_SECONDS = 0.5
"""Seconds after which a transfer of large objects shows its progress."""
FASTAI = "fastai"
"""Name of the app and of its package."""
T = TypeVar("T")


def in_torchddp(
    nprocs: int | None,
    fn: Callable[..., T],
    /,
    *args: Any,
    need: str | Iterable[str] = "",
    imports: str = "",
    **kwargs: Any,
) -> T:
    """Call ``fn(*args, **kwargs)`` on every rank of a group, and return the result of rank 0.

    The call runs like a cell: ddip shows the output of rank 0, and an error on any rank or the stop button ends the
    call on all ranks. If the notebook's group (``%makedip``) has `nprocs` ranks, ddip uses it, and keeps its variables
    unchanged. Otherwise ddip starts a group for this call, with one rank on each of the first `nprocs` GPUs, or on the
    CPU if the machine has fewer GPUs.

    On a rank, `fn` finds the notebook's values of the global names that it uses. ddip sends the objects in `need`, the
    functions and classes of the notebook, and all other values whose pickle takes at most 1 MB. There are two
    exceptions: ``rank``, ``world_size`` and ``device`` are always the rank's own, and a name that `imports` defines is
    the imported object, unless it is a function or class of the notebook. If a value was not sent, `fn` uses the rank's
    variable of that name from earlier cells, and ddip prints a notice. ddip also prints a notice if a rank had another
    value for a sent variable. Objects that are shared in the notebook are shared on the rank. Assignments of `fn` to
    globals are discarded when it returns.

    Objects in the result are instances of the notebook's classes. The results of other ranks are discarded.

    Parameters
    ----------
    nprocs
        Number of ranks. None means all ranks of the notebook's group; without a group, one rank per GPU, or two ranks
        on a machine without GPUs.
    fn
        Function to call on every rank.
    args, kwargs
        Arguments of `fn`. If `fn` has a parameter named `need` or `imports`, bind it with ``functools.partial``.
    need
        Names of variables, functions and classes in the caller's scope: a list, or a string with spaces between them.
        They are sent to every rank, whatever their size.
    imports
        Import statements to run on every rank before the call. If these or `fn` refer to fastai, ddip prepares the app
        ``fastai`` for the call, unless the group has an app.

    Returns
    -------
    object
        Result of `fn` on rank 0, with tensors on the CPU.

    Raises
    ------
    BadInput
        If an argument is invalid, the caller has no variable of a name in `need`, or this process is a rank.
    TransferError
        If the function, an argument, an object in `need`, or the result cannot be pickled.
    CellError
        If `fn` raised an exception on any rank; ``by_rank`` holds the errors.
    CellInterrupted, RequestInterrupted
        If the user pressed the stop button.
    GroupError
        If the group did not form, or a rank of the notebook's group is lost or busy.
    """
    _check_arguments(nprocs, fn)
    frame = sys._getframe(1)
    imports = textwrap.dedent(imports)
    packages, needed = packing.packages_of(imports), _find_needed(need, frame)
    payload = packing.CallPayload(_globals_of(frame), {"__main__", frame.f_globals.get("__name__", "__main__")})
    call = packing.pack_call(fn, args, kwargs, needed, imports, payload)
    call.known = known_names().split()
    for name, reader in payload.standing.items():
        notify(f"{reader} reads {name}: ddip sets it on each rank, so the notebook's value was not sent")
    if payload.has_hooks:
        notify("in_torchddp: hooks of parameters and optimizers were not sent; register them in the function")
    app = _app_for(packages | payload.packages)
    with _open_group(nprocs, app) as group:
        if app is not None and group.request.app is None:
            inform(f"{app} is prepared for this call only; %makedip -a {app} prepares it for all cells and calls")
            call.app = apps.find_module(app)
        answer = _run_call(group, call)
    return _unpack_result(answer, fn, payload)  # type: ignore[no-any-return]


def _unpack_result(answer: calls.Answer, fn: Callable[..., Any], payload: packing.CallPayload) -> Any:
    what = f"in_torchddp: the {answer.kind} that {getattr(fn, '__name__', 'the function')} returned on rank 0"
    if answer.error:
        hint = "return an object that can be pickled, such as learn.model.state_dict()"
        raise TransferError(f"{what} cannot be pickled: {answer.error}; {hint}")
    try:
        return calls.unpack_answer(answer, payload.sent)
    except Exception as error:
        raise TransferError(f"{what} cannot be unpickled in the notebook: {type(error).__name__}: {error}") from None


# -- arguments


def _check_arguments(nprocs: Any, fn: Any) -> None:
    if type(get_ipython()).__module__.startswith("ddip.rank."):
        raise BadInput("in_torchddp: this is a rank; call it in the notebook, with %autodip off or with %%dip local")
    if nprocs is not None and (not isinstance(nprocs, Integral) or isinstance(nprocs, bool) or nprocs < 1):
        raise BadInput(f"in_torchddp({nprocs!r}, ...): the first argument is the number of ranks, such as 2")
    if not callable(fn):
        raise BadInput(f"in_torchddp({nprocs}, {fn!r}, ...): the second argument is the function to call")


def _globals_of(frame: FrameType) -> ChainMap[str, Any]:
    """Return the globals of the code in `frame`, then the notebook's variables, for a caller in a module."""
    return ChainMap(frame.f_globals, getattr(get_ipython(), "user_ns", {}))


def _find_needed(need: str | Iterable[str], frame: FrameType) -> dict[str, Any]:
    given = [need] if isinstance(need, str) or not isinstance(need, Iterable) else [*need]
    if not all(isinstance(name, str) for name in given):
        raise BadInput(f"in_torchddp: need={need!r}: type the names of the variables, such as need='model opt'")
    names = unicodedata.normalize("NFKC", " ".join(given)).split()
    found = _globals_of(frame).new_child(dict(frame.f_locals))
    check_own(names, f"in_torchddp: need={need!r}:")
    missing = [name for name in names if name not in found]
    if missing:
        what = f"the notebook has no {', '.join(missing)}"
        raise BadInput(f"in_torchddp: need={need!r}: {what}; type the names of variables")
    return {name: found[name] for name in names}


def _app_for(packages: set[str]) -> str | None:
    """Return the app to prepare for a call that uses `packages`; None if no app is needed."""
    if FASTAI not in packages:
        return None
    try:
        apps.find_module(FASTAI)
    except BadInput:
        return None
    return FASTAI


# -- the group


@contextlib.contextmanager
def _open_group(nprocs: int | None, app: str | None) -> Iterator[Group]:
    """Yield the notebook's group if it has `nprocs` ranks, else a group that ends with this call."""
    group = session.current_group()
    if group is not None and nprocs in (None, group.world_size):
        try:
            yield group
        finally:
            if group.alive:
                notes = group.ranks.call_on_control_channel(group.ranks.live, on_rank.drop_call_answer())
                _notify_differences({rank: note for rank, note in notes.items() if note is not None})
        return
    progress = Progress()
    try:
        group = _new_group(nprocs, app, progress)
    except BaseException:
        progress.end("")
        raise
    with group:
        progress.end(f"{group.describe()}, {group.seconds:.1f} s")
        yield group


def _notify_differences(notes: Mapping[int, CallNotes]) -> None:
    """Print a line for each variable that differed on ranks, or was taken from ranks."""
    for name in dict.fromkeys(name for note in notes.values() for name in note["other"]):
        ranks = ranks_text([rank for rank, note in notes.items() if name in note["other"]])
        notify(f"in_torchddp used the notebook's {name}; {ranks} had another value")
    for name, why in {name: why for note in notes.values() for name, why in note["used"].items()}.items():
        ranks = ranks_text([rank for rank, note in notes.items() if name in note["used"]])
        notify(f"in_torchddp used {name} of {ranks}, not the notebook's: {why}")


def _new_group(nprocs: int | None, app: str | None, progress: Progress) -> Group:
    settings, available = session.user_settings(), len(gpu_names())
    if nprocs is None or not available:
        return Group(nprocs, app=app, progress=progress, **settings)
    if nprocs <= available:
        return Group(gpus=range(nprocs), app=app, progress=progress, **settings)
    has = "only 1 GPU" if available == 1 else f"only {available} GPUs"
    notify(f"the {nprocs} ranks run on the CPU: this machine has {has}")
    return Group(nprocs, app=app, progress=progress, **settings)


def _run_call(group: Group, call: calls.Call) -> calls.Answer:
    """Run the call on every rank and return the answer of rank 0."""
    progress = Progress(after=QUIET_SECONDS)
    try:
        group.push({calls.NAME: call}, progress=progress)
        progress.end("")
        if call.app:  # before the cell begins: the app's hooks run around cells
            group.lifecycle.parts.app.ask(range(group.world_size), on_rank.prepare_app(call.app))
        group.run(f"{calls.NAME}()")
        answer: calls.Answer = group.pull([calls.NAME], progress=progress)[calls.NAME]
        return answer
    finally:
        progress.end("")
