"""``Trainer()`` and ``Fabric()`` mean the ranks of the group.

In Lightning 2.6, on the CPU, they would mean one process: each rank would train alone. On GPUs they would mean all
that there are, and not those of the group. Strategies that start processes of their own say what to use instead.
In a cell on some ranks only, each trains alone, and its metrics (torchmetrics 1.9) do not wait for the other ranks.
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
from ddip.apps.lightning.packages import modules
from ddip.apps.lightning.trainer_placement import Here, settings
from ddip.rank.runtime import current
from ddip.rank.runtime.gpu import gpu

FABRIC = ("launch", "setup", "setup_module", "setup_dataloaders")
"""Methods that use what a Fabric knows of the ranks."""

_made_for: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The number of ranks that a Trainer or a Fabric was made for."""


def here() -> Here:
    """Where this cell runs."""
    return Here(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=gpu.device.index if gpu.device.type == "cuda" else None,
        is_everywhere=current.is_everywhere(),
    )


def apply() -> None:
    """Have their constructors know the group, and a Fabric whether it is there; a Trainer's runs are in ``runs``."""
    for module in modules("pytorch"):
        patches.patch(module.Trainer, "__init__", _knowing("Trainer", module.Trainer.__init__))
    for module in modules("fabric"):
        patches.patch(module.Fabric, "__init__", _knowing("Fabric", module.Fabric.__init__))
        for name in FABRIC:
            patches.patch(module.Fabric, name, _of_these_ranks(getattr(module.Fabric, name)))
    patches.patch(metric, "jit_distributed_available", _with_all(metric.jit_distributed_available))


def _with_all(is_distributed: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(is_distributed)
    def is_with_all() -> bool:
        return current.is_everywhere() and is_distributed()

    return is_with_all


def _knowing(what: str, init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def make(self: Any, **asked: Any) -> None:
        __tracebackhide__ = True  # IPython leaves out this frame
        where = here()
        init(self, **settings(what, asked, where))
        if where.is_everywhere:
            _made_for[self] = where.size

    return make


def _of_these_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves out this frame
        ensure_there(self, f"fabric.{method.__name__}")
        return method(self, *args, **kwargs)

    return call


def ensure_there(one: Any, doing: str) -> None:
    """Raise RuntimeError unless the ranks that `one`, a Trainer or a Fabric, was made for run this cell."""
    __tracebackhide__ = True  # IPython leaves out this frame
    size, kind = _made_for.get(one), type(one).__name__
    if size is None:  # made in a cell on some ranks
        return
    if size != dist.get_world_size():
        raise RuntimeError(
            f"{doing}: this {kind} was made for {size} rank{'s' if size != 1 else ''}, and the group has "
            f"{dist.get_world_size()} now; make it again: {kind.lower()} = {kind}(...)"
        )
    if not current.is_everywhere():
        ranks = ", ".join(map(str, current.ranks()))
        raise RuntimeError(
            f"{doing}: this {kind} is for all {size} ranks, and this cell runs on rank {ranks} only; run it without "
            f"-r, or make a {kind}() in this cell, which trains alone"
        )
