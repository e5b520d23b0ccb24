"""Waits for other ranks in a store (``torch.distributed.Store``), where an interrupt or a release can end them.

torch waits in C++ until the timeout of the store, half an hour by default, and nothing can stop that:

    FileStore, HashStore    ``wait`` and ``get`` look for a key every 10 ms; so do we, in Python
    TCPStore                waits on its connection, which a release shuts down (``sockets.py``); but before, it tries
                            to connect until somebody listens, so we wait until somebody does

The functions are called ``wrapper``, a name that is left out where a rank tells in which function it is.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import torch.distributed as dist

Method: TypeAlias = Callable[..., Any]
_torch: Any = dist  # torch's own types do not know its stores
_POLLED = (_torch.FileStore, _torch.HashStore)
POLL_SECONDS = 0.01
"""As long as FileStore itself sleeps."""
CONNECT_SECONDS = 1.0
TCP_TIMEOUT = timedelta(seconds=300)
"""torch's default."""
BACKLOG = 1024
"""Ranks that may connect at once."""
_servers: dict[int, Any] = {}
"""Stores that are served for a group to be, by port."""
_served: set[int] = set()
"""Ports at which this rank has served a TCPStore."""


@functools.cache
def watch(released: Callable[[], bool]) -> None:
    """Once; from now on, the waits of this process end when `released` says so."""
    _torch.Store.wait = _wait(_torch.Store.wait, released)
    _torch.Store.get = _get(_torch.Store.get)
    _torch.TCPStore.__init__ = _connect(_torch.TCPStore.__init__, released)


def listen(address: str) -> int:
    """Serve the store of the next group, on a free port of `address` and nowhere else; returns the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    port = int(listener.getsockname()[1])
    _servers.clear()  # of a group that nobody has joined
    # a rank that was released may serve, on its control thread, what it will join next
    served = _torch.TCPStore.__new__(_torch.TCPStore)
    own = getattr(_torch.TCPStore.__init__, "__wrapped__", _torch.TCPStore.__init__)
    own(served, address, port, None, True, TCP_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    _servers[port] = served
    _served.add(port)
    return port


def client(store: str, rank: int, seconds: float) -> Any:
    """The store ``tcp://address:port/number``, as `rank` uses it; rank 0 serves it already.

    Raises DistStoreError if it cannot be reached for so many `seconds`, or is released.
    """
    parts = urlsplit(store)
    assert parts.port is not None
    if rank == 0:
        return _servers.pop(parts.port)
    timeout = timedelta(seconds=seconds)
    reached = _torch.TCPStore(parts.hostname, parts.port, None, False, timeout, wait_for_workers=False)
    reached.set_timeout(TCP_TIMEOUT)
    return reached


def _wait(method: Method, released: Callable[[], bool]) -> Method:
    @functools.wraps(method)
    def wrapper(store: Any, keys: Sequence[str], *timeout: timedelta) -> Any:
        inner = _innermost(store)
        if not isinstance(inner, _POLLED):
            return method(store, keys, *timeout)
        end = time.monotonic() + (timeout or (inner.timeout,))[0].total_seconds()
        while not _has(store, inner, keys):
            _raise_if(released, f"this rank waited for {', '.join(keys)} in a {type(inner).__name__}")
            if time.monotonic() >= end:
                return method(store, keys, timedelta(milliseconds=1))  # it raises what torch raises
            time.sleep(POLL_SECONDS)
        return method(store, keys, *timeout)

    return wrapper


def _get(method: Method) -> Method:
    @functools.wraps(method)
    def wrapper(store: Any, key: str) -> Any:
        if isinstance(_innermost(store), _POLLED):
            store.wait([key])
        return method(store, key)

    return wrapper


def _connect(method: Method, released: Callable[[], bool]) -> Method:
    @functools.wraps(method)
    def wrapper(store: Any, host_name: str, port: int, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("world_size", "is_master", "timeout"), args, strict=False)) | kwargs
        if not given.get("is_master", False):
            end = time.monotonic() + given.get("timeout", TCP_TIMEOUT).total_seconds()
            while not _listens(host_name, port) and time.monotonic() < end:
                _raise_if(released, f"this rank tried to connect to the TCPStore at {host_name}:{port}")
                time.sleep(POLL_SECONDS)
        else:
            _raise_if(released, f"this rank was about to wait for the others in the TCPStore at {host_name}:{port}")
            _served.add(port)
        method(store, host_name, port, *args, **kwargs)

    return wrapper


def ports() -> set[int]:
    """At which this rank has served stores: it waits in them itself, through connections of its own."""
    return set(_served)


def _innermost(store: Any) -> Any:
    while isinstance(store, _torch.PrefixStore):
        store = store.underlying_store
    return store


def _has(store: Any, inner: Any, keys: Sequence[str]) -> bool:
    """Are all `keys` there? ``check`` alone would wait, in C++, for the file itself."""
    return (not isinstance(inner, _torch.FileStore) or os.path.lexists(inner.path)) and bool(store.check(list(keys)))


def _listens(host: str, port: int) -> bool:
    """Does anybody? Also true where it cannot be found out: torch will say why."""
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            return True
    except (ConnectionRefusedError, TimeoutError):
        return False
    except (OSError, OverflowError, TypeError, ValueError):
        return True


def _raise_if(released: Callable[[], bool], what: str) -> None:
    if released():
        raise _torch.DistStoreError(f"{what}, and was released")
