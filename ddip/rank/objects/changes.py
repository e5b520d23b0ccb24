"""Count in-place writes to shared parameters per cell, so that the notebook can find ranks at different steps.

An error or a stop can arrive after the collectives of an optimizer step, when one rank has taken the step and another
has not. No rank waits then, so all would continue with parameters or shards of different steps. This module counts
writes to the parameters of DDP wrappers and to sharded parameters (DTensor, FSDP1), and steps of optimizers of the
latter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class _Owner:
    """The write count of a DDP wrapper, or of an optimizer with sharded parameters."""

    name: str
    """Identifier, equal on all ranks: the group's store, and how many owners were created in that group before."""
    before: int
    """Writes to its parameters before the current cell, or before the owner was created in this cell."""
    steps: int = 0
    """Steps of this optimizer that have ended in the current cell."""
    is_within_step: bool = False


_owners: weakref.WeakKeyDictionary[Any, _Owner] = weakref.WeakKeyDictionary()
_group, _numbers = "", itertools.count()  # the store of the current group, and the numbers for its owners
optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""All living optimizers of this process."""
_wrapper_parameters: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
"""Trainable parameters of each wrapper, as weak references because hooks of a parameter may hold the wrapper."""


def watch_optimizers() -> None:
    """Patch `Optimizer.add_param_group` to record each new optimizer; call this once per process."""
    original = Optimizer.add_param_group

    @functools.wraps(original)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        optimizers.add(self)
        if any(_is_sharded(parameter) for parameter in self.param_groups[-1]["params"]):
            _add_owner(self)

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def begin_group(store: str) -> None:
    """Number wrappers and optimizers from zero, under the name of the new group's `store`.

    A replaced rank has created fewer of them than the others, so numbers only match within one group.
    """
    global _group, _numbers
    _group, _numbers = store, itertools.count()


def watch_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Count writes to the trainable parameters of `module`, which `wrapper` wraps."""
    _wrapper_parameters[wrapper] = [
        weakref.ref(parameter) for parameter in module.parameters() if parameter.requires_grad
    ]
    _add_owner(wrapper)


def _add_owner(owner: nn.Module | Optimizer) -> None:
    if owner not in _owners:
        _owners[owner] = _Owner(f"{_group} {next(_numbers)}", 0)
    _owners[owner].before = _count_writes(owner)


def stop_counting(wrapper: nn.Module) -> None:
    """Stop counting writes for `wrapper`, which is no longer used."""
    _owners.pop(wrapper, None)


def begin_cell() -> None:
    """Restart all write counts from zero."""
    for owner, record in list(_owners.items()):
        record.before = _count_writes(owner)
        record.steps, record.is_within_step = 0, False


def note_step(optimizer: Optimizer, has_ended: bool) -> None:
    """Record the begin or the end of a step.

    Fused kernels, and those for lists of tensors on GPUs, write to parameters without raising their versions.
    """
    record = _owners.get(optimizer)
    if record is not None:
        record.steps += has_ended
        record.is_within_step = not has_ended


def writes_by_owner() -> dict[str, int]:
    """Return how often the cell has written to each owner's parameters, by the owner's name.

    The number is -1 if a step of an optimizer with sharded parameters has not ended: it may have changed some of them.
    Garbage may be collected on one rank earlier than on another, so the notebook compares owners that all ranks have.
    """
    return {
        record.name: -1 if record.is_within_step else _count_writes(owner) - record.before + record.steps
        for owner, record in list(_owners.items())
    }


def _count_writes(owner: nn.Module | Optimizer) -> int:
    """Sum the version counters of the owner's parameters.

    Returns 0 if one was created in inference mode, as torch does not count writes to such tensors.
    """
    parameters: Iterable[Tensor | None]
    if isinstance(owner, Optimizer):
        parameters = [
            parameter for group in owner.param_groups for parameter in group["params"] if _is_sharded(parameter)
        ]
    else:
        parameters = [reference() for reference in _wrapper_parameters[owner]]
    with contextlib.suppress(RuntimeError):
        return sum(parameter._version for parameter in parameters if parameter is not None)
    return 0


def find_flat_storages() -> set[int]:
    """Return torch's storage addresses of FSDP1 flat parameters and their optimizer states.

    The states are plain tensors, and so are the parameters in a `state_dict()`: only their storages identify them.
    """
    found = set()
    for optimizer in list(optimizers):
        for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
            if getattr(parameter, "_fsdp_flattened", False):
                tensors = [
                    tensor for tensor in optimizer.state.get(parameter, {}).values() if isinstance(tensor, Tensor)
                ]
                found |= {tensor.untyped_storage()._cdata for tensor in [parameter.data, *tensors] if tensor.dim()}
    return found


def _is_sharded(parameter: Tensor) -> bool:
    """Return whether the rank has only a part of the parameter, also as FSDP1 shows it with ``use_orig_params``."""
    return type(parameter).__module__.startswith("torch.distributed") or getattr(parameter, "_fsdp_flattened", False)
