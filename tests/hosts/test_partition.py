"""A group whose hosts do not reach each other, while the notebook reaches them all: no rank is replaced for that.

Two ranks add two numbers, which gives the same in any order, so that trainings can be compared exactly.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import ddip
from ddip.cluster.hosts.remote_host import RemoteHost
from ddip.errors import CellError, CellTimeout, PartitionError

from ..cluster.test_own_state import CODE
from .network import Network
from .test_faults import BEGIN
from .test_ssh import pull_from_all, sums_of_ranks

APART = r"h1, [\d.]+, and h2, [\d.]+, cannot reach each other \(no answer\), since .*: .*; open the firewall"
RUN_ON = "cells without collectives still run"
FAIL = "if rank == 1: raise ValueError('planted')\ndist.all_reduce(x)"


@pytest.fixture
def hosts(network: Network) -> Network:
    """Return the hosts; the tests share a group, so leftovers are checked once at the end."""
    return network


@pytest.fixture(scope="module")
def shared_group(network: Network) -> Iterator[ddip.Group]:
    """Start a rank on h1 and one on h2."""
    with ddip.Group(1, hosts="h1,h2") as group:
        yield group


@pytest.fixture
def group(shared_group: ddip.Group) -> Iterator[ddip.Group]:
    """Yield the shared group, and prove that its ranks are the same processes, with their variables, afterwards."""
    shared_group.run(BEGIN)
    processes = [rank.pid for rank in shared_group.info()]
    yield shared_group
    assert sums_of_ranks(shared_group) == [3.0, 3.0]
    assert [rank.pid for rank in shared_group.info()] == processes
    assert pull_from_all(shared_group, "kept") == [0, 1]


def test_a_partition_is_named_and_changes_nothing(
    group: ddip.Group, hosts: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    with hosts["h1"].parted_from(hosts["h2"]):
        with pytest.raises(CellError, match=APART):
            group.run(FAIL)
        group.run("z = rank")
        group.run("z += 1")
        assert capsys.readouterr().err.count(RUN_ON) == 1
        assert pull_from_all(group, "z") == [1, 2]
        with pytest.raises(CellError, match=APART):
            group.run("dist.all_reduce(x)", timeout=60)
        with pytest.raises(PartitionError, match=f"no rank was replaced: {APART}"):
            group.repair()
        with pytest.raises(PartitionError, match=f"the group is unchanged: {APART}"):
            group.change(ddip.Request(n=2))
        assert group.world_size == 2
    assert sums_of_ranks(group) == [3.0, 3.0]


@contextlib.contextmanager
def parted_while_forming(group: ddip.Group, hosts: Network, delay: float = 0) -> Iterator[None]:
    """Part h1 from h2 `delay` seconds after the ranks begin to form a group.

    Without a delay, the rank of h2 then waits for a store out of reach.
    """
    manager = group.lifecycle.parts.manager
    form = manager._form_group
    with contextlib.ExitStack() as until_end, pytest.MonkeyPatch.context() as patch:

        def part_and_form(*args: Any) -> None:
            parted = hosts["h1"].parted_from(hosts["h2"])
            timer = threading.Timer(delay, until_end.enter_context, [parted])
            timer.start()
            if not delay:
                timer.join()
            form(*args)

        patch.setattr(manager, "_form_group", part_and_form)
        yield


def test_a_partition_while_the_group_is_rebuilt_costs_no_rank(group: ddip.Group, hosts: Network) -> None:
    with pytest.raises(CellError, match="planted"):
        group.run(FAIL)
    with parted_while_forming(group, hosts):
        group.run("z = rank")
    assert group.repair() == []


def test_a_partition_while_gloo_connects_costs_no_rank(group: ddip.Group, hosts: Network) -> None:
    """Rank 0 then gives up, and closes the store; rank 1 is not notified of that."""
    group.run("""
        import ddip.rank.process_group.setup as setup
        wait = setup._Rendezvous._wait_for_all
        def wait_longer(self): wait(self), time.sleep(4)
        setup._Rendezvous._wait_for_all = wait_longer
    """)
    with pytest.raises(CellError, match="planted"):
        group.run(FAIL)
    with parted_while_forming(group, hosts, delay=2):
        group.run("setup._Rendezvous._wait_for_all = wait")
    assert group.repair() == []


def test_a_partition_during_a_change_undoes_it(group: ddip.Group, hosts: Network) -> None:
    with parted_while_forming(group, hosts), pytest.raises(PartitionError, match=f"the group is unchanged: {APART}"):
        group.change(ddip.Request(n=2))
    assert group.world_size == 2


def test_a_stall_in_a_partition_names_the_hosts(
    group: ddip.Group, hosts: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell continues once the hosts reach each other."""
    group.options.stall_timeout = 1.0
    parted = hosts["h1"].parted_from(hosts["h2"])
    parted.__enter__()
    threading.Timer(6, parted.__exit__, (None, None, None)).start()
    group.run("dist.all_reduce(x)")
    assert "cannot reach each other (no answer)" in capsys.readouterr().err


def test_training_after_a_partition_equals_an_undisturbed_run(group: ddip.Group, hosts: Network) -> None:
    """Losses, parameters, optimizer state and data order are equal on every rank, after ten steps."""
    group.run(CODE)
    group.run("""
        make(replicas)
        expected = train(0, 10), outcome()
        state.forget()
        make(replicas)
        train(0, 3)
    """)
    with hosts["h1"].parted_from(hosts["h2"]):
        with pytest.raises(CellTimeout):
            group.run("train(3, 10)", timeout=3)
        group.run("kept_step = state.step")
    group.run("""
        make(replicas)
        first = state.restore()
        losses, (tensors, numbers) = expected
        assert first in (2, 3), first
        assert train(first, 10) == losses[first:]
        ours, others = outcome()
        assert len(ours) == len(tensors) and all(map(torch.equal, ours, tensors)) and others == numbers
        state.forget()
    """)


def test_a_link_cut_for_five_seconds_delays_a_start(hosts: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the link just before the notebook needs an answer of the host."""
    relay = RemoteHost.relay

    def cut_and_relay(host: RemoteHost, sockets: dict[str, str]) -> None:
        if host.name == "h2":
            hosts["h2"].cut()
            threading.Timer(5, hosts["h2"].mend).start()
        relay(host, sockets)

    monkeypatch.setattr(RemoteHost, "relay", cut_and_relay)
    began = time.monotonic()
    with ddip.Group(1, hosts="h1,h2") as group:
        assert time.monotonic() - began > 5
        group.run("import torch, torch.distributed as dist; dist.all_reduce(torch.ones(1))")
