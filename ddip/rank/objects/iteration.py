"""The training iteration that a failed cell has broken off: noticed on the rank, ended before the next cell.

    cell       backward passes and optimizer steps are counted, and autograd's nodes, of which a forward pass makes some
    report     goes with the cell's reply: has it ended within an iteration, how many steps has it taken?
    facts      before the next cell, if a cell that trained has failed: the same of what must be looked for
    reset      all ranks alike: wrappers and shards are ready for a forward pass, gradients are cleared if the notebook
               has found that a rank was within an iteration, or that ranks were in different ones

A forward pass of any module makes autograd nodes, and torch counts them: no hook is needed on the modules.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddip.protocol.reports import IterationFacts, IterationReport
from ddip.rank import namespace
from ddip.rank.objects import changes, live_objects, sharded_training, wrappers
from ddip.rank.objects.checksum import checksum

SAMPLE = 64
"""How many numbers of each gradient are compared with those of other ranks."""
MOST_ITEMS = 100
"""Of a list or a dict, among which models are looked for to name them."""

_count_nodes: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
"""How many autograd nodes this thread has made."""


class _Cell:
    """Counts of the current cell on the main thread, from its beginning."""

    backwards = 0
    steps = 0
    is_within_call = False
    """Has a backward pass, or an optimizer's step, begun and not ended?"""
    threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    """Which threads but the main one have done these."""
    nodes = 0
    """How many autograd nodes there were when the last of these ended, or the cell began."""
    gradients: Mapping[int, tuple[weakref.ref[torch.Tensor], int]] = {}
    """The gradients that parameters of optimizers had when the cell began, by the parameters' ids, and how often each
    had been written to. A gradient that is made later may get the id of one that is gone."""


def watch() -> None:
    """Once, before the first cell: count backward passes and steps.

    torch has no hook for the end of a backward pass, and its exceptions may be caught by the cell.
    """
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is not None:
        torch.autograd._engine_run_backward = _counting(run)  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(_begin_step)
    register_optimizer_step_post_hook(_end_step)


