"""Have the ranks written equally often to the parameters that they share in a cell?

An error or a stop may come after the collectives of a step, when one rank has taken the step and another has not: none
of them waits, and all would go on, with parameters, or shards, of different steps. Counted are the parameters of DDP
wrappers, and sharded ones (DTensor, FSDP1) that an optimizer has.
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
    """A wrapper, or an optimizer with sharded parameters."""

    name: str
    """The same on all ranks: the group in which it was made, and how many were made there before it."""
    before: int
    """How often its parameters had been written to when the cell began, or it was made."""


_owners: weakref.WeakKeyDictionary[Any, _Owner] = weakref.WeakKeyDictionary()
_group, _next = "", itertools.count()  # the store of the current group, and the number of its next owner
optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""All that were made in this process."""
_of_wrappers: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
"""Weak: hooks of a parameter may hold its wrapper."""


def watch() -> None:
    """Once: see which optimizers are made."""
    own = Optimizer.add_param_group

    @functools.wraps(own)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        own(self, param_group)
        optimizers.add(self)
        if any(_is_sharded(one) for one in self.param_groups[-1]["params"]):
            _watch(self)

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def begin_group(store: str) -> None:
    """Those made from now on belong to the group of this `store`: one of its ranks may be younger than the others."""
    global _group, _next
    _group, _next = store, itertools.count()


def watch_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Count what is written to the parameters of `module`."""
    _of_wrappers[wrapper] = [weakref.ref(one) for one in module.parameters() if one.requires_grad]
    _watch(wrapper)


def _watch(owner: nn.Module | Optimizer) -> None:
    if owner not in _owners:
        _owners[owner] = _Owner(f"{_group} {next(_next)}", 0)
    _owners[owner].before = _writes(owner)


def forget(wrapper: nn.Module) -> None:
    """It is used no more."""
    _owners.pop(wrapper, None)


def begin_cell() -> None:
    """Count anew."""
    for owner, known in list(_owners.items()):
        known.before = _writes(owner)


def count() -> dict[str, int]:
    """How often the cell has written to each of them, by its name.

    One that is garbage may be gone from one rank and not yet from another: those that all ranks have are compared.
    """
    return {known.name: _writes(owner) - known.before for owner, known in list(_owners.items())}


def _writes(owner: nn.Module | Optimizer) -> int:
    """torch counts what is written to a tensor, but for those made in inference mode."""
    parameters: Iterable[Tensor | None]
    if isinstance(owner, Optimizer):
        parameters = [one for group in owner.param_groups for one in group["params"] if _is_sharded(one)]
    else:
        parameters = [one() for one in _of_wrappers[owner]]
    with contextlib.suppress(RuntimeError):
        return sum(one._version for one in parameters if one is not None)
    return 0


def find_flat_storages() -> set[int]:
    """Return the addresses (to torch) of the storages of FSDP1's parameters and their optimizer states.

    These are plain tensors, in a `state_dict()` also the parameters.
    """
    found = set()
    for optimizer in list(optimizers):
        for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
            if getattr(parameter, "_fsdp_flattened", False):
                states = [one for one in optimizer.state.get(parameter, {}).values() if isinstance(one, Tensor)]
                found |= {one.untyped_storage()._cdata for one in [parameter.data, *states] if one.dim()}
    return found


def _is_sharded(parameter: Tensor) -> bool:
    return type(parameter).__module__.startswith("torch.distributed")
