"""Reset sharded models (FSDP2, FSDP1, DeepSpeed) after a failed cell that left an iteration unfinished.

A model that cannot be reset refuses its next use. ``tests/unit/test_private_names.py`` fails when a release of torch
changes what is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddip.rank.objects import wrappers
from ddip.rank.objects.live_objects import FSDP2_STATES, of_class
from ddip.sharded.parameter_groups import drop_unreduced, groups_of_state, has_unreduced_gradients, is_unreduced

BY_TORCH = "_reset_iter_state"
"""Method of ``FSDPState`` that resets an iteration, since torch 2.14."""
HELD = (
    "_all_gather_result",
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_all_reduce_state",
    "_partial_reduce_output",
)
"""Attributes of FSDP2 parameter groups that hold state of one iteration; some torch releases lack some of them."""
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
DEEPSPEED = "deepspeed.runtime.engine"
BROKEN = (
    "a failed cell left this {name} in the middle of an iteration, and it could not be reset ({why}). Recreate the "
    "model and its optimizer; ddip.dist_state restores their saved state"
)
BROKEN_ENGINE = (
    "a failed cell left this DeepSpeed engine in the middle of an iteration, with partial gradients in its "
    "buffers. Create a new engine from a new model with deepspeed.initialize; load_checkpoint restores parameters "
    "and optimizer"
)


def find_unfinished(things: Sequence[Any]) -> tuple[bool, set[int]]:
    """Return whether an FSDP model in `things` is within an iteration, and the ids of parameters with hidden gradients.

    A gradient is hidden until it is reduced into ``.grad``. A model that cannot be inspected counts as within an
    iteration.
    """
    unfinished, hidden = False, set[int]()
    models = [(root, _is_within_pass, _hidden_gradients) for root in _fsdp2_roots(things)]
    models += [(root, _is_within_fsdp1_pass, _hidden_gradients_fsdp1) for root in _fsdp1_roots(things)]
    for root, is_within_pass, find_hidden in models:
        try:
            unfinished = unfinished or is_within_pass(root)
            hidden |= find_hidden(root)
        except Exception:
            unfinished = True
    return unfinished, hidden


def reset_models(things: Sequence[Any], broken: bool) -> None:
    """Free gathered parameters and make each sharded model among `things` ready for a forward pass.

    All ranks must call this. If the failed cell has `broken` an iteration, DeepSpeed engines are reset or refuse their
    next use. Models that cannot be reset also refuse their next use; nothing is raised.
    """
    for root in _fsdp2_roots(things):
        try:
            _reset_root(root)
            _hidden_gradients(root)
        except Exception as error:
            for part in root._modules:
                wrappers.refuse_use(part, BROKEN.replace("{why}", type(error).__name__))
    for module in _fsdp1_roots(things):
        try:
            _reset_fsdp1(module)
            _hidden_gradients_fsdp1(module)
        except Exception as error:
            wrappers.refuse_use(module, BROKEN.replace("{why}", type(error).__name__))
    for engine in of_class(things, DEEPSPEED, "DeepSpeedEngine") if broken else ():
        if type(engine.optimizer).__module__.startswith("deepspeed.runtime"):  # ZeRO, or half precision
            wrappers.refuse_use(engine, BROKEN_ENGINE)
        else:  # gradients are in ``.grad``: only the count of micro-batches needs a reset
            engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()


def clear_gradients(things: Sequence[Any], models: set[int]) -> set[int]:
    """Drop the hidden gradients of models that have a parameter with an id in `models`.

    Returns the ids of the parameters that had a hidden gradient.
    """
    fully_sharded = [
        parameter
        for root in _fsdp2_roots(things)
        for group in _parameter_groups(root)
        for parameter in group.fsdp_params
    ]
    cleared = set()
    for parameter in fully_sharded:
        if id(parameter.sharded_param) in models and is_unreduced(parameter):
            cleared.add(id(parameter.sharded_param))
            drop_unreduced(parameter)
    for flat in (flat for root in _fsdp1_roots(things) for flat in _flat_parameters(root)):
        parts = _flat_and_originals(flat)
        if models.isdisjoint(map(id, parts)):
            continue
        if _has_gradient(flat):
            cleared |= {id(part) for part in parts}
        for part in parts:
            part.grad = None
        if hasattr(flat, "_saved_grad_shard"):
            del flat._saved_grad_shard
        if hasattr(flat, "_cpu_grad"):
            flat._cpu_grad.zero_()
    return cleared


# -- FSDP2


def _fsdp2_roots(things: Sequence[Any]) -> list[Any]:
    """Return the FSDP2 root states, without those of former groups, which refuse to be used.

    Only models that have run a forward pass have root states with an iteration to reset.
    """
    states = [state for module in FSDP2_STATES for state in of_class(things, module, "FSDPState")]
    states = [state for state in states if getattr(state, "_is_root", True)]
    return [state for state in states if not any(map(wrappers.is_lost, _modules_of(state)))]


def _modules_of(state: Any) -> tuple[torch.nn.Module, ...]:
    return tuple(getattr(state, "_modules", ()))


def _parameter_groups(root: Any) -> list[Any]:
    """Return the parameter groups of all modules of a model."""
    return [group for state in root._state_ctx.all_states for group in groups_of_state(state)]


def _is_within_pass(root: Any) -> bool:
    shared = root._state_ctx
    states = [*shared.all_states, *_parameter_groups(root)]
    return (
        shared.iter_forward_root is not None
        or shared.post_backward_final_callback_queued
        or any(state._training_state.name != "IDLE" for state in states)
        or any(map(has_unreduced_gradients, _parameter_groups(root)))
    )


def _hidden_gradients(root: Any) -> set[int]:
    """Return the ids of the sharded and gathered parameters of `root` with hidden gradients."""
    return {
        id(tensor)
        for group in _parameter_groups(root)
        for parameter in group.fsdp_params
        if is_unreduced(parameter) or getattr(group, "_partial_reduce_output", None) is not None
        for tensor in (parameter.sharded_param, getattr(parameter, "_unsharded_param", None))
    }


def _reset_root(root: Any) -> None:
    """Reset an FSDP2 model, with torch's own method if this release has it."""
    if hasattr(root, BY_TORCH):
        getattr(root, BY_TORCH)()
    else:
        _reset_by_hand(root)
    for group in _parameter_groups(root):
        for parameter in group.fsdp_params:
            parameter.grad_offload_event = None
            if parameter.sharded_state.name != "SHARDED":  # an interrupt arrived during a reshard
                parameter.to_sharded()


