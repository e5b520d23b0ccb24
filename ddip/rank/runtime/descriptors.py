"""Reserve file descriptors for ddip on a rank, because a cell may have opened all that the limit allows."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator

FILES, A_PEERS_FILES = 16, 2
"""Descriptors that a group needs on each rank, and those that it needs additionally per rank of the group."""
MORE = 1024
"""Amount by which the soft limit is raised while ddip needs descriptors, if the hard limit allows it."""

_lock = threading.Lock()
_users = 0
"""Number of callers in `raise_limit`."""
_former = (0, 0)
"""Soft and hard limit before the first of them."""


def of_a_group(size: int) -> int:
    """Return how many descriptors a group of `size` ranks needs on each rank."""
    return FILES + A_PEERS_FILES * size


@contextlib.contextmanager
def raise_limit(count: int) -> Iterator[None]:
    """Raise the limit so that `count` more descriptors can be opened, and restore it on exit.

    torch's C++ code ends the process if it gets no descriptor. Main thread and control thread may be in here at the
    same time. Raises OSError if the hard limit does not allow `count` more.
    """
    global _users, _former
    with _lock:
        _users += 1
        if _users == 1:
            _former = resource.getrlimit(resource.RLIMIT_NOFILE)
            _raise_limit(*_former)
    try:
        _ensure_available(count)
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                resource.setrlimit(resource.RLIMIT_NOFILE, _former)


def _raise_limit(soft: int, hard: int) -> None:
    if soft != resource.RLIM_INFINITY:
        most = soft + MORE if hard == resource.RLIM_INFINITY else min(soft + MORE, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _ensure_available(count: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        opened = len(os.listdir("/dev/fd"))
    except OSError:  # no descriptor is left to list the folder
        opened = limit
    if limit != resource.RLIM_INFINITY and opened + count > limit:
        raise OSError(
            f"no file descriptors are left: {opened} of {limit} are open (ulimit -n), and {count} more are needed"
        )
