"""Waits for other ranks in a store (``torch.distributed.Store``), where an interrupt or a release can end them.

torch waits in C++ until the timeout of the store, half an hour by default, and nothing can stop that:

    FileStore, HashStore    ``wait`` and ``get`` look for a key every 10 ms; so do we, in Python
                            C++ code (gloo while it sets up a group, RPC) does it by itself, and opens the file of a
                            FileStore each time: a link to itself is in its place until the wait has failed
    TCPStore                waits on its connection, which a release shuts down (``sockets.py``); but before, it tries
                            to connect until somebody listens, so we wait until somebody does

The functions are called ``wrapper``, a name that is left out where a rank tells in which function it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
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
_files: set[str] = set()
"""Of the FileStores that this process has made."""
_served: set[int] = set()
"""Ports at which this rank has served a TCPStore."""


@functools.cache
def watch(released: Callable[[], bool]) -> None:
    """Once; from now on, the waits of this process end when `released` says so."""
    _torch.Store.wait = _wait(_torch.Store.wait, released)
    _torch.Store.get = _get(_torch.Store.get)
    for name, wrap in {"multi_get": _get, "barrier": _barrier, "queue_pop": _queue_pop(released)}.items():
        if hasattr(_torch.Store, name):  # not in older versions
            setattr(_torch.Store, name, wrap(getattr(_torch.Store, name)))
    _torch.FileStore.__init__ = _recorded(_torch.FileStore.__init__)
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
    """``get`` of a key, or ``multi_get`` of several."""

    @functools.wraps(method)
    def wrapper(store: Any, key: str | Sequence[str]) -> Any:
        if isinstance(_innermost(store), _POLLED):
            store.wait([key] if isinstance(key, str) else key)
        return method(store, key)

    return wrapper


def _barrier(method: Method) -> Method:
    """With torch's own keys: a process without ddip may take part."""

    @functools.wraps(method)
    def wrapper(store: Any, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        if not isinstance(_innermost(store), _POLLED):
            method(store, key, world_size, *([] if timeout is None else [timeout]))
            return
        if store.add(f"{key}/num_members", 1) == world_size:
            store.set(f"{key}/last_member", "")
        store.wait([f"{key}/last_member"], *([] if timeout is None else [timeout]))

    return wrapper


def _queue_pop(released: Callable[[], bool]) -> Callable[[Method], Method]:
    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def wrapper(store: Any, key: str, block: bool = True) -> Any:
            inner = _innermost(store)
            if not block or not isinstance(inner, _POLLED):
                return method(store, key, block)
            end = time.monotonic() + inner.timeout.total_seconds()
            while True:
                try:
                    return method(store, key, False)
                except _torch.QueueEmptyError:
                    _raise_if(released, f"this rank waited for an entry of queue {key} in a {type(inner).__name__}")
                    if time.monotonic() >= end:
                        raise
                time.sleep(POLL_SECONDS)

        return wrapper

    return wrap


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


def _recorded(method: Method) -> Method:
    @functools.wraps(method)
    def wrapper(store: Any, file_name: str, *args: Any, **kwargs: Any) -> None:
        _files.add(os.path.abspath(file_name))
        method(store, file_name, *args, **kwargs)

    return wrapper


class FileWaits:
    """Waits of the main thread in a FileStore, from C++ code of ``torch.distributed``, since a release."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._aside: dict[str, str] = {}

    def end(self) -> bool:
        """End a wait; returns whether to look again. A thread at the same place as before waits there."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        in_torch = frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.distributed")
        former, self._place = self._place, (id(frame), frame.f_lasti) if frame is not None and in_torch else None
        if self._place is not None and self._place == former:
            for path in _files:
                with contextlib.suppress(OSError):  # it has been removed
                    self._break(path)
        return in_torch

    def _break(self, path: str) -> None:
        """Put a link to itself in place of a file: who opens it fails at once. Another rank may have done it."""
        if not os.path.islink(path):
            aside = f"{path}.ddip-{os.getpid()}"
            os.rename(path, aside)
            self._aside[path] = aside
            os.symlink(path, path)

    def close(self) -> None:
        """Put the files back: a store may be used again."""
        for path, aside in self._aside.items():
            with contextlib.suppress(OSError):
                os.replace(aside, path)


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
