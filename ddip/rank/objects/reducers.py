"""Replace a DDP wrapper's reducer in place: the wrapper is ready for a forward pass then, with its settings and hooks.

The reducer is C++ and cannot be set back. A new one has the buckets of a first step, so all ranks do this together.
``tests/unit/test_private_names.py`` fails when a release of torch changes what is used here.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms import join
from torch.nn.parallel import DistributedDataParallel

from ddip.rank.runtime import c10d

FIRST_STEP = {"_has_rebuilt_buckets": False, "_static_graph_delay_allreduce_enqueued": False}
"""What a DDP knows of its reducer's first step."""
STATES = {
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook": "PowerSGDState",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": "PostLocalSGDState",
}
"""States of torch's communication hooks that are counted per step, by the module that has them."""
GROUPS = ("process_group", "subgroup")
"""Attributes of these states that hold a process group."""
BUILTIN = "BuiltinCommHookType."
"""How the name of a communication hook begins that torch has in C++."""
_trained: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""The parameters that required a gradient when a wrapper was made, which its reducer has: they may be frozen now."""


def note_trained(wrapper: torch.nn.Module, module: torch.nn.Module) -> None:
    """Remember which parameters of `module` the reducer of `wrapper` will have."""
    _trained[wrapper] = trained_in(module)


def trained_in(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters of `module` that require a gradient."""
    return frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def trained_by(wrapper: Any) -> frozenset[str]:
    """Return the names of the parameters that the reducer of `wrapper` has."""
    return _trained.get(wrapper) or trained_in(wrapper.module)


def remove_reducer(wrapper: torch.nn.Module) -> None:
    """Remove the reducer: it has hooks on the parameters, which would take part in the backward pass of the next.

    They are removed apart from it: what torch has compiled may hold the reducer.
    """
    if wrapper.__dict__.get("reducer") is not None:
        getattr(wrapper.__dict__["reducer"], "_remove_autograd_hooks", list)()
    for name in ("reducer", "logger"):
        if name in wrapper.__dict__:
            wrapper.__dict__[name] = None


def builtin_hook(wrapper: Any) -> str:
    """Name of the C++ communication hook that `wrapper` uses; empty without one. Python does not keep it."""
    if wrapper.__dict__.get("logger") is None:
        return ""
    name = str(wrapper._get_ddp_logging_data().get("comm_hook", ""))
    return name.removeprefix(BUILTIN) if name.startswith(BUILTIN) else ""


def replace_reducer(wrapper: Any, builtin: str = "") -> None:
    """Give `wrapper` a new reducer, with the communication hook that it had; `builtin` names one of torch's C++ hooks.

    The states of torch's own hooks begin again: what they keep depends on the buckets and on the steps of this rank.
    """
    told = wrapper.__dict__
    hooks: list[tuple[Any, Any]] = list(told.get("_comm_hooks") or [])
    remove_reducer(wrapper)
    told.update(FIRST_STEP)
    _end_mixed_precision(wrapper)
    with _as_made(wrapper):
        parameters, sparse = wrapper._build_params_for_reducer()
        names = wrapper._build_debug_param_to_name_mapping(parameters)
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    if told.get("mixed_precision") is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(told["mixed_precision"].param_dtype)
    told["_comm_hooks"] = []
    for hook, state in hooks:
        begin_again(state)
        wrapper.register_comm_hook(state, hook)
    if hooks and isinstance(hooks[0][1], weakref.ref):  # an optimizer that steps within the backward pass
        wrapper.reducer._set_optimizer_in_backward()
    if builtin:
        wrapper._register_builtin_comm_hook(getattr(BuiltinCommHookType, builtin))


def restart_settings(wrapper: Any, broken: bool) -> None:
    """End a ``join`` that the failed cell has left open, and a ``no_sync`` if it has `broken` an iteration."""
    told = wrapper.__dict__
    told["require_forward_param_sync"] = True
    if broken:
        told["require_backward_grad_sync"] = True
    told["_join_config"] = join._JoinConfig.construct_disabled_join_config()


def is_known_state(state: Any) -> bool:
    """Return whether `state` is one of torch's own states of a communication hook."""
    kind = type(state)
    return STATES.get(kind.__module__) == kind.__qualname__


def begin_again(state: Any) -> None:
    """Set a state of one of torch's communication hooks back to its first step; others are left as they are."""
    if is_known_state(state):
        given = inspect.signature(type(state)).parameters
        state.__init__(**{name: getattr(state, name) for name in given if hasattr(state, name)})
    elif hasattr(state, "wait_for_stream_enqueued"):  # DDP's mixed precision
        state.wait_for_stream_enqueued = False


def is_of_the_world(state: Any) -> bool:
    """Can the next group have this state of a communication hook?"""
    groups = [getattr(state, name, None) for name in GROUPS] if is_known_state(state) else [state]
    return all(group is None or group is c10d.world() for group in groups)


def of_this_world(state: Any) -> Any:
    """The state of a communication hook, whose group was the former default one."""
    if not is_known_state(state):
        return None if state is None else c10d.world()
    for name in GROUPS:
        if getattr(state, name, None) is not None:
            setattr(state, name, c10d.world())
    return state


def is_averaging(state: Any) -> bool:
    """Return whether a communication hook with this state leaves the same gradients on all ranks."""
    return state is None or state is c10d.world() or type(state).__name__ == "PowerSGDState"


@contextlib.contextmanager
def _as_made(wrapper: Any) -> Iterator[None]:
    """While this lasts, the parameters that require a gradient are those that did when `wrapper` was made."""
    trained = trained_by(wrapper)
    now = [(parameter, parameter.requires_grad) for parameter in wrapper.module.parameters()]
    for name, parameter in wrapper.module.named_parameters():
        parameter.requires_grad_(name in trained)
    try:
        yield
    finally:
        for parameter, requires_grad in now:
            parameter.requires_grad_(requires_grad)


def _end_mixed_precision(wrapper: DistributedDataParallel) -> None:
    """Put the parameters in full precision back, which the hooks of a finished backward pass would have done."""
    if wrapper.__dict__.get("mixed_precision") is None:
        return
    wrapper._submodule_to_event.clear()
    for parameter in wrapper.module.parameters():
        whole: torch.Tensor | None = getattr(parameter, "_fp_param", None)
        if whole is not None:
            parameter.data = whole
            parameter._mp_param.untyped_storage().resize_(0)  # type: ignore[attr-defined]
        if hasattr(parameter, "_ddp_mp_hook_state"):
            parameter._ddp_mp_hook_state[1].remove()
            del parameter._ddp_mp_hook_state
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad.data = parameter.grad.to(parameter.dtype)
