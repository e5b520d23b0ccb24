"""Find the parameter groups of ``fully_shard``, and gradients that they have not reduced into ``.grad`` yet.

Gradients are not reduced after micro-batches with ``set_requires_gradient_sync(False)``, or, between replicas, with
``set_requires_all_reduce(False)``.
"""

from __future__ import annotations

from typing import Any


def groups_of(module: Any) -> list[Any]:
    """Return the parameter groups of a module, without those of its parts; none if it is not sharded."""
    return groups_of_state(module._get_fsdp_state()) if hasattr(module, "_get_fsdp_state") else []


def groups_of_state(state: Any) -> list[Any]:
    """Return the parameter groups of an ``FSDPState``; torch before 2.12 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def has_unreduced_gradients(group: Any) -> bool:
    """Return whether a parameter group has unreduced gradients."""
    return getattr(group, "_partial_reduce_output", None) is not None or any(map(is_unreduced, group.fsdp_params))


def is_unreduced(parameter: Any) -> bool:
    """Return whether an ``FSDPParam`` has an unreduced gradient."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def drop_unreduced_gradients(group: Any) -> None:
    """Drop the unreduced gradients of a parameter group."""
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        drop_unreduced(parameter)


def drop_unreduced(parameter: Any) -> None:
    """Drop the unreduced gradient of an ``FSDPParam``."""
    parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
