"""Find gradients that no optimizer step has used yet, such as those of micro-batches that are accumulated.

After each optimizer step, the version of each of its gradients is recorded. A gradient that is another tensor later, or
has another version, is pending. Loops that clear gradients at the beginning of an iteration have none that are pending
after a step.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ddip.sharded.layout import DTensor

Versions = dict[int, tuple[weakref.ref[torch.Tensor], int]]
"""Gradients, each with its version, by their ids; weak references, because a later tensor may get the same id."""
_used: weakref.WeakKeyDictionary[Optimizer, Versions] = weakref.WeakKeyDictionary()
"""Gradients after the last step of each optimizer."""


@functools.cache
def watch_steps() -> None:
    """Begin to record the gradients that optimizer steps use."""
    register_optimizer_step_post_hook(_record_gradients)


def _record_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [_values_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    _used[optimizer] = {id(value): (weakref.ref(value), value._version) for value in values if not value.is_inference()}


@torch.no_grad()
def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose version changes; for a DTensor, its local part, which FSDP2 adds to."""
    values: torch.Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return values


def find_pending(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of `parameters` that no optimizer step has used yet, by the same names."""
    used = {key: entry for versions in _used.values() for key, entry in versions.items()}
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {
        name: gradient for name, gradient in gradients.items() if gradient is not None and _is_pending(gradient, used)
    }


def _is_pending(gradient: torch.Tensor, used: Versions) -> bool:
    values = _values_of(gradient)
    entry = used.get(id(values))
    return entry is None or entry[0]() is not values or values.is_inference() or entry[1] != values._version
