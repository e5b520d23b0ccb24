"""Detect a training iteration that a failed cell left unfinished, and reset it before the next cell.

    begin_cell        count backward passes, optimizer steps, and autograd nodes, which any forward pass creates
    report_position   goes with the cell's reply: is an iteration unfinished, and how many steps did the cell take?
    iteration_facts   before the next cell, if a training cell has failed: details for which objects must be searched
    reset_iteration   on all ranks: make wrappers and shards ready for a forward pass, and clear gradients if the
                      notebook has found a rank within an iteration, or ranks in different iterations

A forward pass of any module creates autograd nodes, and torch counts them, so the modules need no hook.
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

from ddip.protocol.reports import IterationFacts, IterationReport, IterationReset
from ddip.rank import user_namespace
from ddip.rank.objects import changes, live_objects, reducers, sharded_training, wrappers
from ddip.rank.objects.checksum import tensor_checksums

SAMPLE = 64
"""Elements of each gradient that are compared with those of other ranks."""
MOST_ITEMS = 100
"""Items of a list or dict that are searched for models, to name them."""

_count_nodes: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
"""Return how many autograd nodes the calling thread has created."""

steps_taken = 0
"""Steps that optimizers have finished in this process."""


class _Cell:
    """Counts of the current cell on the main thread, since the cell began."""

    backwards = 0
    steps = 0
    is_within_call = False
    """True while a backward pass or an optimizer step has begun and not ended."""
    open_steps: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    """Optimizers whose last step has begun and not ended; a closure may finish backward passes within the step."""
    threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    """Threads other than the main thread that ran a backward pass or an optimizer step."""
    has_updated_part = False
    """True if the last backward pass has failed after steps of optimizers that hooks of the parameters make in it."""
    nodes = 0
    """Autograd nodes when the last backward pass or step ended, or else when the cell began."""
    gradients: Mapping[int, tuple[weakref.ref[torch.Tensor], int]] = {}
    """Gradients of the optimizers' parameters when the cell began, each with its version, by the parameters' ids.

    The references are weak and not ids, because a later gradient may get the id of a freed one."""


def watch_training() -> None:
    """Begin to count backward passes and optimizer steps.

    Call this once per process, before the first cell. It wraps a private function, because torch has no hook for the
    end of a backward pass, and the cell may catch the exception of a failed one.
    """
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is not None:
        torch.autograd._engine_run_backward = _wrap_backward(run)  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(_begin_step)
    register_optimizer_step_post_hook(_end_step)


def _wrap_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # the debugger omits this frame
        if not kwargs.get("accumulate_grad"):  # torch.autograd.grad
            return run(*args, **kwargs)
        steps = _Cell.steps
        try:
            result = run(*args, **kwargs)
        except BaseException:
            _record_thread()
            _Cell.is_within_call = True
            _Cell.has_updated_part = _Cell.steps > steps
            raise
        _Cell.backwards += 1
        _finish_call()
        return result

    return wrapper


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _record_thread()
        _Cell.is_within_call = True
        _Cell.open_steps.add(optimizer)
        changes.note_step(optimizer, has_ended=False)


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global steps_taken
    if not torch.compiler.is_compiling():  # torch.compile would compile the increments
        steps_taken += 1
        _Cell.steps += 1
        _Cell.open_steps.discard(optimizer)
        changes.note_step(optimizer, has_ended=True)
        _finish_call()


def _finish_call() -> None:
    _Cell.is_within_call = _Cell.has_updated_part = False
    if _record_thread():  # nodes are counted per thread
        _Cell.nodes = _count_nodes()


def _record_thread() -> bool:
    """Record that the calling thread trains; return whether it is the main thread.

    Threads that Python did not start belong to autograd and are not recorded: they do nothing outside a backward pass.
    """
    ident = threading.get_ident()
    if ident == threading.main_thread().ident:
        return True
    matching = [thread for thread in threading.enumerate() if thread.ident == ident]
    _Cell.threads.update(thread for thread in matching if not isinstance(thread, threading._DummyThread))
    return False


def begin_cell() -> None:
    """Forget the last cell's backward passes and steps; note the graph nodes and gradients that exist already."""
    _Cell.backwards = _Cell.steps = 0
    _Cell.threads.clear()
    _Cell.is_within_call = _Cell.has_updated_part = False
    _Cell.open_steps.clear()
    _Cell.nodes = _count_nodes()
    groups = [group for optimizer in list(changes.optimizers) for group in optimizer.__dict__.get("param_groups", ())]
    _Cell.gradients = {}
    with contextlib.suppress(RuntimeError):  # a gradient created in inference mode has no version
        _Cell.gradients = {
            id(parameter): (weakref.ref(gradient), gradient._version)
            for group in groups
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        }


