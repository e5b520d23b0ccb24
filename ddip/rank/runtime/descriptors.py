"""File descriptors for what ddip does itself on a rank: a cell may have opened all that the limit allows."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator

FILES, A_PEERS_FILES = 16, 2
"""So many a group takes on a rank, and so many more for each of its ranks."""
MORE = 1024
"""So many beyond the soft limit, if the hard one allows it, while ddip needs them."""

_lock = threading.Lock()
_users = 0
"""How many need spare descriptors now."""
_former = (0, 0)
"""The limits before the first of them came."""


def of_a_group(size: int) -> int:
    """How many a group of `size` takes."""
    return FILES + A_PEERS_FILES * size


@contextlib.contextmanager
def spare(count: int) -> Iterator[None]:
    """While this lasts, `count` more can be opened; raises OSError if not even the hard limit allows them.

    C++ code of torch ends the process where it gets none. Main thread and control thread may be in here at once.
    """
    global _users, _former
    with _lock:
        _users += 1
        if _users == 1:
            _former = resource.getrlimit(resource.RLIMIT_NOFILE)
            _raise(*_former)
    try:
        _check(count)
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                resource.setrlimit(resource.RLIMIT_NOFILE, _former)


def _raise(soft: int, hard: int) -> None:
    if soft != resource.RLIM_INFINITY:
        most = soft + MORE if hard == resource.RLIM_INFINITY else min(soft + MORE, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _check(count: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        opened = len(os.listdir("/dev/fd"))
    except OSError:  # there is none to look with
        opened = limit
    if limit != resource.RLIM_INFINITY and opened + count > limit:
        raise OSError(
            f"no file descriptors are left: {opened} of {limit} are open (ulimit -n), and {count} more are needed"
        )
