"""Accept ``init_process_group`` in cells, where code written for torchrun calls it although ddip has formed the group.

If the call asks for that group, it does nothing, and prints that the line may stay, unless ``%diprun`` runs a script.
If it asks for a different group, it raises an error that says what to type. If ddip's group does not exist, as after
``destroy_process_group``, torch's function runs unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddip.protocol.rank_spec import backends_of
from ddip.rank.runtime import c10d, current

ACCEPTED = "\x1b[90mddip has already formed the group; this call of init_process_group may stay\x1b[0m"


def wrap_init(is_ours: Callable[[], bool]) -> None:
    """Wrap ``init_process_group``; `is_ours` returns whether ddip has formed the current default group."""
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        if not is_ours():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _check_request(bound.arguments)
        if bound.arguments["timeout"] is not None:
            c10d.set_timeout(bound.arguments["timeout"])
        if current.script_file() is None:  # scripts run unchanged
            print(ACCEPTED)
        return None

    dist.init_process_group = distributed_c10d.init_process_group = wrapper


def _check_request(requested: dict[str, Any]) -> None:
    """Raise ValueError if the `requested` backend, world size or rank is not that of the current group."""
    size, rank, backends = dist.get_world_size(), dist.get_rank(), sorted(set(backends_of(dist.get_backend_config())))
    current, typed, instead = f"ddip has formed a group of {size} ranks over {' and '.join(backends)}", "", ""
    backend = requested["backend"]
    if backend is not None and not set(backends_of(str(backend))) <= set(backends):
        typed, instead = f"backend={str(backend)!r}", _makedip_command(str(backend))
    if requested["world_size"] not in (-1, None, size):
        typed, instead = f"world_size={requested['world_size']}", f"%makedip -n {requested['world_size']}"
    if requested["rank"] not in (-1, None, rank):
        typed, instead = f"rank={requested['rank']}", "rank=rank, or leave it out"
    if typed:
        raise ValueError(f"init_process_group({typed}): {current}; type {instead}")


def _makedip_command(backend: str) -> str:
    """Return the magic that forms a group over `backend`."""
    return "%makedip -g all, which needs GPUs" if "nccl" in backend else f"%makedip -b {backend}"
