"""One call that needs no magics: a function of the notebook runs on a group, and rank 0's result comes back."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import unicodedata
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
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
from ddip.output.area import notify
from ddip.output.progress import Progress
from ddip.protocol import on_rank
from ddip.protocol.objects import calls
from ddip.protocol.reports import CallNotes

QUIET_SECONDS = 0.5
"""After which it is shown how far large objects are on their way."""
FASTAI = "fastai"
"""The app, and the package that it is for."""
T = TypeVar("T")


def in_torchddp(
    nprocs: int | None, fn: Callable[..., T], /, *args: Any, need: str = "", imports: str = "", **kwargs: Any
) -> T:
    """Call ``fn(*args, **kwargs)`` on every rank of a group of `nprocs` ranks, and return what rank 0 returns.

    It runs as a cell does: rank 0's output is shown, an error on any rank ends all of them, and so does the stop
    button. The notebook's own group (``%makedip``) is taken if it has `nprocs` ranks, and gets no new variables. Else
    a group is made for this call: one rank on each of the first GPUs, or on the CPU if there are too few.

    A global name means to `fn` there what it means here: what `need` names, a function or class of the notebook, or
    any other value of the notebook that can be pickled in 1 MB. Two things come first: ``rank``, ``world_size`` and
    ``device`` are always each rank's own, and a name that `imports` brings is that, unless it is a function or class
    of the notebook. Variables of earlier cells of the ranks come last: if one has another value than the notebook's, or
    stands in for one that was not sent, a line names it. What is shared here is shared there. What `fn` assigns to
    globals is gone when it returns.

    The result comes with its tensors on the CPU, and as an instance of the notebook's own classes. Other ranks' results
    are dropped.

    All other arguments are those of `fn`; if it has one that is called `need` or `imports`, take ``functools.partial``.

    Parameters
    ----------
    nprocs
        Number of ranks; None: the notebook's own group, or one rank on each GPU, or two on the CPU.
    need
        Names of variables, functions and classes, as the caller knows them, separated by spaces: they are sent to every
        rank, however large they are.
    imports
        Import statements for every rank. With fastai in them, or in what `fn` refers to, the app ``fastai`` is prepared
        for the call, unless the group has an app.

    Raises
    ------
    BadInput
        for a name that the notebook does not have, or statements that are none.
    TransferError
        if what was named, or the result, cannot be pickled.
    CellError
        if `fn` raised on any rank; ``by_rank`` has what.
    GroupError
        if the group did not form.
    """
    _check(nprocs, fn)
    frame = sys._getframe(1)
    imports = textwrap.dedent(imports)
    packages, needed = _packages_of(imports), _needed(need, frame)
    payload = packing.CallPayload(_globals_of(frame), {"__main__", frame.f_globals.get("__name__", "__main__")})
    call = packing.pack(fn, args, kwargs, needed, imports, payload)
    call.known = known_names()
    for name, reader in payload.standing.items():
        notify(f"{reader} reads {name}: on each rank that is ddip's variable, and the notebook's was not sent")
    if payload.has_hooks:
        notify("in_torchddp: hooks of parameters and optimizers were not sent; register them in the function")
    app = _app_for(packages | payload.packages)
    with _group(nprocs, app) as group:
        if app is not None and group.request.app is None:
            notify(f"{app} is prepared for this call; %makedip -a {app} prepares it once for all")
            call.app = apps.find(app)
        answer = _run(group, call)
    return _result(answer, fn, payload)  # type: ignore[no-any-return]


def _result(answer: calls.Answer, fn: Callable[..., Any], payload: packing.CallPayload) -> Any:
    what = f"in_torchddp: the {answer.kind} that {getattr(fn, '__name__', 'the function')} returned on rank 0"
    if answer.error:
        hint = "return what can be, such as learn.model.state_dict()"
        raise TransferError(f"{what} cannot be pickled: {answer.error}; {hint}")
    try:
        return calls.unpack(answer, payload.sent)
    except Exception as error:
        raise TransferError(f"{what} cannot be unpickled in the notebook: {type(error).__name__}: {error}") from None


# -- what was typed


def _check(nprocs: Any, fn: Any) -> None:
    if type(get_ipython()).__module__.startswith("ddip.rank."):
        raise BadInput("in_torchddp: this is a rank; call it in the notebook, with %autodip off or with %%dip local")
    if nprocs is not None and (not isinstance(nprocs, Integral) or isinstance(nprocs, bool) or nprocs < 1):
        raise BadInput(f"in_torchddp({nprocs!r}, ...): the first argument is the number of ranks, such as 2")
    if not callable(fn):
        raise BadInput(f"in_torchddp({nprocs}, {fn!r}, ...): the second argument is the function to call")


def _globals_of(frame: FrameType) -> ChainMap[str, Any]:
    """Those of the code in `frame`, and after these the notebook's, for a caller in a module."""
    return ChainMap(frame.f_globals, getattr(get_ipython(), "user_ns", {}))