def _counting(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad"):  # torch.autograd.grad
            return run(*args, **kwargs)
        try:
            result = run(*args, **kwargs)
        except BaseException:
            _note_thread()
            _Cell.is_within_call = True
            raise
        _Cell.backwards += 1
        _end_call()
        return result

    return wrapper


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _note_thread()
        _Cell.is_within_call = True


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _Cell.steps += 1
        _end_call()


def _end_call() -> None:
    _Cell.is_within_call = False
    if _note_thread():  # nodes are counted per thread
        _Cell.nodes = _count_nodes()


def _note_thread() -> bool:
    """Note that this thread trains; return whether it is the main one.

    One that Python has not started is autograd's: it does nothing outside of a backward pass.
    """
    ident = threading.get_ident()
    if ident == threading.main_thread().ident:
        return True
    known = [thread for thread in threading.enumerate() if thread.ident == ident]
    _Cell.threads.update(thread for thread in known if not isinstance(thread, threading._DummyThread))
    return False


def begin_cell() -> None:
    """Count from zero."""
    _Cell.backwards = _Cell.steps = 0
    _Cell.threads.clear()
    _Cell.is_within_call = False
    _Cell.nodes = _count_nodes()
    groups = [group for one in list(changes.optimizers) for group in one.__dict__.get("param_groups", ())]
    _Cell.gradients = {}
    with contextlib.suppress(RuntimeError):  # of a gradient made in inference mode
        _Cell.gradients = {
            id(parameter): (weakref.ref(gradient), gradient._version)
            for group in groups
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        }


def report() -> IterationReport:
    """Return where the cell that has just ended was in its training; unknown if a thread trains that outlives it."""
    if any(thread.is_alive() for thread in _Cell.threads):
        return {"forward": False, "unfinished": False, "backwards": 0, "steps": 0, "in_thread": True}
    return {
        "forward": _count_nodes() > _Cell.nodes,
        "unfinished": _Cell.is_within_call,
        "backwards": _Cell.backwards,
        "steps": _Cell.steps,
        "in_thread": False,
    }


# -- before the next cell


def facts() -> IterationFacts:
    """What only a look at the objects of this rank can tell of a cell that trained and has failed."""
    things = live_objects.find_all()
    unfinished, hidden = sharded_training.find_unfinished(things)
    gradients = {}
    for number, parameters in wrappers.averaged().items():
        there = [parameter.grad is not None for parameter in parameters]
        samples = [_sample(parameter.grad) for parameter in parameters if parameter.grad is not None]
        devices = dict.fromkeys(sample.device for sample in samples)
        parts = [torch.cat([sample for sample in samples if sample.device == device]) for device in devices]
        gradients[number] = [*there, *checksum(parts)]
    return {
        "unfinished": unfinished or bool(_unscaled(things)),
        "gradients": gradients,
        "models": [
            name
            for name, parameters in _models(things).items()
            if any(id(one) in hidden or _is_changed(one) for one in parameters)
        ],
    }


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Some numbers of `gradient`, spread over all of it."""
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    flat = (torch.view_as_real(values) if values.is_complex() else values).flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)].float()


def _is_changed(parameter: torch.Tensor) -> bool:
    """Return whether the cell has changed, made or dropped the gradient of `parameter`."""
    gradient, before = parameter.grad, _Cell.gradients.get(id(parameter))
    if gradient is None:
        return before is not None
    return before is None or gradient.is_inference() or before[0]() is not gradient or before[1] != gradient._version


def reset(broken: bool, models: list[str], is_same_group: bool) -> list[str]:
    """Make everything on this rank ready for a forward pass; returns the names of models whose gradients were cleared.

    If the cell has not `broken` an iteration, gradients stay; else those of `models` go, or all if there are none. In a
    new group the wrappers are new already.
    """
    things = live_objects.find_all()
    wrappers.reset(live_objects.of_kind(things, DistributedDataParallel), broken, is_same_group)
    if is_same_group:  # else shards are lost
        sharded_training.reset(things, broken)
    cleared = _clear_gradients(things, models) if broken else []
    begin_cell()
    return cleared


def _clear_gradients(things: Sequence[Any], models: list[str]) -> list[str]:
    for states in _unscaled(things):
        states.clear()
    for accelerator in live_objects.of_class(things, *live_objects.ACCELERATOR):
        accelerator.step = 0  # it counts micro-batches
    chosen = {name: parameters for name, parameters in _models(things).items() if name in models or not models}
    known = {id(one) for parameters in chosen.values() for one in parameters}
    of_shards = sharded_training.clear_gradients(things, known)
    cleared = []
    for name, parameters in chosen.items():
        if any(parameter.grad is not None or id(parameter) in of_shards for parameter in parameters):
            cleared.append(name)
        for parameter in parameters:
            parameter.grad = None
    return cleared


def _unscaled(things: Sequence[Any]) -> list[dict[int, Any]]:
    """What gradient scalers keep of optimizers between ``unscale_`` and ``update``."""
    scalers = live_objects.of_kind(things, torch.amp.GradScaler)
    states: list[dict[int, Any]] = [scaler.__dict__.get("_per_optimizer_states", {}) for scaler in scalers]
    ready = torch.amp.grad_scaler.OptState.READY
    return [known for known in states if any(one["stage"] is not ready for one in known.values())]


# -- models


def _models(things: Sequence[Any]) -> dict[str, list[torch.Tensor]]:
    """All parameters of this process by the variable that holds their model: of several, the one that has most of them;
    empty for those that no variable holds."""
    left = {id(one): one for one in _parameters(things)}
    known = [(name, live_objects.parameters_in(module)) for name, module in _named_modules()]
    found = {}
    for name, parameters in sorted(known, key=lambda model: -len(model[1])):
        found[name] = [left.pop(id(one)) for one in parameters if id(one) in left]
    return {**found, "": list(left.values())}


def _parameters(things: Sequence[Any]) -> Iterator[torch.Tensor]:
    for module in live_objects.of_kind(things, torch.nn.Module):
        yield from (one for one in module.__dict__.get("_parameters", {}).values() if one is not None)
    for optimizer in live_objects.of_kind(things, torch.optim.Optimizer):
        for group in optimizer.__dict__.get("param_groups", ()):
            yield from group["params"]


def _named_modules() -> Iterator[tuple[str, torch.nn.Module]]:
    """Models that variables hold, themselves or in an attribute or an item: ``net``, ``learn.model``."""
    for name, value in list(namespace().items()):
        if name.startswith("_") or isinstance(value, type | ModuleType):
            continue
        if issubclass(type(value), torch.nn.Module):
            yield name, value
        elif type(value) in (list, tuple):
            yield from _modules_in((f"{name}[{place}]", one) for place, one in enumerate(value[:MOST_ITEMS]))
        elif type(value) is dict:
            items = itertools.islice(value.items(), MOST_ITEMS)
            yield from _modules_in((f"{name}[{key!r}]", one) for key, one in items if type(key) in (str, int))
        else:
            with contextlib.suppress(AttributeError):
                attributes = object.__getattribute__(value, "__dict__")
                yield from _modules_in((f"{name}.{key}", one) for key, one in list(attributes.items()))


def _modules_in(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, value) for name, value in values if issubclass(type(value), torch.nn.Module))
