"""Process groups by private names of ``torch.distributed``, and why no public one does.

``compat_torch.py`` lists the names; ``tests/unit/test_private_names.py`` fails when a release changes what they do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, rpc
from torch.distributed import utils as distributed_utils

from ddip.protocol import compat_torch
from ddip.protocol.rank_spec import backends_of

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


def world() -> dist.ProcessGroup | None:
    """The default group."""
    return dist.group.WORLD if dist.is_initialized() else None


def subgroups() -> int:
    """How many groups there are besides the default one."""
    return max(0, len(distributed_c10d._world.pg_names) - 1)


def has_rpc() -> bool:
    """Return whether ``torch.distributed.rpc`` was begun in this process, and not shut down."""
    is_there = rpc.is_available() and compat_torch.is_on(compat_torch.RPC)
    return is_there and rpc.api._is_current_rpc_agent_set()  # type: ignore[attr-defined, no-any-return]


def groups() -> dict[dist.ProcessGroup, str]:
    """All groups that this rank is in, and their names, which are the same on all ranks."""
    return dict(distributed_c10d._world.pg_names) if dist.is_initialized() else {}


def counting_backends(group: dist.ProcessGroup) -> tuple[list[str], list[Any]]:
    """The backends of `group` that count what is begun, each with the first device that it is for.

    There is no public count.
    """
    devices, backends = [], []
    for device in sorted(group._device_types, key=str) if compat_torch.is_on(compat_torch.COUNTS) else ():
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            backend: Any = group._get_backend(device)
            backend._get_sequence_number_for_group()
            if backend not in backends:
                devices.append(device.type)
                backends.append(backend)
    return devices, backends


def wrap_set_up(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrap(f)`` in place of the function that sets up each group, but those that are split from another.

    Its first arguments: size, this rank in the group, ranks (none for the default group), backend, store, name.
    """
    distributed_c10d._new_process_group_helper = wrap(distributed_c10d._new_process_group_helper)


def groups_made() -> int:
    """How many groups this rank has made: the next group's name is made of it, so it must be the same on all ranks."""
    return int(distributed_c10d._world.group_count)


def set_groups_made(count: int) -> None:
    """Other ranks have made so many."""
    distributed_c10d._world.group_count = max(count, distributed_c10d._world.group_count)


def _device_backends() -> list[Any]:
    """Of all groups, the backends that serve no CPU (nccl): their collectives return before they are done."""
    found: list[Any] = []
    for group in groups() if compat_torch.is_on(compat_torch.COUNTS) else ():
        by_type: dict[str, Any] = {}
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):
                by_type[device.type] = group._get_backend(device)
        cpu = by_type.pop("cpu", None)
        found += [backend for backend in by_type.values() if backend is not cpu and backend not in found]
    return found


def connects_at_once(backend: str) -> bool:
    """Does nccl connect the ranks as soon as a group is made? The one of torch 2.15 does, the former one when asked."""
    names = backends_of(backend)
    is_new = hasattr(dist, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    return "nccl2" in names or ("nccl" in names and is_new)


def connect_devices(device: torch.device) -> None:
    """Have nccl connect the ranks now, and not in the middle of a cell."""
    for backend in _device_backends():
        connect = getattr(backend, "eager_connect_single_device", None)
        if connect is not None:
            connect(device)


def begun_on_devices() -> int:
    """How many operations this rank has begun in backends of accelerators, in all its groups."""
    begun = 0
    for backend in _device_backends():
        with contextlib.suppress(RuntimeError):  # one that does not count
            begun += backend._get_sequence_number_for_group()
    return begun


ABORTS = ("abort", "_abort", "_shutdown")
_aborted: list[Any] = []
"""Backends of the groups that are left next: each is aborted once."""
_aborts: list[threading.Thread] = []


def abort() -> None:
    """Begin to abort whatever waits in a backend that can do that (nccl); `wait_for_aborts` knows when it is done.

    ``abort`` is public from torch 2.6 on; before that it was a private method, in 2.4 called ``_shutdown``. Each is in
    a thread: an abort may wait for that of another communicator, and for a kernel that nobody can stop.
    """
    for backend in _device_backends():
        stop = next((getattr(backend, name) for name in ABORTS if hasattr(backend, name)), None)
        if stop is not None and backend not in _aborted:
            _aborted.append(backend)
            _aborts.append(threading.Thread(target=_quietly, args=(stop,), name="ddip-abort", daemon=True))
            _aborts[-1].start()


def wait_for_aborts(seconds: float) -> bool:
    """Wait until all aborts are done, for at most `seconds`; False if one is not.

    The group must not be destroyed meanwhile: torch takes the communicator away from under the abort.
    """
    until = time.monotonic() + seconds
    for thread in list(_aborts):
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in _aborts)


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
    _aborted.clear()
    _aborts.clear()
    distributed_c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    world.group_count = 0  # it is part of the next group's name, and counts those that failed to form


def share_state(module: torch.nn.Module, leave_out: Collection[str], bucket_bytes: int) -> None:
    """Send rank 0's parameters and buffers of `module` to all ranks, but those of the names to `leave_out`."""
    group = world()
    assert group is not None
    distributed_utils._sync_module_states(module, group, bucket_bytes, 0, leave_out, broadcast_buffers=True)


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default group and its store."""
    set_group_timeout(timeout, world())
    store().set_timeout(timeout)


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Set the timeout of `group`.

    ``set_timeout`` is public in torch 2.15; before that it was a private function.
    """
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    change(timeout, group)


def setup_timeout(seconds: float) -> timedelta:
    """Return the timeout with which to form a group that should take `seconds` at most.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch checks each collective in a second group, which cannot be reached and
    keeps the timeout for good: the ranks would have to begin each collective within that time.
    """
    is_detail = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    return dist.default_pg_timeout if is_detail else timedelta(seconds=seconds)


def store() -> Any:
    """Through which the group was formed; there is no public way to it."""
    return distributed_c10d._get_default_store()


def is_broken_connection(error: BaseException) -> bool:
    """Is `error` what a collective raises whose connections were shut down, or whose communicator was aborted?"""
    kinds = tuple(getattr(dist, name) for name in ("DistError",) if hasattr(dist, name))
    return isinstance(error, kinds) or any(word in _text(error) for word in (*GLOO_TEXTS, "NCCL"))


GLOO_TEXTS = ("gloo/transport", "Application timeout caused pair closure", "Connection closed by peer")
"""Parts of the texts of gloo's bare RuntimeErrors; most begin with the place in its source."""


def is_connection_lost(error: BaseException | None) -> bool:
    """Tell if `error`, or an error that has led to it, comes from a collective whose group can no longer be used."""
    kinds = tuple(getattr(dist, name) for name in ("DistBackendError",) if hasattr(dist, name))
    for _ in range(10):
        if error is None:
            break
        if isinstance(error, kinds) or any(word in _text(error) for word in GLOO_TEXTS):
            return True
        cause, context = (BaseException.__dict__[name].__get__(error) for name in ("__cause__", "__context__"))
        error = cause or context
    return False


def _text(error: BaseException) -> str:
    """The arguments of a RuntimeError as text. No `__str__` is asked, which may be a user's."""
    return " ".join(part for part in error.args if isinstance(part, str)) if isinstance(error, RuntimeError) else ""
