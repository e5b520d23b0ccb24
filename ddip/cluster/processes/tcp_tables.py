"""The TCP connections of processes, as the kernel lists them: its tables, which may be long, are read once for all."""

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

Ends: TypeAlias = "list[Any]"
"""Host and port of this end, host and port of the other."""
V4 = "::ffff:"
"""How an IPv6 socket names an IPv4 address."""


def connections(pids: Sequence[int]) -> list[list[Ends]]:
    """Both ends of each TCP connection of each process; none of one that has ended."""
    if sys.platform != "linux":
        return [_of_one(pid) for pid in pids]
    sockets = [_sockets(pid) for pid in pids]
    ends = _ends({one for its in sockets for one in its})
    return [[ends[one] for one in its if one in ends] for its in sockets]


def _of_one(pid: int) -> list[Ends]:
    with contextlib.suppress(psutil.Error):
        return [[*c.laddr, *c.raddr] for c in psutil.Process(pid).net_connections("tcp") if c.raddr]
    return []


def _sockets(pid: int) -> list[str]:
    """Numbers of the sockets that a process has open."""
    found = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                kind, _, number = os.readlink(descriptor).partition(":")
                if kind == "socket":
                    found.append(number.strip("[]"))
    return found


def _ends(wanted: set[str]) -> dict[str, Ends]:
    """Both ends of those that are connected, by their numbers."""
    found = {}
    for table in TABLES:
        with contextlib.suppress(OSError), table.open() as lines:
            next(lines)
            for line in lines:
                fields = line.split()  # proc(5): number, both ends, state, queues, timer, tries, user, timeout, inode
                if fields[9] in wanted and not fields[2].endswith(":0000"):
                    found[fields[9]] = [*_address(fields[1]), *_address(fields[2])]
    return found


def _address(written: str) -> tuple[str, int]:
    """Of ``0100007F:1F90``: words in the order of this machine."""
    host, _, port = written.partition(":")
    raw = b"".join(struct.pack("=I", int(host[begin : begin + 8], 16)) for begin in range(0, len(host), 8))
    name = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return name.removeprefix(V4), int(port, 16)
