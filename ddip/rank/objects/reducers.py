"""Replace a DDP wrapper's reducer in place, which makes the wrapper ready for a forward pass.

The wrapper keeps its settings and hooks. The reducer is a C++ object that cannot be reset. A new one has the buckets
of a first step, so all ranks must replace theirs together.
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
"""Attributes of a DDP wrapper whose reducer has not taken its first step."""
STATES = {
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook": "PowerSGDState",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": "PostLocalSGDState",
}
"""Classes of torch's communication-hook states that count steps, by the module that defines them."""
GROUPS = ("process_group", "subgroup")
"""Attributes of these states that hold a process group."""
BUILTIN = "BuiltinCommHookType."
"""Prefix of the names of torch's C++ communication hooks."""
_trained: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""Names of the parameters in each wrapper's reducer: those that required a gradient when the wrapper was made."""


def note_trained(wrapper: torch.nn.Module, module: torch.nn.Module) -> None:
    """Record which parameters of `module` the reducer of `wrapper` will manage."""
    _trained[wrapper] = trained_in(module)


def trained_in(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters of `module` that require a gradient."""
    return frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def trained_by(wrapper: Any) -> frozenset[str]:
    """Return the names of the parameters that the reducer of `wrapper` manages; some may be frozen by now."""
    return _trained.get(wrapper) or trained_in(wrapper.module)


def remove_reducer(wrapper: torch.nn.Module) -> None:
    """Remove the reducer of `wrapper` and its hooks on the parameters.

    Otherwise the hooks would run in the backward pass of the next reducer. They are removed explicitly, because code
    compiled by torch may keep the reducer alive.
    """
    if wrapper.__dict__.get("reducer") is not None:
        getattr(wrapper.__dict__["reducer"], "_remove_autograd_hooks", list)()
    for name in ("reducer", "logger"):
        if name in wrapper.__dict__:
            wrapper.__dict__[name] = None


def builtin_hook(wrapper: Any) -> str:
    """Return the name of the C++ communication hook of `wrapper`, read from DDP's logger; "" without one."""
    if wrapper.__dict__.get("logger") is None:
        return ""
    name = str(wrapper._get_ddp_logging_data().get("comm_hook", ""))
    return name.removeprefix(BUILTIN) if name.startswith(BUILTIN) else ""


def replace_reducer(wrapper: Any, builtin: str = "") -> None:
    """Give `wrapper` a new reducer with its former communication hook; `builtin` names a C++ hook.

    States of torch's own hooks are reset, because they depend on the buckets and on the steps of this rank.
    """
    attributes = wrapper.__dict__
    hooks: list[tuple[Any, Any]] = list(attributes.get("_comm_hooks") or [])
    remove_reducer(wrapper)
    attributes.update(FIRST_STEP)
    _end_mixed_precision(wrapper)
    with _with_initial_gradients(wrapper):
        parameters, sparse = wrapper._build_params_for_reducer()
        names = wrapper._build_debug_param_to_name_mapping(parameters)
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    if attributes.get("mixed_precision") is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(attributes["mixed_precision"].param_dtype)
    attributes["_comm_hooks"] = []
    for hook, state in hooks:
        begin_again(state)
        wrapper.register_comm_hook(state, hook)
    if hooks and isinstance(hooks[0][1], weakref.ref):  # the optimizer steps within the backward pass
        wrapper.reducer._set_optimizer_in_backward()
    if builtin:
        wrapper._register_builtin_comm_hook(getattr(BuiltinCommHookType, builtin))


def restart_settings(wrapper: Any, broken: bool) -> None:
    """End the ``join`` and ``no_sync`` contexts that a failed cell has left open.

    ``no_sync`` is only ended if the cell has `broken` an iteration.
    """
    attributes = wrapper.__dict__
    attributes["require_forward_param_sync"] = True
    if broken:
        attributes["require_backward_grad_sync"] = True
    attributes["_join_config"] = join._JoinConfig.construct_disabled_join_config()


def is_known_state(state: Any) -> bool:
    """Return whether `state` belongs to one of torch's communication hooks that ddip can reset."""
    kind = type(state)
    return STATES.get(kind.__module__) == kind.__qualname__


def begin_again(state: Any) -> None:
    """Reset the state of a torch communication hook to its first step; leave other states unchanged."""
    if is_known_state(state):
        arguments = inspect.signature(type(state)).parameters
        state.__init__(**{name: getattr(state, name) for name in arguments if hasattr(state, name)})
    elif hasattr(state, "wait_for_stream_enqueued"):  # DDP's mixed precision
        state.wait_for_stream_enqueued = False


def is_of_the_world(state: Any) -> bool:
    """Return whether this state of a communication hook uses no group but the default one."""
    groups = [getattr(state, name, None) for name in GROUPS] if is_known_state(state) else [state]
    return all(group is None or group is c10d.default_group() for group in groups)


def of_this_world(state: Any) -> Any:
    """Return `state` of a communication hook with the current default group in place of the former one."""
    if not is_known_state(state):
        return None if state is None else c10d.default_group()
    for name in GROUPS:
        if getattr(state, name, None) is not None:
            setattr(state, name, c10d.default_group())
    return state


def is_averaging(state: Any) -> bool:
    """Return whether a communication hook with this state leaves the same gradients on all ranks."""
    return state is None or state is c10d.default_group() or type(state).__name__ == "PowerSGDState"


@contextlib.contextmanager
def _with_initial_gradients(wrapper: Any) -> Iterator[None]:
    """Make the parameters require gradients as when `wrapper` was created; restore their settings on exit."""
    trained = trained_by(wrapper)
    former = [(parameter, parameter.requires_grad) for parameter in wrapper.module.parameters()]
    for name, parameter in wrapper.module.named_parameters():
        parameter.requires_grad_(name in trained)
    try:
        yield
    finally:
        for parameter, requires_grad in former:
            parameter.requires_grad_(requires_grad)


def _end_mixed_precision(wrapper: DistributedDataParallel) -> None:
    """Restore full-precision parameters, as the hooks of a finished backward pass would have done."""
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
