"""``Trainer()`` and ``Fabric()`` mean the ranks of the group.

In Lightning 2.6, on the CPU, they would mean one process: each rank would train alone. On GPUs they would mean all
that there are, and not those of the group. Strategies that start processes of their own say what to use instead.
In a cell on some ranks only, each trains alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddip.apps.lightning import patches
from ddip.apps.lightning.placement import Here, settings
from ddip.rank import current
from ddip.rank.gpu import gpu


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
    """Have their constructors know the group."""
    for module in patches.modules("pytorch"):
        patches.patch(module.Trainer, "__init__", _knowing("Trainer"))
    for module in patches.modules("fabric"):
        patches.patch(module.Fabric, "__init__", _knowing("Fabric"))


def _knowing(what: str) -> Callable[[Any], Any]:
    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def make(self: Any, **asked: Any) -> None:
            init(self, **(settings(what, asked, here()) if dist.is_initialized() else asked))

        return make

    return wrap
