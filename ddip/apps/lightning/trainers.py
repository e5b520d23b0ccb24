"""Make ``Trainer()`` and ``Fabric()`` use the ranks of the group.

In Lightning 2.6, they would use one process on the CPU, so that each rank trains separately. On GPUs, they would use
all visible GPUs instead of those of the group. Strategies that start processes raise an error that names a replacement.
In a cell on some ranks only, each rank trains separately, and its metrics (torchmetrics 1.9) wait for no other rank.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torchmetrics import metric

from ddip.apps import patches
from ddip.apps.lightning.packages import installed_modules
from ddip.apps.lightning.trainer_placement import RankPosition, constructor_arguments
from ddip.rank.runtime import current
from ddip.rank.runtime.gpu import gpu

FABRIC = ("launch", "setup", "setup_module", "setup_dataloaders")
"""Methods of Fabric that depend on the ranks."""

_made_for: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of ranks for which each Trainer or Fabric was made, if it was made on all ranks."""


def rank_position() -> RankPosition:
    """Return the position of this rank in the group, and whether all ranks run the cell."""
    return RankPosition(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=gpu.device.index if gpu.device.type == "cuda" else None,
        is_everywhere=current.is_everywhere(),
    )


def apply_patches() -> None:
    """Patch the constructors, and the methods of Fabric; ``runs.py`` patches the methods of Trainer."""
    for module in installed_modules("pytorch"):
        patches.wrap_function(module.Trainer, "__init__", functools.partial(_init_for_group, "Trainer"))
    for module in installed_modules("fabric"):
        patches.wrap_function(module.Fabric, "__init__", functools.partial(_init_for_group, "Fabric"))
        for name in FABRIC:
            patches.wrap_function(module.Fabric, name, _call_checked)
    patches.wrap_function(metric, "jit_distributed_available", _is_with_all)


def _is_with_all(is_distributed: Callable[[], bool]) -> bool:
    return current.is_everywhere() and is_distributed()


def _init_for_group(what: str, init: Callable[..., None], self: Any, /, **asked: Any) -> None:
    __tracebackhide__ = True  # IPython leaves out this frame
    position = rank_position()
    init(self, **constructor_arguments(what, asked, position))
    if position.is_everywhere:
        _made_for[self] = position.size


def _call_checked(method: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True  # IPython leaves out this frame
    ensure_same_ranks(self, f"fabric.{method.__name__}")
    return method(self, *args, **kwargs)


def ensure_same_ranks(owner: Any, doing: str) -> None:
    """Raise RuntimeError if `owner` was made for another group size, or this cell runs on some ranks only.

    `owner`: a Trainer or Fabric; not checked if it was made on some ranks only. `doing` names the call in the error.
    """
    __tracebackhide__ = True  # IPython leaves out this frame
    size, kind = _made_for.get(owner), type(owner).__name__
    if size is None:  # made in a cell on some ranks
        return
    if size != dist.get_world_size():
        raise RuntimeError(
            f"{doing}: this {kind} was made for {size} rank{'s' if size != 1 else ''}, and the group has "
            f"{dist.get_world_size()} now; recreate it: {kind.lower()} = {kind}(...)"
        )
    if not current.is_everywhere():
        ranks = ", ".join(map(str, current.cell_ranks()))
        raise RuntimeError(
            f"{doing}: this {kind} is for all {size} ranks, and this cell runs on rank {ranks} only; run it without "
            f"-r, or make a {kind}() in this cell, which trains alone"
        )
