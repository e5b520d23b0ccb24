"""Make waits for other ranks in a ``torch.distributed.Store`` interruptible, and let an abort end them.

torch waits in C++ until the timeout of the store, half an hour by default, and nothing can stop such a wait:

    FileStore, HashStore    torch's ``wait`` and ``get`` poll for a key every 10 ms; the functions here do so in Python.
                            C++ code (gloo while it sets up a group, RPC) polls by itself, and opens the file of a
                            FileStore each time. To end that, the file is replaced by a symbolic link to itself until
                            the wait has failed.
    TCPStore                It waits on its connection, which an abort shuts down (``sockets.py``). Before that, torch
                            retries the connection until there is a listener, so ddip waits for the listener first.

The wrapping functions are named ``wrapper``, because locations of ranks leave out that name.
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
_torch: Any = dist  # torch's type stubs lack its stores
_POLLED_STORES = (_torch.FileStore, _torch.HashStore)
POLL_SECONDS = 0.01
"""Poll interval, the same as in FileStore."""
CONNECT_SECONDS = 1.0
TCP_TIMEOUT = timedelta(seconds=300)
"""Timeout of stores; torch's default."""
BACKLOG = 1024
"""Limit of ranks that connect at the same time."""
_servers: dict[int, Any] = {}
"""Stores that this rank serves for the next group, by port."""
_files: set[str] = set()
"""Paths of the FileStores that this process has created."""
_served: set[int] = set()
"""Ports on which this rank has served a TCPStore."""


@functools.cache
def patch_stores(released: Callable[[], bool]) -> None:
    """Patch torch's stores so that waits in this process end when `released` returns True."""
    _torch.Store.wait = _wrap_wait(_torch.Store.wait, released)
    _torch.Store.get = _wrap_get(_torch.Store.get)
    for name, wrap in {
        "multi_get": _wrap_get,
        "barrier": _wrap_barrier,
        "queue_pop": _wrap_queue_pop(released),
    }.items():
        if hasattr(_torch.Store, name):  # older versions lack it
            setattr(_torch.Store, name, wrap(getattr(_torch.Store, name)))
    _torch.FileStore.__init__ = _wrap_file_store_init(_torch.FileStore.__init__)
    _torch.TCPStore.__init__ = _wrap_tcp_store_init(_torch.TCPStore.__init__, released)


def serve_store(address: str) -> int:
    """Serve the store of the next group on a free port of `address` only; return the port.

    A store that was served for a group that never formed ends.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    port = int(listener.getsockname()[1])
    _servers.clear()  # may have the store of a group that was never joined
    # not through the patched constructor: an aborted rank may serve, on its control thread, the group to join next
    served = _torch.TCPStore.__new__(_torch.TCPStore)
    original_init = getattr(_torch.TCPStore.__init__, "__wrapped__", _torch.TCPStore.__init__)
    original_init(
        served, address, port, None, True, TCP_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    _servers[port] = served
    _served.add(port)
    return port


def find_server(store: str) -> tuple[str, int]:
    """Return address and port of the store ``tcp://address:port/number``; empty and 0 for a file."""
    parts = urlsplit(store) if store.startswith("tcp:") else urlsplit("")
    return parts.hostname or "", parts.port or 0


def connect_store(store: str, rank: int, seconds: float) -> Any:
    """Connect to the store ``tcp://address:port/number`` for use by `rank`, and return it.

    Rank 0 serves it already, and gets that store without connecting. Raises DistStoreError if the store cannot be
    reached within `seconds`, or the wait is aborted.
    """
    address, port = find_server(store)
    if rank == 0:
        return _servers.pop(port)
    timeout = timedelta(seconds=seconds)
    connected = _torch.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    connected.set_timeout(TCP_TIMEOUT)
    return connected


def _wrap_wait(method: Method, released: Callable[[], bool]) -> Method:
    @functools.wraps(method)
    def wrapper(store: Any, keys: Sequence[str], *timeout: timedelta) -> Any:
        inner = _unwrap_prefixes(store)
        if not isinstance(inner, _POLLED_STORES):
            return method(store, keys, *timeout)
        end = time.monotonic() + (timeout or (inner.timeout,))[0].total_seconds()
        while not _has_keys(store, inner, keys):
            _raise_if_released(released, f"this rank waited for {', '.join(keys)} in a {type(inner).__name__}")
            if time.monotonic() >= end:
                return method(store, keys, timedelta(milliseconds=1))  # raises torch's timeout error
            time.sleep(POLL_SECONDS)
        return method(store, keys, *timeout)

    return wrapper


def _wrap_get(method: Method) -> Method:
    """Wrap ``get`` of a key, or ``multi_get`` of several, so that it waits with the patched ``wait``."""

    @functools.wraps(method)
    def wrapper(store: Any, key: str | Sequence[str]) -> Any:
        if isinstance(_unwrap_prefixes(store), _POLLED_STORES):
            store.wait([key] if isinstance(key, str) else key)
        return method(store, key)

    return wrapper


