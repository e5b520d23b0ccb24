"""Access process groups through private names of ``torch.distributed`` for which no public name exists.

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

WAIT_TIMEOUT = timedelta(days=1)
"""Timeout of collectives and stores for which the user has set none. torch's half an hour would end a collective that
waits for a rank in the debugger; ddip and the stop button end waits that are in vain."""
TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""Tables of ``distributed_c10d._world`` with an entry per group."""


def default_group() -> dist.ProcessGroup | None:
    """Return the default group; None if there is none."""
    return dist.group.WORLD if dist.is_initialized() else None


def count_subgroups() -> int:
    """Return the number of groups besides the default one."""
    return max(0, len(distributed_c10d._world.pg_names) - 1)


def has_rpc() -> bool:
    """Return whether ``torch.distributed.rpc`` is running in this process."""
    is_available = rpc.is_available() and compat_torch.is_on(compat_torch.RPC)
    return is_available and rpc.api._is_current_rpc_agent_set()  # type: ignore[attr-defined, no-any-return]


def named_groups() -> dict[dist.ProcessGroup, str]:
    """Return all groups of this rank with their names, which are the same on all ranks."""
    return dict(distributed_c10d._world.pg_names) if dist.is_initialized() else {}


def counting_backends(group: dist.ProcessGroup) -> tuple[list[str], list[Any]]:
    """Return the backends of `group` that number their operations, after a list with a device type for each.

    It is the first type that the backend serves. There is no public count.
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
    """Replace the function `f` that sets up groups, except split groups, with ``wrap(f)``.

    Its first arguments are size, this rank in the group, ranks (none for the default group), backend, store and name.
    """
    distributed_c10d._new_process_group_helper = wrap(distributed_c10d._new_process_group_helper)


def groups_made() -> int:
    """Return how many groups this rank has created.

    The next group's name contains this number, so it must be equal on all ranks.
    """
    return int(distributed_c10d._world.group_count)


def set_groups_made(count: int) -> None:
    """Raise this rank's count of created groups to `count`, that of other ranks."""
    distributed_c10d._world.group_count = max(count, distributed_c10d._world.group_count)


def _device_backends() -> list[Any]:
    """Return the backends of all groups that do not serve the CPU (NCCL).

    Their collectives return before they are done.
    """
    found: list[Any] = []
    for group in named_groups() if compat_torch.is_on(compat_torch.COUNTS) else ():
        by_type: dict[str, Any] = {}
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):
                by_type[device.type] = group._get_backend(device)
        cpu = by_type.pop("cpu", None)
        found += [backend for backend in by_type.values() if backend is not cpu and backend not in found]
    return found


def connects_at_once(backend: str) -> bool:
    """Return whether `backend` connects the ranks as soon as a group is created.

    The NCCL backend of torch 2.15 does; the former one connects early only with `connect_devices`.
    """
    names = backends_of(backend)
    is_new = hasattr(dist, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    return "nccl2" in names or ("nccl" in names and is_new)


def connect_devices(device: torch.device) -> None:
    """Make NCCL connect the ranks now, rather than at a cell's first collective."""
    for backend in _device_backends():
        connect = getattr(backend, "eager_connect_single_device", None)
        if connect is not None:
            connect(device)


def begun_on_devices() -> int:
    """Return how many operations this rank has begun in accelerator backends, in all its groups."""
    begun = 0
    for backend in _device_backends():
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            begun += backend._get_sequence_number_for_group()
    return begun


ABORTS = ("abort", "_abort", "_shutdown")
_aborted: list[Any] = []
"""Backends whose abort has begun, since each is aborted only once."""
_aborts: list[threading.Thread] = []
"""Threads of these aborts."""


def abort_collectives() -> None:
    """Begin to abort pending collectives in accelerator backends (NCCL); see `wait_for_aborts`.

    ``abort`` is public since torch 2.6; before, it was a private method, named ``_shutdown`` in 2.4. Each abort has a
    thread, because it may wait for the abort of another communicator, or for a kernel that cannot be stopped.
    """
    for backend in _device_backends():
        stop = next((getattr(backend, name) for name in ABORTS if hasattr(backend, name)), None)
        if stop is not None and backend not in _aborted:
            _aborted.append(backend)
            _aborts.append(threading.Thread(target=_call_without_errors, args=(stop,), name="ddip-abort", daemon=True))
            _aborts[-1].start()


def wait_for_aborts(seconds: float) -> bool:
    """Wait for all aborts, `seconds` at most; return whether all are done.

    The group must not be destroyed before: torch would free the communicator during the abort.
    """
    until = time.monotonic() + seconds
    for thread in list(_aborts):
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in _aborts)


