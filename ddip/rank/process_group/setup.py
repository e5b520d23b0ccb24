"""How torch sets up a group on this rank: the ranks agree before who is to be in it, and nobody can connect afterwards.

    agree    who is in the group, and is everybody there?      waits for the store, where it can be released
    open     if the group takes the listeners of another       so are those whom it waits for
    set up   gloo listens, connects to each rank, returns      milliseconds, since everybody is there; if one dies now,
                                                               a short timeout ends the others' wait for it to connect
    fence    what it listens on

The wrappers are called ``wrapper``, a name that is left out where a rank tells in which function it is.
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
"""Descriptor and address: the number may be another's when the socket is closed."""

SET_UP_SECONDS, SET_UP_SECONDS_PER_RANK = 5.0, 0.1
"""Timeout of a group while gloo connects its ranks, which have all met by then; gloo gives up after five times that."""

_fenced: set[Listener] = set()
"""To which nobody can connect."""


@functools.cache
def watch() -> None:
    """Once; from now on, each group of this process is set up so."""
    group: Any = dist.ProcessGroup
    if compat_torch.is_on(compat_torch.SET_UP):
        c10d.wrap_set_up(_set_up)
    if hasattr(group, "split_group") and compat_torch.is_on(compat_torch.COUNTS):
        group.split_group = _split(group.split_group)
    if rpc.is_available() and compat_torch.is_on(compat_torch.RPC):
        registry: Any = rpc.backend_registry  # type: ignore[attr-defined]
        registry._init_process_group = _of_rpc(registry._init_process_group)


def _set_up(method: Method) -> Method:
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
        if store is None or "gloo" not in str(backend).lower():  # the others do not wait here
            return _fence_after(functools.partial(method, *group, *args, **kwargs), size, str(backend))
        options = kwargs.get("backend_options", kwargs.get("pg_options", args[0] if args else None))
        me = dist.get_rank() if ranks else int(rank or 0)  # without ranks it is the default group, of all
        short, restored = c10d.setup_timeout(SET_UP_SECONDS + size * SET_UP_SECONDS_PER_RANK), None
        if str(backend).lower() == "gloo" and options is None and timeout is not None and short < timeout:
            kwargs["timeout"], restored = short, timeout
        with descriptors.spare(descriptors.of_a_group(size)):
            agreement = _Agreement(store, name, list(ranks) or list(range(size)), me, timeout)
            agreement._wait_for_all()
            if options is not None:
                agreement._open_listeners()
            made = _fence_after(functools.partial(method, *group, *args, **kwargs), size, str(backend))
        if restored is not None and isinstance(made[0], dist.ProcessGroup):
            c10d.set_group_timeout(restored, made[0])
        return made

    return wrapper


def _split(method: Method) -> Method:
    """Of the group that is split, the parts take the listeners."""

    @functools.wraps(method)
    def wrapper(parent: Any, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        begin = functools.partial(method, parent, ranks, *args, **kwargs)
        name, timeout = kwargs.get("group_name"), kwargs.get("timeout")
        with descriptors.spare(descriptors.of_a_group(len(ranks))):
            agreement = _Agreement(parent.get_group_store(), str(name), list(ranks), parent.rank(), timeout)
            if name is not None:
                agreement._wait_for_all()
            agreement._open_listeners()
            mixed = len({device.type for device in parent._device_types}) > 1
            return _fence_after(begin, len(ranks), "nccl" if mixed else "gloo")

    return wrapper


def _of_rpc(method: Method) -> Method:
    """RPC makes a gloo group of its own, from the `store`, which torch's other functions know nothing of."""

    @functools.wraps(method)
    def wrapper(store: Any, rank: int, size: int) -> Any:
        with descriptors.spare(descriptors.of_a_group(size)):
            return _fence_after(functools.partial(method, store, rank, size), size)

    return wrapper


def ports(listeners: set[Listener] | None = None) -> set[int]:
    """On which this rank has listened for others while its groups were set up: what came in there is gloo's.

    `listeners` are those that there are now, if that is known.
    """
    return {int(address[1]) for _, address in _fenced & (_listeners() if listeners is None else listeners)}


def _listeners() -> set[Listener]:
    return set(sockets.listeners().items())


def _fence_after(begin: Callable[[], Any], size: int, backend: str = "gloo") -> Any:
    """Set up a group of `size`, and fence each socket on which gloo listens for the other ranks.

    Where nccl connects the ranks here, too, none is: it listens on, for splits of its communicator, and it cannot be
    told which socket is whose.

    All connections are there then, unless gloo was told to connect when they are needed: a group with fewer connections
    than other ranks is left alone.
    """
    listening, connected = sockets.list_sockets()
    before, connections = set(listening.items()), len(connected)
    try:
        made = begin()
    finally:
        _fence(_fenced & before)
    group = made[0] if isinstance(made, tuple) else made
    if not c10d.connects_at_once(backend.lower()):
        listening, connected = sockets.list_sockets()
        new = set(listening.items()) - before
        if new and len(connected) - connections >= len(new) * (group.size() - 1):
            _fence(new)
    return made


def _fence(listeners: set[Listener]) -> None:
    global _fenced
    sockets.fence({number for number, _ in listeners})
    _fenced = (_fenced & _listeners() if _fenced else _fenced) | listeners


class _Agreement:
    """The ranks of a group to be, as this one knows them, meet in a store."""

    def __init__(self, store: Any, name: str, ranks: list[int], me: int, timeout: timedelta | None) -> None:
        self._store = dist.PrefixStore(f"ddip/{name}", store)  # type: ignore[attr-defined]
        self._ranks, self._me, self._timeout = ranks, me, timeout

    def _wait_for_all(self) -> None:
        """Wait until all ranks are there; raises RuntimeError if another one has other ranks for the same group.

        A rank that is not among them does not wait. gloo would connect ranks by their places in the lists, and those
        that find no partner would wait in C++, where nothing releases them.
        """
        mine = json.dumps([self._me, self._ranks])
        first, theirs = json.loads(self._store.compare_set("ranks", "", mine))
        if theirs != self._ranks:
            raise RuntimeError(
                f"the ranks do not agree who is in the new group: rank {self._me} has {self._ranks}, rank {first} has "
                f"{theirs}; all ranks must make all groups, with the same lists in the same order"
            )
        self._meet("here")

    def _open_listeners(self) -> None:
        """Open what this rank listens on, and wait until the others have done it: they would knock for a second."""
        if self._me in self._ranks:
            sockets.remove_fence({number for number, _ in _fenced & _listeners()})
            self._meet("open")

    def _meet(self, where: str) -> None:
        self._store.set(f"{where}/{self._me}", "")
        others = [f"{where}/{rank}" for rank in self._ranks if rank != self._me]
        if self._me in self._ranks and others:
            self._store.wait(others) if self._timeout is None else self._store.wait(others, self._timeout)
