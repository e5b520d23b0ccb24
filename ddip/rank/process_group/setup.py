"""Set up process groups safely: the ranks first agree on the members, and no one else can connect afterwards.

    meet      the ranks compare their member lists and wait      a wait in the store, which a release can end
              for each other
    open      if the group reuses listening sockets of           likewise
              another one, their fences are removed
    set up    gloo listens, and connects to each rank            takes milliseconds, since all ranks are ready; if one
                                                                 dies now, a short timeout ends the others' wait for it
    fence     gloo's listening sockets

The wrappers are called ``wrapper``, a name that is omitted when ddip shows in which function a rank is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
import torch.distributed.rpc as rpc

from ddip.protocol import compat_torch
from ddip.rank.native import sockets
from ddip.rank.runtime import c10d, descriptors

Method: TypeAlias = Callable[..., Any]
Listener: TypeAlias = "tuple[int, tuple[Any, ...]]"
"""Descriptor and address of a listening socket: the descriptor alone may be reused when the socket is closed."""

SET_UP_SECONDS, SET_UP_SECONDS_PER_RANK = 5.0, 0.1
"""Timeout while gloo connects the ranks, which are all ready by then; gloo gives up after five times as long."""

_fenced: set[Listener] = set()
"""Listening sockets to which no one can connect."""


@functools.cache
def wrap_functions() -> None:
    """Wrap torch's functions that set up groups, once."""
    group: Any = dist.ProcessGroup
    if compat_torch.is_on(compat_torch.SET_UP):
        c10d.wrap_set_up(_wrap_set_up)
    if hasattr(group, "split_group") and compat_torch.is_on(compat_torch.COUNTS):
        group.split_group = _wrap_split(group.split_group)
    if rpc.is_available() and compat_torch.is_on(compat_torch.RPC):
        registry: Any = rpc.backend_registry  # type: ignore[attr-defined]
        registry._init_process_group = _wrap_rpc(registry._init_process_group)