def report_position() -> IterationReport:
    """Return where in a training iteration the cell has ended.

    If a thread that trains outlives the cell, the position is unknown and only ``in_thread`` is set.
    """
    if any(thread.is_alive() for thread in _Cell.threads):
        return {"forward": False, "unfinished": False, "in_step": False, "backwards": 0, "steps": 0, "in_thread": True}
    return {
        "forward": _count_nodes() > _Cell.nodes,
        "unfinished": _Cell.is_within_call,
        "in_step": bool(_Cell.open_steps) or _Cell.has_updated_part,
        "backwards": _Cell.backwards,
        "steps": _Cell.steps,
        "in_thread": False,
    }


# -- before the next cell


def iteration_facts() -> IterationFacts:
    """Inspect this rank's training objects after a failed cell that trained; change nothing.

    Returns whether an iteration is unfinished, per DDP wrapper which gradients exist and their checksums, and the
    variables of models whose gradients the cell changed.
    """
    things = live_objects.find_all()
    unfinished, hidden = sharded_training.find_unfinished(things)
    gradients = {}
    for number, parameters in wrappers.averaged_parameters().items():
        exists = [parameter.grad is not None for parameter in parameters]
        samples = [_sample_gradient(parameter.grad) for parameter in parameters if parameter.grad is not None]
        devices = dict.fromkeys(sample.device for sample in samples)
        parts = [torch.cat([sample for sample in samples if sample.device == device]) for device in devices]
        gradients[number] = [*exists, *tensor_checksums(parts)]
    return {
        "unfinished": unfinished or bool(_unscaled_states(things)),
        "gradients": gradients,
        "models": [
            name
            for name, parameters in _parameters_by_model(things).items()
            if any(id(parameter) in hidden or _is_changed(parameter) for parameter in parameters)
        ],
    }


