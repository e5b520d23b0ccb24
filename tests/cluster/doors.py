"""The listening sockets of a cluster's processes, and a stranger who sends random bytes to each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, order=True)
class Listener:
    """A socket on which a process accepts connections."""

    role: str
    """Role of the process: controller, rank, preload, engine."""
    kind: str
    """unix, abstract, tcp, udp."""
    address: str
    """Path, or host and port."""


def find_listeners(processes: Iterable[psutil.Process]) -> set[Listener]:
    """Return all sockets on which `processes` listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
            title = " ".join(process.cmdline())
            role = title.split()[1] if title.startswith("ddip ") else title
            own_inodes = set(_socket_inodes(process.pid))
            found |= {
                Listener(role, kind, where) for inode, kind, where in _all_listeners(process.pid) if inode in own_inodes
            }
    return found


def _socket_inodes(pid: int) -> Iterable[str]:
    """Return the inodes of the sockets among the descriptors of `pid`."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            if match:
                yield match[1]


def _all_listeners(pid: int) -> Iterable[tuple[str, str, str]]:
    """Return inode, kind and address of every listener in the network namespace of `pid`; see proc(5)."""
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & 0x10000:  # __SO_ACCEPTCON
            where = fields[7] if len(fields) > 7 else ""
            yield fields[6], "unix" if where.startswith("/") else "abstract", where
    for table, listens in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == listens:
                yield fields[9], table.removesuffix("6"), _format_address(fields[1])


def _format_address(text: str) -> str:
    """Format ``0100007F:1F90`` as ``127.0.0.1:8080``.

    IPv6 addresses other than loopback stay as they are.
    """
    host, port = text.split(":")
    if len(host) == 8:
        host = ".".join(str(byte) for byte in reversed(bytes.fromhex(host)))
    elif host == "0" * 24 + "01000000":
        host = "::1"
    elif host.startswith("0" * 16 + "FFFF0000"):
        host = ".".join(str(byte) for byte in reversed(bytes.fromhex(host[24:])))
    return f"{host}:{int(port, 16)}"


def count_descriptors(processes: Iterable[psutil.Process]) -> dict[int, int]:
    """Return how many descriptors each of `processes` has open."""
    return {process.pid: process.num_fds() for process in processes}


STRANGER = """
import collections, json, os, random, socket, sys

doors, count, user, seed = json.load(sys.stdin)
if user is not None:
    os.setgroups([]), os.setgid(user), os.setuid(user)
draw = random.Random(seed)
ready = b"\\x05READY\\x0bSocket-Type\\x00\\x00\\x00\\x06DEALER"
hello = b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32)

def message():
    junk = draw.randbytes(draw.randrange(200))
    return draw.choice([
        junk,
        b"\\x01\\x00\\x05\\x00junk",  # a peer of ZeroMQ 2, without a handshake
        b"\\x01\\x00" + bytes([min(len(junk) + 1, 254)]) + b"\\x01" + junk,
        b"\\xff" + bytes(7) + b"\\x01\\x7f\\x01\\x05" + junk,  # of ZeroMQ 3
        hello[:draw.randrange(64)] + junk,
        hello + b"\\x04" + bytes([len(ready)]) + ready[:draw.randrange(len(ready))],
        b"GET / HTTP/1.1\\r\\n\\r\\n",
    ])

done = collections.Counter()
for _ in range(count):
    kind, address = draw.choice(doors)
    host, _, port = address.rpartition(":")
    path = kind in ("unix", "abstract")
    try:
        with socket.socket(socket.AF_UNIX if path else socket.AF_INET6 if ":" in host else socket.AF_INET) as door:
            door.settimeout(5 if path else 0.001)  # who listens on loopback, and takes connections, does so at once
            door.connect(address.replace("@", "\\0", 1) if path else (host, int(port)))
            door.sendall(message())
            if draw.random() < 0.1:
                door.recv(64)
        done["entered"] += 1
    except PermissionError:
        done["refused"] += 1
    except TimeoutError:
        done["unanswered"] += 1
    except OSError as error:
        done[type(error).__name__] += 1
print(json.dumps(done))
"""
NOBODY = 65534


def send_random_messages(
    doors: Iterable[Listener], count: int, user: int | None, seed: int, seconds: float = 60
) -> dict[str, int]:
    """Send `count` random messages to `doors` as the user ID `user` (None: ours); return the outcomes."""
    asked = json.dumps([[(door.kind, door.address) for door in sorted(doors)], count, user, seed])
    done = subprocess.run(
        [sys.executable, "-c", STRANGER], input=asked, capture_output=True, text=True, timeout=seconds, check=True
    )
    return dict(json.loads(done.stdout))
