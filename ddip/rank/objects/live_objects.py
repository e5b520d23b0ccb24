"""Find the objects of training that live in this process, wherever variables, closures and libraries keep them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

FSDP2_STATES = ("torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable.fsdp._fsdp_state")
"""Modules that have FSDP2's ``FSDPState``; the last one is torch 2.4's and 2.5's."""
ACCELERATOR = ("accelerate.accelerator", "Accelerator")
T = TypeVar("T")
_frozen = 0
"""How many objects were frozen at most when this was last looked at, without any of the program's."""


def freeze() -> None:
    """Have collections skip everything that is there, which must be no object of training."""
    global _frozen
    gc.freeze()
    _frozen = gc.get_freeze_count()


def all_objects() -> list[Any]:
    """Return all collectable objects, but for those of `freeze`: the program may have frozen its own.

    They cannot be listed as long as they are frozen, so none is from here on.
    """
    global _frozen
    if gc.get_freeze_count() > _frozen:
        gc.unfreeze()
    _frozen = gc.get_freeze_count()
    return gc.get_objects()


def find_all() -> list[Any]:
    """Find modules, optimizers, scalers, accelerators and FSDP2's states in one pass over all collectable objects.

    Proxies that only claim to be of such a kind are left out.
    """
    names = [*((name, "FSDPState") for name in FSDP2_STATES), ACCELERATOR]
    imported = [getattr(sys.modules.get(module), name, None) for module, name in names]
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, *filter(None, imported))
    things = all_objects()
    there = {id(type(thing)): type(thing) for thing in things}  # a class may have no hash
    wanted = {number for number, kind in there.items() if issubclass(kind, kinds)}
    return [thing for thing in things if id(type(thing)) in wanted]


def of_kind(things: Sequence[Any], kind: type[T]) -> list[T]:
    """Select the objects of `kind` from `things`."""
    return [thing for thing in things if issubclass(type(thing), kind)]


def of_class(things: Sequence[Any], module: str, *names: str) -> list[Any]:
    """Select the objects of a class that `module` has, under one of `names`; none if it is not imported."""
    kinds = tuple(getattr(sys.modules[module], name) for name in names if hasattr(sys.modules.get(module), name))
    return [thing for thing in things if kinds and issubclass(type(thing), kinds)]


def parameters_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """List the parameters of `module` and of the modules in it, without calling methods, which may be a user's."""
    found: dict[int, torch.Tensor] = {}
    seen, left = set[int](), [module]
    while left:
        part = left.pop()
        if id(part) not in seen:
            seen.add(id(part))
            found |= {id(one): one for one in part.__dict__.get("_parameters", {}).values() if one is not None}
            left += [one for one in part.__dict__.get("_modules", {}).values() if one is not None]
    return list(found.values())
