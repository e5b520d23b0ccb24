"""Every private name of ``torch.distributed`` that ddip uses, and why no public one does.

``tests/unit/test_private_names.py`` fails when a release changes one of them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "torch.distributed.fsdp": "FSDPModule",
}
"""Modules that hold the group that they were made in, by the module that defines them."""
TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""Of ``distributed_c10d._world``: what it knows of each group."""
LOST = (
    "this {name} was made in a group that is no more: the ranks have formed another since. Wrap its module again, such "
    "as model = DDP(model.module); the parameters are as they were"
)


def world() -> dist.ProcessGroup | None:
    """The default group."""
    return dist.group.WORLD if dist.is_initialized() else None


def subgroups() -> int:
    """How many groups there are besides the default one."""
    return max(0, len(distributed_c10d._world.pg_names) - 1)


def counts() -> dict[str, tuple[int, int]]:
    """How many collectives this rank has begun so far, by group and device, and the size of the group.

    There is no public count.
    """
    found = {}
    if dist.is_initialized():
        for group, name in list(distributed_c10d._world.pg_names.items()):
            for device in group._device_types:
                with contextlib.suppress(RuntimeError):  # a backend that does not count
                    backend: Any = group._get_backend(device)
                    found[f"{name} {device.type}"] = backend._get_sequence_number_for_group(), group.size()
    return found


def abort() -> None:
    """Abort whatever waits in a backend that can do that (nccl); returns at once.

    ``ProcessGroup.abort`` is public from torch 2.6 on; before that it was a method of the backend only.
    """
    if not dist.is_initialized():
        return
    backends = []
    for group in list(distributed_c10d._world.pg_names):
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):
                backend = group._get_backend(device)
                if device.type != "cpu" and backend not in backends:
                    backends.append(backend)
    for backend in backends:  # each in a thread: an abort may itself wait for the others
        stop = getattr(backend, "abort", None) or getattr(backend, "_abort", None)
        if stop is not None:
            threading.Thread(target=_quietly, args=(stop,), name="ddip-abort", daemon=True).start()


def _quietly(stop: Any) -> None:
    with contextlib.suppress(Exception):
        stop()


def forget() -> None:
    """Leave all groups, whatever state they are in; they must have been released if they were stuck."""
    with contextlib.suppress(Exception):  # a backend that fails when it is shut down has still to go
        if dist.is_initialized():
            dist.destroy_process_group()
    world = distributed_c10d._world
    distributed_c10d._update_default_pg(None)
    for name in TABLES:
        getattr(world, name).clear()
    distributed_c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    world.group_count = 0  # it is part of the next group's name, and counts those that failed to form


def retire_wrappers() -> int:
    """Have each wrapper (DDP, FSDP) of the group that is left say so when it is used; returns how many there are.

    DDP's reducer goes: it has hooks on the parameters, which would take part in the backward pass of the next wrapper.
    """
    loaded = [(sys.modules[module], name) for module, name in WRAPPERS.items() if module in sys.modules]
    kinds = tuple(getattr(module, name) for module, name in loaded if hasattr(module, name))
    if not kinds:
        return 0
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    retired = 0
    for wrapper in wrappers:
        if wrapper.__dict__.get("_ddip_retired"):
            continue
        wrapper.__dict__["_ddip_retired"] = True
        for name in ("reducer", "logger"):
            if name in wrapper.__dict__:
                wrapper.__dict__[name] = None
        wrapper.register_forward_pre_hook(_refuse, prepend=True)
        retired += 1
    return retired


def drop(wrapper: torch.nn.Module) -> None:
    """Be done with a wrapper of ddip's own: its hooks on the parameters go now, and not when it is collected."""
    wrapper.__dict__["_ddip_retired"] = True
    for name in ("reducer", "logger"):
        wrapper.__dict__.pop(name, None)


def store() -> Any:
    """Through which the group was formed; there is no public way to it."""
    return distributed_c10d._get_default_store()


def _refuse(wrapper: torch.nn.Module, *_: Any) -> None:
    raise RuntimeError(LOST.format(name=type(wrapper).__name__))


def is_broken_connection(error: BaseException) -> bool:
    """Is `error` what a collective raises whose connections were shut down, or whose communicator was aborted?

    gloo raises a bare RuntimeError; its text begins with the place in its source.
    """
    kinds = tuple(getattr(dist, name) for name in ("DistError",) if hasattr(dist, name))
    text = str(error)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo/transport", "NCCL"))
    )