def _wrap_barrier(method: Method) -> Method:
    """Make ``barrier`` interruptible; keep torch's keys, so that processes without ddip can take part."""

    @functools.wraps(method)
    def wrapper(store: Any, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        if not isinstance(_unwrap_prefixes(store), _POLLED_STORES):
            method(store, key, world_size, *([] if timeout is None else [timeout]))
            return
        if store.add(f"{key}/num_members", 1) == world_size:
            store.set(f"{key}/last_member", "")
        store.wait([f"{key}/last_member"], *([] if timeout is None else [timeout]))

    return wrapper


def _wrap_queue_pop(released: Callable[[], bool]) -> Callable[[Method], Method]:
    def wrap_method(method: Method) -> Method:
        @functools.wraps(method)
        def wrapper(store: Any, key: str, block: bool = True) -> Any:
            inner = _unwrap_prefixes(store)
            if not block or not isinstance(inner, _POLLED_STORES):
                return method(store, key, block)
            end = time.monotonic() + inner.timeout.total_seconds()
            while True:
                try:
                    return method(store, key, False)
                except _torch.QueueEmptyError:
                    _raise_if_released(
                        released, f"this rank waited for an entry of queue {key} in a {type(inner).__name__}"
                    )
                    if time.monotonic() >= end:
                        raise
                time.sleep(POLL_SECONDS)

        return wrapper

    return wrap_method


def _wrap_tcp_store_init(method: Method, released: Callable[[], bool]) -> Method:
    @functools.wraps(method)
    def wrapper(store: Any, host_name: str, port: int, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(("world_size", "is_master", "timeout"), args, strict=False)) | kwargs
        if not arguments.get("is_master", False):
            seconds = arguments.get("timeout", TCP_TIMEOUT).total_seconds()
            end = time.monotonic() + seconds
            while not _is_listening(host_name, port):
                _raise_if_released(released, f"this rank tried to connect to the TCPStore at {host_name}:{port}")
                if time.monotonic() > end:  # C++ would wait for as long again, and no release would end that
                    problem = f"the TCPStore at {host_name}:{port} could not be reached for {seconds:g} s"
                    raise _torch.DistNetworkError(problem)
                time.sleep(POLL_SECONDS)
        else:
            _raise_if_released(
                released, f"this rank was about to wait for the others in the TCPStore at {host_name}:{port}"
            )
            _served.add(port)
        method(store, host_name, port, *args, **kwargs)

    return wrapper


def served_ports() -> set[int]:
    """Return the ports on which this rank has served stores; it also connects to these itself."""
    return set(_served)


def _wrap_file_store_init(method: Method) -> Method:
    @functools.wraps(method)
    def wrapper(store: Any, file_name: str, *args: Any, **kwargs: Any) -> None:
        _files.add(os.path.abspath(file_name))
        method(store, file_name, *args, **kwargs)

    return wrapper


class FileWaits:
    """Ends waits of C++ code of ``torch.distributed`` in a FileStore on the main thread, after an abort."""

    def __init__(self) -> None:
        self._position: tuple[int, int] | None = None
        self._moved_files: dict[str, str] = {}

    def end(self) -> bool:
        """End a wait if the main thread has not moved since the last call; return whether to call this again."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        in_torch = frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.distributed")
        former, self._position = self._position, (id(frame), frame.f_lasti) if frame is not None and in_torch else None
        if self._position is not None and self._position == former:
            for path in _files:
                with contextlib.suppress(OSError):  # the file was removed
                    self._replace_by_link(path)
        return in_torch

    def _replace_by_link(self, path: str) -> None:
        """Replace a file with a symbolic link to itself, so that opening it fails, if it is not one already."""
        if not os.path.islink(path):
            moved = f"{path}.ddip-{os.getpid()}"
            os.rename(path, moved)
            self._moved_files[path] = moved
            os.symlink(path, path)

    def close(self) -> None:
        """Restore the replaced files, because their stores may be used again."""
        for path, moved in self._moved_files.items():
            with contextlib.suppress(OSError):
                os.replace(moved, path)


def _unwrap_prefixes(store: Any) -> Any:
    while isinstance(store, _torch.PrefixStore):
        store = store.underlying_store
    return store


def _has_keys(store: Any, inner: Any, keys: Sequence[str]) -> bool:
    """Return whether `store` has all `keys`, without waiting for the file of a FileStore, as ``check`` alone would.

    `inner`: the store inside all PrefixStores of `store`.
    """
    return (not isinstance(inner, _torch.FileStore) or os.path.lexists(inner.path)) and bool(store.check(list(keys)))


def _is_listening(host: str, port: int) -> bool:
    """Return whether a process listens at `host` and `port`; also True after other errors.

    torch will report these.
    """
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            return True
    except (ConnectionRefusedError, TimeoutError):
        return False
    except (OSError, OverflowError, TypeError, ValueError):
        return True


def _raise_if_released(released: Callable[[], bool], what: str) -> None:
    if released():
        raise _torch.DistStoreError(f"{what}, and was unblocked")
