"""Find all training objects of this process, even those that only closures or libraries hold."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

FSDP2_STATES = ("torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable.fsdp._fsdp_state")
"""Modules that define FSDP2's ``FSDPState``; the last one is for torch 2.4 and 2.5."""
ACCELERATOR = ("accelerate.accelerator", "Accelerator")
T = TypeVar("T")
_marker: list[None] = []
"""An object that is not frozen, unless the program itself has frozen all objects since it was made.

``gc.get_freeze_count`` would answer the same, but it counts the half million objects of torch each time, for 0.1 s.
"""


def freeze_existing() -> None:
    """Exclude all existing objects from garbage collection; call this before any training object exists."""
    global _marker
    gc.freeze()
    _marker = []


def all_objects() -> list[Any]:
    """Return all collectable objects, without the objects that `freeze_existing` excluded.

    If the program itself has frozen objects since, all frozen objects are unfrozen first, for good, and returned too:
    Python does not list them otherwise.
    """
    things = gc.get_objects()
    if not any(thing is _marker for thing in things):
        gc.unfreeze()
        things = gc.get_objects()
    return things


def find_all() -> list[Any]:
    """Find modules, optimizers, gradient scalers, accelerators and FSDP2 states.

    It takes one pass over all collectable objects. Proxies that only claim such a class (``__class__``) are not found.
    """
    names = [*((name, "FSDPState") for name in FSDP2_STATES), ACCELERATOR]
    imported = [getattr(sys.modules.get(module), name, None) for module, name in names]
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, *filter(None, imported))
    things = all_objects()
    types = {id(type(thing)): type(thing) for thing in things}  # by id, as a metaclass may be unhashable
    wanted = {number for number, kind in types.items() if issubclass(kind, kinds)}
    return [thing for thing in things if id(type(thing)) in wanted]


def of_kind(things: Sequence[Any], kind: type[T]) -> list[T]:
    """Select the objects of `kind` from `things`."""
    return [thing for thing in things if issubclass(type(thing), kind)]


def of_class(things: Sequence[Any], module: str, *names: str) -> list[Any]:
    """Select the objects of the classes `names` of `module`; none if the module is not imported."""
    kinds = tuple(getattr(sys.modules[module], name) for name in names if hasattr(sys.modules.get(module), name))
    return [thing for thing in things if kinds and issubclass(type(thing), kinds)]


def parameters_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """List the parameters of `module` and its submodules without calling user-overridable methods."""
    found: dict[int, torch.Tensor] = {}
    seen, pending = set[int](), [module]
    while pending:
        part = pending.pop()
        if id(part) not in seen:
            seen.add(id(part))
            parameters = part.__dict__.get("_parameters", {}).values()
            found |= {id(parameter): parameter for parameter in parameters if parameter is not None}
            pending += [child for child in part.__dict__.get("_modules", {}).values() if child is not None]
    return list(found.values())
