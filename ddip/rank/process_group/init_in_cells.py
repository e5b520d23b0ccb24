"""``init_process_group`` in a cell: code that was written for torchrun calls it, and the group is there already.

It is accepted where it asks for the group that is there, and refused with a word where it asks for another. Where
there is no group, as after ``destroy_process_group``, it is torch's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddip.protocol.rank_spec import backends_of
from ddip.rank.runtime import c10d

ACCEPTED = "\x1b[90mddip has formed the group already; this call of init_process_group may stay\x1b[0m"


def watch(is_ours: Callable[[], bool]) -> None:
    """From now on. `is_ours`: is the group that is there the one that the notebook has had formed?"""
    own = dist.init_process_group
    signature = inspect.signature(own)

    @functools.wraps(own)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        if not is_ours():
            return own(*args, **kwargs)
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        _ensure_there(asked.arguments)
        if asked.arguments["timeout"] is not None:
            c10d.set_timeout(asked.arguments["timeout"])
        print(ACCEPTED)
        return None

    dist.init_process_group = distributed_c10d.init_process_group = wrapper


def _ensure_there(asked: dict[str, Any]) -> None:
    """Raise ValueError if the group that is there is not the one that is `asked` for."""
    size, rank, there = dist.get_world_size(), dist.get_rank(), sorted(set(backends_of(dist.get_backend_config())))
    now, typed, instead = f"ddip has formed a group of {size} ranks over {' and '.join(there)}", "", ""
    wanted = asked["backend"]
    if wanted is not None and not set(backends_of(str(wanted))) <= set(there):
        typed, instead = f"backend={str(wanted)!r}", _makedip(str(wanted))
    if asked["world_size"] not in (-1, None, size):
        typed, instead = f"world_size={asked['world_size']}", f"%makedip -n {asked['world_size']}"
    if asked["rank"] not in (-1, None, rank):
        typed, instead = f"rank={asked['rank']}", "rank=rank, or leave it out"
    if typed:
        raise ValueError(f"init_process_group({typed}): {now}; type {instead}")


def _makedip(backend: str) -> str:
    """How to get a group over `backend`."""
    return "%makedip -g all, which needs GPUs" if "nccl" in backend else f"%makedip -b {backend}"
