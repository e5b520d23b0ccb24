"""List the TCP connections of processes; read the kernel's tables, which may be long, once for all processes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from ddip.cluster.processes.links import TABLES
from ddip.protocol.old_versions import tcp_connections

Ends: TypeAlias = "list[Any]"
"""Local host and port, remote host and port."""
V4 = "::ffff:"
"""Prefix of an IPv4 address on an IPv6 socket."""


def list_connections(pids: Sequence[int]) -> list[list[Ends]]:
    """Return the TCP connections of each of `pids`, in the same order; each is local host and port, then remote ones.

    The list of a process that has ended is empty.
    """
    if sys.platform != "linux":
        return [_connections_by_psutil(pid) for pid in pids]
    inodes = [_socket_inodes(pid) for pid in pids]
    ends = _ends_by_inode({inode for process_inodes in inodes for inode in process_inodes})
    return [[ends[inode] for inode in process_inodes if inode in ends] for process_inodes in inodes]


def _connections_by_psutil(pid: int) -> list[Ends]:
    with contextlib.suppress(psutil.Error):
        return [[*c.laddr, *c.raddr] for c in tcp_connections(psutil.Process(pid)) if c.raddr]
    return []


def _socket_inodes(pid: int) -> list[str]:
    """Return the inode numbers of the sockets that a process has open."""
    found = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                kind, _, number = os.readlink(descriptor).partition(":")
                if kind == "socket":
                    found.append(number.strip("[]"))
    return found


def _ends_by_inode(wanted: set[str]) -> dict[str, Ends]:
    """Return both ends of each connected socket among the inodes `wanted`, by inode."""
    found = {}
    for table in TABLES:
        with contextlib.suppress(OSError), table.open() as lines:
            next(lines)
            for line in lines:
                fields = line.split()  # proc(5): number, both ends, state, queues, timer, tries, user, timeout, inode
                if fields[9] in wanted and not fields[2].endswith(":0000"):
                    found[fields[9]] = [*_parse_address(fields[1]), *_parse_address(fields[2])]
    return found


def _parse_address(written: str) -> tuple[str, int]:
    """Parse an address such as ``0100007F:1F90``, whose words are in this machine's byte order."""
    host, _, port = written.partition(":")
    raw = b"".join(struct.pack("=I", int(host[begin : begin + 8], 16)) for begin in range(0, len(host), 8))
    name = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return name.removeprefix(V4), int(port, 16)
