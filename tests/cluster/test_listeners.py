"""Only the other ranks can connect to a rank, and only while their group is formed."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import ddip
from ddip.protocol.old_versions import tcp_connections

from .environment import environment
from .variants import few

PROOF = "y = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"
SETUP = "import os, torch, torch.distributed as dist\nx = torch.ones(1)"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can fence a socket")
STRANGER = """
import os, select, socket, sys
count, *ports = map(int, sys.argv[1:])
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
accepted = 0
for some in [ports[number::len(ports) // 5 + 1] for number in range(len(ports) // 5 + 1)]:
    for _ in range(count // 100):
        sockets = [socket.socket() for _ in range(100 * len(some))]
        for number, one in enumerate(sockets):
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", some[number % len(some)]))
        accepted += len(select.select([], sockets, [], 0.02)[1]) if sockets else 0
        for one in sockets: one.close()
print(accepted)
"""


def listening_addresses(group: ddip.Group) -> list[tuple[str, int]]:
    """Return every address on which a rank listens."""
    return [
        tuple(connection.laddr)
        for member in group.members
        for connection in tcp_connections(psutil.Process(member.pid))
        if connection.status == psutil.CONN_LISTEN
    ]


def try_connections(count: int, ports: list[int]) -> int:
    """Open and close `count` connections to each port; return how many succeeded.

    Connects as another user if possible.
    """
    command = [sys.executable, "-c", STRANGER, str(count), *map(str, ports)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def count_descriptors(group: ddip.Group) -> list[int]:
    return [len(os.listdir(f"/proc/{member.pid}/fd")) for member in group.members]


@pytest.mark.grid
@linux
@pytest.mark.native("listeners")
def test_many_foreign_connections_to_each_listener_break_no_rank(cells: ddip.Group) -> None:
    cells.run(f"{SETUP}\nimport resource\nkept = resource.getrlimit(resource.RLIMIT_NOFILE)")
    cells.run("resource.setrlimit(resource.RLIMIT_NOFILE, (1024, kept[1]))\npair = dist.new_group([0, 1])")
    before, addresses = count_descriptors(cells), listening_addresses(cells)
    assert len(addresses) >= 4 and {host for host, _ in addresses} == {"127.0.0.1"}
    assert try_connections(1500, [port for _, port in addresses]) == 0
    assert count_descriptors(cells) == before
    cells.run(f"resource.setrlimit(resource.RLIMIT_NOFILE, kept)\n{PROOF}\ndist.all_reduce(x, group=pair)")


MAKE = {
    "a subgroup": "made = dist.new_group([0, 1])",
    "groups of one rank and of both": "made = dist.new_group([rank], use_local_synchronization=True)\n"
    "made = dist.new_group([0, 1])",
    "a mesh": "from torch.distributed.device_mesh import init_device_mesh\n"
    "made = init_device_mesh('cpu', (1, 2), mesh_dim_names=('a', 'b'))['b'].get_group()",
    "a group that is split": "made = dist.split_group(split_ranks=[[0, 1]])",
    "a group with options": "made = dist.new_group([0, 1], pg_options=dist.group.WORLD._get_backend(device).options)",
    "a group of the cell's own": "dist.destroy_process_group()\n"
    "dist.init_process_group('gloo', init_method=f'file://{path}', rank=rank, world_size=2)\nmade = dist.group.WORLD",
    "a group that was rebuilt": "made = dist.group.WORLD",
}


@linux
@pytest.mark.parametrize("make", few(MAKE, "a subgroup", "a group that was rebuilt"))
@pytest.mark.native("listeners")
def test_a_formed_group_accepts_no_further_connections(cells: ddip.Group, make: str, tmp_path: Path) -> None:
    if "split" in make and not hasattr(dist.ProcessGroup, "split_group"):
        pytest.skip("this torch cannot split a group")
    if "split" in make and "No device associated" in inspect.getsource(dist.split_group):
        pytest.skip("this torch splits groups of GPUs only")
    cells.run(f"{SETUP}\npath = {str(tmp_path / 'store')!r}")
    if make == "a group that was rebuilt":
        with pytest.raises(ddip.CellError):
            cells.run("if rank == 0: raise ValueError\ndist.barrier()", timeout=10)
    cells.run(MAKE[make])
    assert try_connections(100, [port for _, port in listening_addresses(cells)]) == 0
    cells.run(f"{PROOF}\ndist.all_reduce(x, group=made)\nassert x.item() == 2")
    cells.run(
        "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=made)\n"
        "for _ in range(2): net(x).sum().backward()"
    )


@linux
@pytest.mark.native("listeners")
def test_workers_of_a_data_loader_accept_no_connections(cells: ddip.Group) -> None:
    cells.run(f"{SETUP}\nfrom torch.utils.data import DataLoader\nworkers = iter(DataLoader(range(8), num_workers=2))")
    cells.run("next(workers)")
    assert try_connections(100, [port for _, port in listening_addresses(cells)]) == 0
    cells.run(f"assert len(list(workers)) == 7\ndel workers\n{PROOF}")


def test_a_listener_opened_by_a_cell_stays_open(cells: ddip.Group) -> None:
    cells.run(
        f"{SETUP}\nimport socket\nown = socket.create_server(('127.0.0.1', 0))\nport = own.getsockname()[1]\n"
        "pair = dist.new_group([0, 1])\nafter = socket.create_server(('127.0.0.1', 0))\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True)"
    )
    for values in cells.pull_all(["port"], [0, 1])[0]:
        socket.create_connection(("127.0.0.1", values["port"]), 5).close()
    cells.run(
        "socket.create_connection(after.getsockname(), 5).close()\ndist.TCPStore('127.0.0.1', store.port).set('a', 'b')"
    )
    cells.run("own.close(), after.close()\ndel store")


@pytest.mark.grid
def test_a_group_that_connects_lazily_stays_usable() -> None:
    with environment(TORCH_GLOO_LAZY_INIT="1"), ddip.Group(2) as group:
        group.run(f"{SETUP}\n{PROOF}")


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
def test_the_environment_cannot_put_the_group_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with ddip.Group(2, failure_grace=0.1) as group:
        assert {host for host, _ in listening_addresses(group)} == {"127.0.0.1"}
        group.run(f"{SETUP}\nos.environ['GLOO_SOCKET_IFNAME'] = os.environ['NCCL_SOCKET_IFNAME'] = 'nowhere0'")
        with pytest.raises(ddip.CellError):
            group.run("if rank == 0: raise ValueError\ndist.barrier()")
        group.run(f"{PROOF}\ndist.new_group([0, 1])")
