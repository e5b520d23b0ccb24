"""Replace a DDP wrapper's reducer in place, which makes the wrapper ready for a forward pass.

The wrapper keeps its settings and hooks. The reducer is a C++ object that cannot be reset. A new one takes a first
step, so all ranks must replace theirs together.

A reducer sums gradients in buckets. For its first step, torch fills them in the order of the parameters, and then once
again, in the order in which the gradients arrive. With three ranks or more, a gradient's position in its bucket decides
in which order the gradients of the ranks are added, and so the last digit of the sum. A new reducer therefore gets the
buckets of the former one, and ``dist_state`` gives them to a recreated wrapper.
``tests/unit/test_private_names.py`` fails when a release of torch changes what is used here.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
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
Buckets = list[list[int]]
"""Indices of the parameters in each bucket, in the order of the sums."""
_buckets: weakref.WeakKeyDictionary[torch.nn.Module, Buckets] = weakref.WeakKeyDictionary()
"""Buckets of each wrapper's reducer; without an entry, those of torch's first step."""
_final: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Wrappers that have taken a first step, and whose buckets are in `_buckets`."""
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


def buckets_of(wrapper: Any) -> Buckets:
    """Return the buckets that torch has filled after the first step of `wrapper`; [] before that.

    They are equal on all ranks.
    """
    if wrapper not in _final and wrapper.__dict__.get("logger") is not None and wrapper._has_rebuilt_buckets:
        wrapper.logger.set_runtime_stats_and_log()
        if text := str(wrapper._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")):
            _buckets[wrapper] = [[int(index) for index in bucket.split()] for bucket in text.split(",")]
            _final.add(wrapper)
    return _buckets.get(wrapper, [])


def next_buckets(wrapper: Any) -> Buckets:
    """Return the buckets of the next step of `wrapper`.

    After the first step, this makes torch fill them now instead of in the second one. All ranks must call this between
    two steps.
    """
    if wrapper.__dict__.get("reducer") is not None and wrapper.reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True
    return buckets_of(wrapper)


def use_buckets(wrapper: Any, buckets: Buckets) -> None:
    """Give `wrapper` a reducer with these buckets if its own has those of torch's first step."""
    if buckets and wrapper.__dict__.get("reducer") is not None and not buckets_of(wrapper):
        replace_reducer(wrapper, builtin_hook(wrapper), buckets)


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


def replace_reducer(wrapper: Any, builtin: str, buckets: Buckets, is_in_step: bool = False) -> None:
    """Give `wrapper` a new reducer with its former communication hook; `builtin` names a C++ hook.

    Its first step uses `buckets`, which must be equal on all ranks; empty: those of torch.
    States of torch's own hooks are reset, because they depend on the buckets and on the steps of this rank, unless all
    ranks have done the same steps with these buckets (`is_in_step`).
    """
    attributes = wrapper.__dict__
    hooks: list[tuple[Any, Any]] = list(attributes.get("_comm_hooks") or [])
    remove_reducer(wrapper)
    attributes.update(FIRST_STEP)
    _end_mixed_precision(wrapper)
    with _with_initial_gradients(wrapper):
        parameters, sparse = wrapper._build_params_for_reducer()
        names = wrapper._build_debug_param_to_name_mapping(parameters)
        with _with_buckets(wrapper, parameters, buckets):
            wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    if attributes.get("mixed_precision") is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(attributes["mixed_precision"].param_dtype)
    attributes["_comm_hooks"] = []
    for hook, state in hooks:
        if not (is_in_step and is_known_state(state)):
            reset_state(state)
        wrapper.register_comm_hook(state, hook)
    if hooks and isinstance(hooks[0][1], weakref.ref):  # the optimizer steps within the backward pass
        wrapper.reducer._set_optimizer_in_backward()
    use_builtin_hook(wrapper, builtin)


def use_builtin_hook(wrapper: Any, name: str) -> None:
    """Register the C++ communication hook `name` of `builtin_hook`; "": none."""
    if name:
        wrapper._register_builtin_comm_hook(getattr(BuiltinCommHookType, name))


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


def reset_state(state: Any) -> None:
    """Reset the state of a torch communication hook to its first step; leave other states unchanged."""
    if is_known_state(state):
        arguments = inspect.signature(type(state)).parameters
        state.__init__(**{name: getattr(state, name) for name in arguments if hasattr(state, name)})
    elif hasattr(state, "wait_for_stream_enqueued"):  # DDP's mixed precision
        state.wait_for_stream_enqueued = False


def keeps_own_state(wrapper: Any) -> bool:
    """Return whether the user's communication hook of `wrapper` may keep values between iterations.

    They are in the state that the user registered, in variables of enclosing functions, or in the object of a method.
    Torch's own hooks do not count.
    """
    return any(
        not str(getattr(hook, "__module__", "")).startswith("torch.")
        and not (uses_default_group(state) and type(hook) is FunctionType and hook.__closure__ is None)
        for hook, state in wrapper.__dict__.get("_comm_hooks") or []
    )


def uses_default_group(state: Any) -> bool:
    """Return whether this state of a communication hook uses no group but the default one."""
    groups = [getattr(state, name, None) for name in GROUPS] if is_known_state(state) else [state]
    return all(group is None or group is c10d.default_group() for group in groups)


def with_default_group(state: Any) -> Any:
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
def _with_buckets(wrapper: Any, parameters: list[torch.nn.Parameter], buckets: Buckets) -> Iterator[None]:
    """Make DDP create its reducer in the block with `buckets`, if these contain each parameter once."""
    _buckets.pop(wrapper, None)
    _final.discard(wrapper)
    if sorted(itertools.chain(*buckets)) != list(range(len(parameters))):
        yield
        return
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def assign_buckets(tensors: Any, *arguments: Any) -> Any:
        found = assign(tensors, *arguments)
        if tensors is not parameters:
            return found
        return buckets[::-1], [found[1][0]] * len(buckets)  # DDP reverses both

    dist._compute_bucket_assignment_by_size = assign_buckets  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = assign  # type: ignore[attr-defined]
    _buckets[wrapper] = buckets


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