def _sample_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return at least `SAMPLE` evenly spaced elements of `gradient` as floats, or all if it has fewer."""
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    flat = (torch.view_as_real(values) if values.is_complex() else values).flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)].float()


def _is_changed(parameter: torch.Tensor) -> bool:
    """Return whether the cell has created, changed or dropped the gradient of `parameter`, or may have.

    A gradient of which `begin_cell` recorded no version counts as changed, such as one that no optimizer uses.
    """
    gradient, before = parameter.grad, _Cell.gradients.get(id(parameter))
    if gradient is None:
        return before is not None
    return before is None or gradient.is_inference() or before[0]() is not gradient or before[1] != gradient._version


def reset_iteration(broken: bool, models: list[str], is_same_group: bool) -> IterationReset:
    """Make this rank's training objects ready for a forward pass.

    Returns the variables of the models whose gradients were cleared, and of those with communication hooks of the user
    that may keep values of a broken iteration. If the failed cell has `broken` an iteration, the gradients of `models`
    are cleared; otherwise gradients stay. After a rebuild (not `is_same_group`), wrappers have new reducers already.
    """
    things = live_objects.find_all()
    ddp = wrappers.reset_reducers(live_objects.of_kind(things, DistributedDataParallel), broken, is_same_group)
    if is_same_group:  # after a rebuild, shards are lost
        sharded_training.reset_models(things, broken)
    reset: IterationReset = {"cleared": [], "hooks": []}
    if broken:
        selected = {name: found for name, found in _parameters_by_model(things).items() if name in models}
        reset["cleared"] = _clear_gradients(things, selected)
        hooked = {id(part) for one in ddp if reducers.keeps_own_state(one) for part in one.parameters()}
        reset["hooks"] = [name for name, parameters in selected.items() if hooked.intersection(map(id, parameters))]
    begin_cell()
    return reset


def _clear_gradients(things: Sequence[Any], selected: Mapping[str, Sequence[torch.Tensor]]) -> list[str]:
    """Clear the gradients of `selected` parameters by model; return the models that had any."""
    for states in _unscaled_states(things):
        states.clear()
    for accelerator in live_objects.of_class(things, *live_objects.ACCELERATOR):
        accelerator.step = 0  # its count of micro-batches
    parameter_ids = {id(parameter) for parameters in selected.values() for parameter in parameters}
    with_hidden_gradients = sharded_training.clear_gradients(things, parameter_ids)
    cleared = []
    for name, parameters in selected.items():
        if any(parameter.grad is not None or id(parameter) in with_hidden_gradients for parameter in parameters):
            cleared.append(name)
        for parameter in parameters:
            parameter.grad = None
    return cleared


def _unscaled_states(things: Sequence[Any]) -> list[dict[int, Any]]:
    """Return the per-optimizer states of gradient scalers that are between ``unscale_`` and ``update``."""
    scalers = live_objects.of_kind(things, torch.amp.GradScaler)
    states: list[dict[int, Any]] = [scaler.__dict__.get("_per_optimizer_states", {}) for scaler in scalers]
    ready = torch.amp.grad_scaler.OptState.READY
    return [
        per_optimizer
        for per_optimizer in states
        if any(state["stage"] is not ready for state in per_optimizer.values())
    ]


# -- models


def _parameters_by_model(things: Sequence[Any]) -> dict[str, list[torch.Tensor]]:
    """Group all parameters of this process by the variable that holds their model.

    If several variables hold a parameter, the largest model gets it. The key "" has the parameters of no variable.
    """
    remaining = {id(parameter): parameter for parameter in _all_parameters(things)}
    models = [(name, live_objects.parameters_in(module)) for name, module in _named_modules()]
    found = {}
    for name, parameters in sorted(models, key=lambda model: -len(model[1])):
        found[name] = [remaining.pop(id(parameter)) for parameter in parameters if id(parameter) in remaining]
    return {**found, "": list(remaining.values())}


def _all_parameters(things: Sequence[Any]) -> Iterator[torch.Tensor]:
    for module in live_objects.of_kind(things, torch.nn.Module):
        yield from (parameter for parameter in module.__dict__.get("_parameters", {}).values() if parameter is not None)
    for optimizer in live_objects.of_kind(things, torch.optim.Optimizer):
        for group in optimizer.__dict__.get("param_groups", ()):
            yield from group["params"]


def _named_modules() -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield models in variables, their attributes and items, each with its expression: ``learn.model``."""
    for name, value in list(user_namespace().items()):
        if name.startswith("_") or isinstance(value, type | ModuleType):
            continue
        if issubclass(type(value), torch.nn.Module):
            yield name, value
        elif type(value) in (list, tuple):
            yield from _modules_in((f"{name}[{index}]", item) for index, item in enumerate(value[:MOST_ITEMS]))
        elif type(value) is dict:
            items = itertools.islice(value.items(), MOST_ITEMS)
            yield from _modules_in((f"{name}[{key!r}]", item) for key, item in items if type(key) in (str, int))
        else:
            with contextlib.suppress(AttributeError):
                attributes = object.__getattribute__(value, "__dict__")
                yield from _modules_in((f"{name}.{key}", item) for key, item in list(attributes.items()))


def _modules_in(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, value) for name, value in values if issubclass(type(value), torch.nn.Module))