def _needed(need: str, frame: FrameType) -> dict[str, Any]:
    names, found = unicodedata.normalize("NFKC", need).split(), _globals_of(frame).new_child(dict(frame.f_locals))
    check_own(names, f"in_torchddp: need={need!r}:")
    missing = [name for name in names if name not in found]
    if missing:
        what = f"the notebook has no {', '.join(missing)}"
        raise BadInput(f"in_torchddp: need={need!r}: {what}; type names of variables, separated by spaces")
    return {name: found[name] for name in names}


def _packages_of(imports: str) -> set[str]:
    try:
        return packing.packages_of(imports)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise BadInput(f"in_torchddp: imports=: {line!r} in line {error.lineno}: {error.msg}") from None


def _app_for(packages: set[str]) -> str | None:
    """The app that a call needs which uses `packages`."""
    if FASTAI not in packages:
        return None
    try:
        apps.find(FASTAI)
    except BadInput:
        return None
    return FASTAI


# -- the group


@contextlib.contextmanager
def _group(nprocs: int | None, app: str | None) -> Iterator[Group]:
    """The notebook's own group if it has `nprocs` ranks, else one for this call."""
    group = session.current_group()
    if group is not None and nprocs in (None, group.world_size):
        try:
            yield group
        finally:
            if group.alive:
                notes = group.ranks.call_on_control_channel(group.ranks.live, on_rank.forget_call())
                _notify_notes({rank: note for rank, note in notes.items() if note is not None})
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


def _notify_notes(notes: Mapping[int, CallNotes]) -> None:
    """Say which variables the notebook and its ranks do not have alike, in one line each."""
    for name in dict.fromkeys(name for note in notes.values() for name in note["other"]):
        ranks = ranks_text([rank for rank, note in notes.items() if name in note["other"]])
        notify(f"in_torchddp used the notebook's {name}; {ranks} had another value")
    for name, why in {name: why for note in notes.values() for name, why in note["used"].items()}.items():
        ranks = ranks_text([rank for rank, note in notes.items() if name in note["used"]])
        notify(f"in_torchddp used {name} of {ranks}, and not the notebook's: {why}")


def _new_group(nprocs: int | None, app: str | None, progress: Progress) -> Group:
    settings, available = session.settings(), len(gpu_names())
    if nprocs is None or not available:
        return Group(nprocs, app=app, progress=progress, **settings)
    if nprocs <= available:
        return Group(gpus=range(nprocs), app=app, progress=progress, **settings)
    have = "is 1 GPU" if available == 1 else f"are {available} GPUs"
    notify(f"there {have} for {nprocs} ranks, so they are on the CPU")
    return Group(nprocs, app=app, progress=progress, **settings)


def _run(group: Group, call: calls.Call) -> calls.Answer:
    """Run the call on every rank; nothing of it is left there."""
    progress = Progress(after=QUIET_SECONDS)
    try:
        group.push({calls.NAME: call}, progress=progress)
        progress.end("")
        if call.app:  # before the cell begins, of which an app may want to know
            group.lifecycle.parts.app.ask(range(group.world_size), on_rank.prepare_app(call.app))
        group.run(f"{calls.NAME}()")
        answer: calls.Answer = group.pull([calls.NAME], progress=progress)[calls.NAME]
        return answer
    finally:
        progress.end("")