def _reset_by_hand(root: Any) -> None:
    """Reset an FSDP2 model as ``FSDPState._reset_iter_state`` of torch 2.14 does."""
    shared, comm = root._state_ctx, root._comm_ctx
    for group in _parameter_groups(root):
        result = group._all_gather_result
        if result is not None and hasattr(result.all_gather_work, "wait"):
            result.all_gather_work.wait()
        for name in HELD:
            if hasattr(group, name):
                setattr(group, name, None)
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
    if root._device.type != "cpu":
        torch.get_device_module(root._device).synchronize()
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_state"):
        comm.reduce_scatter_state = None
    for name in ("reduce_scatter_states", "post_forward_order"):
        getattr(comm, name, []).clear()
    for state in shared.all_states:
        getattr(state, "_modules_to_run_forward", set()).clear()
        state._training_state = type(state._training_state).IDLE
    for group in _parameter_groups(root):
        group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


# -- FSDP1


def _fsdp1_roots(things: Sequence[Any]) -> list[Any]:
    found = of_class(things, FSDP1, "FullyShardedDataParallel")
    return [module for module in found if getattr(module, "_is_root", True) and not wrappers.is_lost(module)]


def _fsdp1_states(root: Any) -> list[Any]:
    """Return the FSDP1 states in a model that hold parameters."""
    return [state for state in root._all_fsdp_states if state._handle]


def _flat_parameters(root: Any) -> list[Any]:
    return [state._handle.flat_param for state in _fsdp1_states(root)]


def _flat_and_originals(flat: Any) -> list[Any]:
    """Return `flat`, and with ``use_orig_params`` also the original parameters in it."""
    return [flat, *(flat._params or ())]


def _has_gradient(flat: Any) -> bool:
    return getattr(flat, "_saved_grad_shard", None) is not None or any(
        part.grad is not None for part in _flat_and_originals(flat)
    )


def _hidden_gradients_fsdp1(root: Any) -> set[int]:
    return {
        id(part)
        for flat in _flat_parameters(root)
        if getattr(flat, "_saved_grad_shard", None) is not None or _is_unreduced_flat(flat)
        for part in _flat_and_originals(flat)
    }


def _is_within_fsdp1_pass(root: Any) -> bool:
    states = _fsdp1_states(root)
    return root._post_backward_callback_queued or any(
        state.training_state.name != "IDLE"
        or state._handle._training_state.name != "IDLE"
        or _is_unreduced_flat(state._handle.flat_param)
        for state in states
    )


def _is_unreduced_flat(flat: Any) -> bool:
    """Return whether `flat` has an unsharded gradient, from a micro-batch under ``no_sync``."""
    whole_size = getattr(flat, "_unpadded_unsharded_size", None)
    return flat.grad is not None and flat.grad.shape == whole_size and flat._local_shard.shape != whole_size


def _reset_fsdp1(root: Any) -> None:
    """Reset an FSDP1 model as the end of a backward pass would have done."""
    from torch.distributed.fsdp import _runtime_utils

    device = torch.device(root.compute_device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    root._exec_order_data.next_iter()
    for state in _fsdp1_states(root):
        handle, flat = state._handle, state._handle.flat_param
        if hasattr(flat, "_post_backward_hook_state"):
            flat._post_backward_hook_state[-1].remove()
            del flat._post_backward_hook_state
        handle._training_state = type(handle._training_state).IDLE
        _runtime_utils._catch_all_reshard(state)
        state.training_state = type(state.training_state).IDLE
        handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = False
        handle._post_forward_index = None
        flat._post_backward_called = False
    root._post_backward_callback_queued = False