def _wrap_set_up(method: Method) -> Method:
    """Wrap the function that sets up a group; its wrapper follows the steps in the module's docstring."""

    @functools.wraps(method)
    def wrapper(
        size: int,
        rank: int | None,
        ranks: Sequence[int],
        backend: str,
        store: Any,
        name: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        group, timeout = (size, rank, ranks, backend, store, name), kwargs.get("timeout")
        if store is None or "gloo" not in str(backend).lower():  # without a rendezvous of the ranks
            return _fence_after(functools.partial(method, *group, *args, **kwargs), size, str(backend))
        options = kwargs.get("backend_options", kwargs.get("pg_options", args[0] if args else None))
        own_rank = dist.get_rank() if ranks else int(rank or 0)  # no ranks: the default group, of all ranks
        short, restored = c10d.setup_timeout(SET_UP_SECONDS + size * SET_UP_SECONDS_PER_RANK), None
        if str(backend).lower() == "gloo" and options is None and timeout is not None and short < timeout:
            kwargs["timeout"], restored = short, timeout
        with descriptors.raise_limit(descriptors.of_a_group(size)):
            rendezvous = _Rendezvous(store, name, list(ranks) or list(range(size)), own_rank, timeout)
            rendezvous._wait_for_all()
            if options is not None:
                rendezvous._open_listeners()
            result = _fence_after(functools.partial(method, *group, *args, **kwargs), size, str(backend))
        if timeout == dist.default_pg_timeout:  # torch's default, which the user has not chosen
            restored = c10d.WAIT_TIMEOUT
        if restored is not None and isinstance(result[0], dist.ProcessGroup):
            c10d.set_group_timeout(restored, result[0])
        return result

    return wrapper


def _wrap_split(method: Method) -> Method:
    """Wrap ``split_group``: the new groups reuse the listening sockets of the group that is split."""

    @functools.wraps(method)
    def wrapper(parent: Any, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        make = functools.partial(method, parent, ranks, *args, **kwargs)
        name, timeout = kwargs.get("group_name"), kwargs.get("timeout")
        with descriptors.raise_limit(descriptors.of_a_group(len(ranks))):
            rendezvous = _Rendezvous(parent.get_group_store(), str(name), list(ranks), parent.rank(), timeout)
            if name is not None:
                rendezvous._wait_for_all()
            rendezvous._open_listeners()
            mixed = len({device.type for device in parent._device_types}) > 1
            return _fence_after(make, len(ranks), "nccl" if mixed else "gloo")

    return wrapper


def _wrap_rpc(method: Method) -> Method:
    """Wrap the function with which RPC makes its own gloo group, bypassing torch's other functions."""

    @functools.wraps(method)
    def wrapper(store: Any, rank: int, size: int) -> Any:
        with descriptors.raise_limit(descriptors.of_a_group(size)):
            return _fence_after(functools.partial(method, store, rank, size), size)

    return wrapper


def listening_ports(listeners: set[Listener] | None = None) -> set[int]:
    """Return the ports of this rank's fenced sockets; connections that were accepted there belong to gloo.

    `listeners` are the current listening sockets, if the caller has them.
    """
    return {int(address[1]) for _, address in _fenced & (_current_listeners() if listeners is None else listeners)}


def _current_listeners() -> set[Listener]:
    return set(sockets.listening_sockets().items())


def _fence_after(make: Callable[[], Any], size: int, backend: str = "gloo") -> Any:
    """Call `make` to make a group of `size` ranks, then fence the sockets on which gloo listens for them.

    Nothing is fenced in two cases. If nccl also connects the ranks at once, it keeps listening for splits of its
    communicator, and its sockets look like those of gloo. If there are fewer new connections than other ranks, gloo may
    be configured to connect on demand.
    """
    listening, connected = sockets.list_sockets()
    before, connections = set(listening.items()), len(connected)
    try:
        result = make()
    finally:  # the rendezvous may have opened these
        _fence_listeners(_fenced & before)
    group = result[0] if isinstance(result, tuple) else result
    if not c10d.connects_at_once(backend.lower()):
        listening, connected = sockets.list_sockets()
        new = set(listening.items()) - before
        if new and len(connected) - connections >= len(new) * (group.size() - 1):
            _fence_listeners(new)
    return result


def _fence_listeners(listeners: set[Listener]) -> None:
    global _fenced
    sockets.fence_listeners({number for number, _ in listeners})
    _fenced = (_fenced & _current_listeners() if _fenced else _fenced) | listeners


class _Rendezvous:
    """A rendezvous in a store of the ranks that are about to make a group, as listed on this rank."""

    def __init__(self, store: Any, name: str, ranks: list[int], own_rank: int, timeout: timedelta | None) -> None:
        self._store = dist.PrefixStore(f"ddip/{name}", store)  # type: ignore[attr-defined]
        self._ranks, self._rank, self._timeout = ranks, own_rank, timeout

    def _wait_for_all(self) -> None:
        """Wait until all ranks are ready; raises RuntimeError if the ranks' member lists differ.

        A rank that is not in the list does not wait. gloo would connect ranks by their positions in the lists, and a
        rank without a partner would wait in C++, where a release cannot unblock it.
        """
        own_list = json.dumps([self._rank, self._ranks])
        first, first_list = json.loads(self._store.compare_set("ranks", "", own_list))
        if first_list != self._ranks:
            raise RuntimeError(
                f"the ranks disagree on the members of the new group: rank {self._rank} has {self._ranks}, rank "
                f"{first} has {first_list}; all ranks must create all groups with the same lists in the same order"
            )
        self._meet("here")

    def _open_listeners(self) -> None:
        """Remove this rank's fences and wait for the others: TCP would retry a dropped connection after 1 s."""
        if self._rank in self._ranks:
            sockets.remove_fence({number for number, _ in _fenced & _current_listeners()})
            self._meet("open")

    def _meet(self, step: str) -> None:
        """Announce that this rank has reached `step`, and wait for all listed ranks; others do not wait."""
        self._store.set(f"{step}/{self._rank}", "")
        keys = [f"{step}/{rank}" for rank in self._ranks if rank != self._rank]
        if self._rank in self._ranks and keys:
            self._store.wait(keys) if self._timeout is None else self._store.wait(keys, self._timeout)
