"""Only the user may connect to the processes of a group."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

import ddip
from ddip.cluster.processes import ownership, processes
from ddip.errors import GroupError
from ddip.protocol.old_versions import tcp_connections

from .doors import NOBODY, Listener, count_descriptors, find_listeners, send_random_messages
from .leftovers import controllers_of, family_of, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells who listens in /proc")
FENCED = {("rank", "tcp", "127.0.0.1")}
"""gloo's listeners in the ranks, which accept no connection (test_listeners.py). All others are in the run folder."""

FORKSERVER = "multiprocessing.forkserver"


def processes_of_group(group: ddip.Group) -> list[psutil.Process]:
    """Return the ranks of `group`, the preload process that forked them, and its controller with that one's children.

    Processes of other groups may still be ending.
    """
    controller = controllers_of(os.getpid())[-1]
    ranks = [psutil.Process(member.pid) for member in group.members]
    parents = {parent for rank in ranks if (parent := rank.parent()) is not None and parent.pid != os.getpid()}
    return list({controller, *controller.children(), *ranks, *parents})


def controller_listeners(group: ddip.Group) -> set[Listener]:
    """Return the sockets on which the controller of `group` listens."""
    found = {door for door in find_listeners(family_of(os.getpid())) if door.role == "controller"}
    return {door for door in found if Path(door.address).parent == group.cluster.run_folder}


def test_the_table_of_listeners(cells: ddip.Group) -> None:
    """Compare each listener's process and address with the table, and check who may connect."""
    cells.run("import torch.distributed as dist; dist.barrier(); subgroup = dist.new_group([0, 1])")
    cells.run("import torch.utils.data as data\nfor _ in data.DataLoader(range(4), num_workers=2): pass")
    family = family_of(os.getpid())
    assert {" ".join(process.cmdline()).split()[1] for process in family} >= {"controller", "rank"}
    found = find_listeners(family)
    for door in found:
        if door.kind == "unix":  # the permissions of its folder decide who may connect
            folder = Path(door.address).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
            if FORKSERVER in door.role:  # of a rank, in Python's own folder; the default for workers since Python 3.14
                assert folder.name.startswith("pymp-"), door
            else:
                assert ownership._owner_in_name(folder.name) == processes.Proc.of(os.getpid()), door
                assert door.role == "controller"
        else:
            assert (door.role, door.kind, door.address.rpartition(":")[0]) in FENCED
    names = {Path(door.address).name for door in controller_listeners(cells)}
    assert names == {f"{ownership.SOCKETS}:{number}" for number in range(1, 19)}
    connected = [c for p in controllers_of(os.getpid()) for c in tcp_connections(p, "inet")]
    assert connected == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
def test_another_user_cannot_disturb_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # a folder that all users can enter
    with ddip.Group(2) as group:
        ranks = [member.pid for member in group.members]
        group.run("kept = rank")
        family = processes_of_group(group)
        before = count_descriptors(family)
        outcomes = [send_random_messages(controller_listeners(group), 500, NOBODY, seed=1)]
        knocking = threading.Thread(
            target=lambda: outcomes.append(send_random_messages(controller_listeners(group), 3000, NOBODY, seed=2))
        )
        knocking.start()
        while knocking.is_alive():
            group.run("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); assert x == 2")
        knocking.join()
        assert outcomes == [{"refused": 500}, {"refused": 3000}]
        group.run("assert kept == rank; del x")
        assert [member.pid for member in group.members] == ranks
        wait_until(lambda: count_descriptors(family) == before, what=f"{before} descriptors")


def test_invalid_messages_are_dropped(cells: ddip.Group) -> None:
    """A process of the same user may connect, and may have the wrong address."""
    cells.run("kept = rank")
    family = [psutil.Process(p.pid) for p in controllers_of(os.getpid())]
    before = count_descriptors(family)
    for seed in range(2):
        done = send_random_messages(controller_listeners(cells), 500, None, seed)
        assert done["entered"] > 250, done
        cells.run("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); assert x == 2")
        assert cells.pull(["kept"]) == {"kept": 0}
    assert cells.repair() == []
    wait_until(lambda: count_descriptors(family) == before)


@pytest.mark.grid
def test_a_group_starts_in_folders_with_odd_or_long_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="a[b]*: '\"ü-", dir="/tmp") as odd:
        too_long = tmp_path / ("x" * 90)
        too_long.mkdir()
        for temporary, place in ((Path(odd), Path(odd)), (too_long, Path("/tmp"))):
            monkeypatch.setattr("tempfile.tempdir", str(temporary))
            with ddip.Group(1) as group:
                folder = group.cluster.run_folder
                assert folder.parent == place
                group.run("assert world_size == 1")
            assert not folder.exists()
    monkeypatch.setattr(ownership, "_candidate_folders", lambda: [too_long])
    with pytest.raises(GroupError, match="AF_UNIX.*TMPDIR"):
        ddip.Group(1)
