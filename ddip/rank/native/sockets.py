"""Shut down the connections of gloo in this process, and close its listeners to others.

A rank that waits in a collective is in C++ and hears nothing. When the connections of its group are shut down, gloo's
thread sees that they are closed, and the collective raises. gloo has no other way: its only timeout is that of the
group, half an hour by default. `fence` has Linux drop whatever comes to a listener of gloo, which keeps it open.

The sockets are found among the file descriptors of the process, by the two ends of their connections.
Risk: a socket of the user's with the same ends, which cannot be, or a descriptor that is closed meanwhile: each is
used through a duplicate.
Switches: ``DDIP_NATIVE_SOCKETS``, ``DDIP_NATIVE_LISTENERS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from typing import Any

from ddip.protocol import switches
from ddip.protocol.reports import Ends

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Of Linux; Python has no names for them."""
V4 = "::ffff:"
"""How an IPv6 socket names an IPv4 address."""
REJECT = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of the classic Berkeley packet filter: ``ret 0``, take no packet."""


def _tcp() -> Iterator[tuple[int, socket.SocketType]]:
    """Each TCP socket: its descriptor, and a duplicate to be used before the next is asked for.

    Of the type that is below Python's own, which looks up names of numbers: a large group has many sockets.
    """
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            ours = socket.SocketType(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        try:
            if ours.type == socket.SOCK_STREAM and ours.family in (socket.AF_INET, socket.AF_INET6):
                yield int(name), ours
        finally:
            ours.close()


def _listens(ours: socket.SocketType) -> bool:
    return bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ends(ours: socket.SocketType) -> Ends | None:
    """Both ends; None: it is not connected."""
    try:
        (our_host, our_port), (their_host, their_port) = ours.getsockname()[:2], ours.getpeername()[:2]
    except OSError:
        return None
    # a client of a TCPStore is an IPv6 socket, whose server may be an IPv4 one
    return our_host.removeprefix(V4), our_port, their_host.removeprefix(V4), their_port


def table() -> tuple[dict[int, tuple[Any, ...]], list[Ends]]:
    """Host and port of each socket that listens, by its descriptor; both ends of each connection of this process."""
    listening, connected = dict[int, tuple[Any, ...]](), list[Ends]()
    for number, ours in _tcp():
        if _listens(ours):
            listening[number] = ours.getsockname()[:2]
        elif (ends := _ends(ours)) is not None:
            connected.append(ends)
    return listening, connected


def listeners() -> dict[int, tuple[Any, ...]]:
    """Host and port of each socket that listens, by its descriptor."""
    return table()[0]


def connections() -> list[Ends]:
    """Both ends of each TCP connection of this process."""
    return table()[1]


def fence(numbers: Collection[int]) -> None:
    """Have the system drop whatever comes to these sockets that listen: nobody can connect from now on.

    Connections that are there do not notice, and the descriptors stay as they are: gloo neither stops to listen when it
    has all its connections, nor bears that anybody else closes the socket. Only Linux can do it.
    """
    if not switches.is_on(switches.LISTENERS):
        return
    program = ctypes.create_string_buffer(REJECT, len(REJECT))
    _set(numbers, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))  # struct sock_fprog


def open_again(numbers: Collection[int]) -> None:
    """Take away what `fence` has done to these sockets."""
    _set(numbers, SO_DETACH_FILTER, 0)


def _set(numbers: Collection[int], option: int, value: int | bytes) -> None:
    """An option of sockets that listen, by their descriptors."""
    if sys.platform != "linux" or not numbers:
        return
    for number, ours in _tcp():
        if number in numbers and _listens(ours):
            with contextlib.suppress(OSError):  # a kernel without such filters, or there is none
                ours.setsockopt(socket.SOL_SOCKET, option, value)


def can_shut_down() -> bool:
    """Return whether `shut_down` ends a connection of this process with itself; raises OSError if there can be none."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2], 1) as one:
        server.settimeout(1)
        with server.accept()[0] as other:
            other.settimeout(1)
            ends = _ends(one)
            return ends is not None and shut_down([ends]) == 1 and other.recv(1) == b""


def can_fence() -> bool:
    """Return whether the system takes the filter of `fence`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        fence([server.fileno()])
        try:
            server.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)  # ENOENT if there is none
        except OSError:
            return False
    return True


def to_itself(ports: Collection[int]) -> list[Ends]:
    """The connections that this process has with itself at one of its `ports`, by both ends."""
    table = connections()
    back = {(*ends[2:], *ends[:2]) for ends in table}
    return [ends for ends in table if ends in back and (ends[1] in ports or ends[3] in ports)]


def shut_down(connections: list[Ends], ports: Collection[int] = ()) -> int:
    """Shut down those of this process's `connections`, and all that came in at its `ports`; returns how many.

    Whoever waits on one of them is told at once. Their descriptors stay open, for those who own them to close.
    """
    wanted = {tuple(ends) for ends in connections}
    found = 0
    if not switches.is_on(switches.SOCKETS):
        return found
    for _, connection in _tcp():
        ends = _ends(connection)
        if ends is not None and (ends in wanted or ends[1] in ports):
            with contextlib.suppress(OSError):  # the other end was quicker
                connection.shutdown(socket.SHUT_RDWR)
            found += 1
    return found
