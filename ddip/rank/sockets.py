"""The TCP connections of this process, found among its file descriptors; a rank's group talks through some of them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any, TypeAlias

Ends: TypeAlias = tuple[Any, ...]
"""Host and port of this end, host and port of the other."""


def _connected() -> Iterator[tuple[socket.socket, Ends]]:
    """Each connected TCP socket, as a duplicate to be used before the next is asked for."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            ours = socket.socket(fileno=os.dup(int(name)))
            with ours:
                if ours.type == socket.SOCK_STREAM and ours.family in (socket.AF_INET, socket.AF_INET6):
                    yield ours, (*ours.getsockname()[:2], *ours.getpeername()[:2])


def connections() -> list[Ends]:
    """Both ends of each TCP connection of this process."""
    return [ends for _, ends in _connected()]


def shut_down(connections: list[Ends]) -> int:
    """Shut down those of this process's `connections`: whoever waits on one of them is told at once; returns how many.

    Their descriptors stay open, for those who own them to close.
    """
    wanted = {tuple(ends) for ends in connections}
    found = 0
    for connection, ends in _connected():
        if ends in wanted:
            with contextlib.suppress(OSError):  # the other end was quicker
                connection.shutdown(socket.SHUT_RDWR)
            found += 1
    return found