def _call_without_errors(stop: Any) -> None:
    with contextlib.suppress(Exception):
        stop()


def destroy_groups() -> None:
    """Destroy all groups in whatever state; stuck collectives must have been aborted before."""
    with contextlib.suppress(Exception):  # if a backend fails to shut down, the group is removed all the same
        if dist.is_initialized():
            dist.destroy_process_group()
    world = distributed_c10d._world
    distributed_c10d._update_default_pg(None)
    for name in TABLES:
        getattr(world, name).clear()
    _aborted.clear()
    _aborts.clear()
    distributed_c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    world.group_count = 0  # part of the next group's name; it also counts groups that failed to form


def share_state(module: torch.nn.Module, leave_out: Collection[str], bucket_bytes: int) -> None:
    """Copy rank 0's parameters and buffers of `module`, but those named in `leave_out`, to all ranks. A collective.

    They are sent in buckets of `bucket_bytes` bytes.
    """
    group = default_group()
    assert group is not None
    distributed_utils._sync_module_states(module, group, bucket_bytes, 0, leave_out, broadcast_buffers=True)


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default group and its store."""
    set_group_timeout(timeout, default_group())
    default_store().set_timeout(timeout)


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Set the timeout of `group`.

    ``set_timeout`` is public since torch 2.15; before, it was a private function.
    """
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    change(timeout, group)


def gloo_timeout(group: Any) -> timedelta | None:
    """Return the timeout of the gloo backend of `group`; None if another backend serves the CPU."""
    backend: Any = None
    with contextlib.suppress(RuntimeError, AttributeError):  # no backend serves the CPU; a release of torch without it
        backend = group._get_backend(torch.device("cpu"))
    is_gloo = dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)
    return getattr(backend.options, "_timeout", None) if is_gloo else None


def shortest_timeout() -> timedelta | None:
    """Return the shortest timeout of this rank's gloo groups that the user has set, or None.

    torch's default, which cannot be changed before torch 2.9, counts as set.
    """
    timeouts = [timeout for group in named_groups() if (timeout := gloo_timeout(group)) is not None]
    return min((timeout for timeout in timeouts if timeout < WAIT_TIMEOUT), default=None)


def setup_timeout(seconds: float) -> timedelta:
    """Return the timeout for creating a group, normally `seconds`.

    It is torch's default if the timeout cannot be changed later, since all ranks would have to begin each collective
    within `seconds`: with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, torch checks each collective in a second group; before
    torch 2.9, the timeout that is set for a gloo group has no effect on its collectives.
    """
    is_detail = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    is_fixed = is_detail or not hasattr(dist.ProcessGroup, "set_timeout")
    return dist.default_pg_timeout if is_fixed else timedelta(seconds=seconds)


def default_store() -> Any:
    """Return the store of the default group; torch has no public function for it."""
    return distributed_c10d._get_default_store()


def is_broken_connection(error: BaseException) -> bool:
    """Return whether a collective raised `error` because its connections or communicator were aborted."""
    kinds = tuple(getattr(dist, name) for name in ("DistError",) if hasattr(dist, name))
    return isinstance(error, kinds) or any(word in _runtime_error_text(error) for word in (*GLOO_TEXTS, "NCCL"))


GLOO_TEXTS = ("gloo/transport", "Application timeout caused pair closure", "Connection closed by peer")
"""Texts that identify gloo's RuntimeErrors, which have no class; most begin with a path of gloo's source."""


def is_connection_lost(error: BaseException | None) -> bool:
    """Return whether `error`, or one of its causes, comes from a collective whose group is unusable since."""
    kinds = tuple(getattr(dist, name) for name in ("DistBackendError",) if hasattr(dist, name))
    for _ in range(10):
        if error is None:
            break
        if isinstance(error, kinds) or any(word in _runtime_error_text(error) for word in GLOO_TEXTS):
            return True
        cause, context = (BaseException.__dict__[name].__get__(error) for name in ("__cause__", "__context__"))
        error = cause or context
    return False


def _runtime_error_text(error: BaseException) -> str:
    """Return the text arguments of `error`, joined by spaces; "" if it is not a RuntimeError.

    It does not call ``__str__``, which may be user code.
    """
    return " ".join(part for part in error.args if isinstance(part, str)) if isinstance(error, RuntimeError) else ""
