"""Another user connects to the ranks while their group is formed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

import psutil
import pytest

import ddip
from ddip.errors import GroupError
from ddip.protocol.old_versions import tcp_connections

PAYLOADS: dict[str, Callable[[int], bytes]] = {
    "what gloo expects": lambda n: struct.pack("<Q", n),
    "random bytes": lambda n: os.urandom(64),
    "nothing": lambda n: b"",
}


def connect_to_new_ports(pids: list[int], payload: Callable[[int], bytes], stop: threading.Event) -> None:
    """Connect to each new listening port of these processes, and send something."""
    connections, seen = [], set()
    while not stop.is_set():
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                for connection in tcp_connections(psutil.Process(pid)):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr not in seen:
                        seen.add(connection.laddr)
                        for n in range(40):
                            connections.append(socket.socket())
                            connections[-1].setblocking(False)
                            with contextlib.suppress(OSError):
                                connections[-1].connect_ex(connection.laddr)
                                connections[-1].send(payload(n))
    for one in connections:
        one.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_unknown_connections_during_a_rebuild_cost_no_rank(payload: str) -> None:
    with ddip.Group(3, failure_grace=0.1, timeout=30) as group:
        group.run("import torch, torch.distributed as dist\nkept = rank")
        pids = [member.pid for member in group.members]
        stop = threading.Event()
        thread = threading.Thread(target=connect_to_new_ports, args=(pids, PAYLOADS[payload], stop))
        thread.start()
        proof = "x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 3 and kept == rank"
        for _ in range(5):
            with contextlib.suppress(GroupError):
                with contextlib.suppress(ddip.CellError):
                    group.run("if rank == 0: raise ValueError\ndist.barrier()", timeout=10)
                group.run(proof, timeout=20)
        stop.set()
        thread.join()
        deadline = time.monotonic() + 60
        while True:  # a rank may still wait for such a connection
            with contextlib.suppress(GroupError):
                group.run(proof, timeout=20)
                break
            assert time.monotonic() < deadline
            time.sleep(1)
        assert [member.pid for member in group.members] == pids
