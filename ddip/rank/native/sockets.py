"""Shut down gloo's connections in this process, and fence its listening sockets against new connections.

A rank that waits in a collective is in C++ and cannot be interrupted. When the connections of its group are shut down,
gloo's thread sees that they are closed, and the collective raises. gloo has no other way: its only timeout is that of
the group, half an hour by default. `fence_listeners` makes Linux drop all packets for gloo's listening sockets, since
gloo keeps these open.

The sockets are found among the file descriptors of the process, by the two ends of their connections.
Risk: a user's socket with the same ends, which is impossible, or a descriptor that is closed in the meantime, so each
one is used through a duplicate.
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
"""Socket options of Linux that Python does not define."""
MAPPED_IPV4 = "::ffff:"
"""Prefix of an IPv4 address on an IPv6 socket."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A classic Berkeley packet filter program: ``ret 0``, accept no packet."""
TEST_SECONDS = 10.0
"""Longest wait of a self-test: a loaded machine may need seconds, and a failure turns off the unblocking of ranks."""


def _iterate_tcp_sockets() -> Iterator[tuple[int, socket.SocketType]]:
    """Yield each TCP socket of this process: its descriptor, and a duplicate that is closed afterwards.

    It has the C type below ``socket.socket``, which would look up enum members: a large group has many sockets.
    """
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = socket.SocketType(fileno=os.dup(int(name)))
        except OSError:  # closed in the meantime
            continue
        try:
            if duplicate.type == socket.SOCK_STREAM and duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield int(name), duplicate
        finally:
            duplicate.close()


def _is_listening(duplicate: socket.SocketType) -> bool:
    return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _find_ends(duplicate: socket.SocketType) -> Ends | None:
    """Return both ends of a connection, own host and port first; None if the socket is not connected."""
    try:
        (our_host, our_port), (their_host, their_port) = duplicate.getsockname()[:2], duplicate.getpeername()[:2]
    except OSError:
        return None
    # the client of a TCPStore is an IPv6 socket, even if the server's is an IPv4 one
    return our_host.removeprefix(MAPPED_IPV4), our_port, their_host.removeprefix(MAPPED_IPV4), their_port


def list_sockets() -> tuple[dict[int, tuple[Any, ...]], list[Ends]]:
    """Return host and port of each listening socket, by its descriptor, and both ends of each connection.

    Both ends are own host, own port, other host, other port.
    """
    listening, connected = dict[int, tuple[Any, ...]](), list[Ends]()
    for number, duplicate in _iterate_tcp_sockets():
        if _is_listening(duplicate):
            listening[number] = duplicate.getsockname()[:2]
        elif (ends := _find_ends(duplicate)) is not None:
            connected.append(ends)
    return listening, connected


def listening_sockets() -> dict[int, tuple[Any, ...]]:
    """Return host and port of each listening socket, by its descriptor."""
    return list_sockets()[0]


def tcp_connections() -> list[Ends]:
    """Return both ends of each TCP connection of this process: own host and port, then the other's."""
    return list_sockets()[1]


def fence_listeners(numbers: Collection[int]) -> None:
    """Make Linux drop all packets for these listening sockets, so that no one can connect to them.

    `numbers` are their descriptors. Existing connections are not affected. gloo does not stop listening when it has
    all its connections, and fails if its socket is closed, so the descriptors stay open. On other systems, nothing
    happens.
    """
    if not switches.is_on(switches.LISTENERS):
        return
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    _set_option(numbers, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))  # struct sock_fprog


def remove_fence(numbers: Collection[int]) -> None:
    """Remove the packet filter of `fence_listeners` from these sockets."""
    _set_option(numbers, SO_DETACH_FILTER, 0)


def _set_option(numbers: Collection[int], option: int, value: int | bytes) -> None:
    """Set an option of the listening sockets with these descriptors, on Linux only."""
    if sys.platform != "linux" or not numbers:
        return
    for number, duplicate in _iterate_tcp_sockets():
        if number in numbers and _is_listening(duplicate):
            with contextlib.suppress(OSError):  # the kernel has no such filters, or none is attached
                duplicate.setsockopt(socket.SOL_SOCKET, option, value)


def can_shut_down() -> bool:
    """Return whether `shut_down` ends a test connection; raises OSError if that cannot be made."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2], TEST_SECONDS) as client,
    ):
        server.settimeout(TEST_SECONDS)
        with server.accept()[0] as accepted:
            accepted.settimeout(TEST_SECONDS)
            ends = _find_ends(client)
            return ends is not None and shut_down([ends]) == 1 and accepted.recv(1) == b""


def can_fence() -> bool:
    """Return whether the system accepts the packet filter of `fence_listeners`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        fence_listeners([server.fileno()])
        try:
            server.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)  # ENOENT if no filter is attached
        except OSError:
            return False
    return True


def own_connections(ports: Collection[int]) -> list[Ends]:
    """Return both ends of each connection of this process to itself through one of `ports`."""
    pairs = tcp_connections()
    reversed_ends = {(*ends[2:], *ends[:2]) for ends in pairs}
    return [ends for ends in pairs if ends in reversed_ends and (ends[1] in ports or ends[3] in ports)]


def connections_to(address: str, port: int) -> list[Ends]:
    """Return both ends of each connection of this process to `port` at `address`."""
    return [ends for ends in tcp_connections() if ends[2:] == (address, port)]


def shut_down(connections: list[Ends], ports: Collection[int] = ()) -> int:
    """Shut down these `connections`, and those that were accepted at `ports`; return their number.

    Threads that wait on one of them are unblocked at once. The descriptors stay open for their owners to close.
    """
    requested = {tuple(ends) for ends in connections}
    count = 0
    if not switches.is_on(switches.SOCKETS):
        return count
    for _, connection in _iterate_tcp_sockets():
        ends = _find_ends(connection)
        if ends is not None and (ends in requested or ends[1] in ports):
            with contextlib.suppress(OSError):  # the other end has closed it already
                connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count
