"""`%makedip --cluster` across hosts: foreign engines on h1 and h2, of which only the controller is reached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.cluster.reach import Reach
from ddip.errors import CellError, GroupError

from ..cluster.leftovers import wait_until
from ..cluster.theirs import ForeignCluster
from .network import Network
from .test_faults import ddip_processes_on
from .test_ssh import pull_from_all, sums_of_ranks


@pytest.fixture
def theirs(hosts: Network) -> Iterator[ForeignCluster]:
    """Start a controller on nb, engines 0 and 2 on h2, and engine 1 on h1."""
    cluster = ForeignCluster("theirs", hosts["nb"].address)
    try:
        connection_file = (cluster.file.parent / "ipcontroller-theirs-engine.json").read_text()
        for name in ("h2", "h1", "h2"):
            hosts[name].path("/tmp/engine.json").write_text(connection_file)
            cluster.add(1, ["--file=/tmp/engine.json"], hosts[name].command)
        cluster.client[:].push({"kept": 5}, block=True)
        yield cluster
    finally:
        cluster.close()
        hosts.restore_hosts()
        for name in ("h1", "h2"):
            wait_until(lambda name=name: not any("ipyparallel" in line for _, line in hosts[name].processes()))
            hosts[name].run(["sh", "-c", "rm -rf /tmp/engine.json /tmp/tmp*"])


@pytest.mark.long
def test_hosts_follow_the_order_of_engines_and_nothing_stays(theirs: ForeignCluster, hosts: Network) -> None:
    for _ in range(2):
        with ddip.Group(reach=Reach(cluster="theirs")) as group:
            assert sums_of_ranks(group) == [6.0] * 3
            assert [info.host for info in group.info()] == ["h2", "h2", "h1"]
            assert group.describe() == "ddip: 3 ranks on the CPU of h2, h1, gloo"
            group.restart()
            assert sums_of_ranks(group) == [6.0] * 3
            group.push({"big": bytes(4 << 20)})
            assert pull_from_all(group, "big") == [bytes(4 << 20)] * 3
    for name in ("h1", "h2"):
        wait_until(lambda name=name: not ddip_processes_on(hosts[name]), 15, "the end of what was on the hosts")
    assert theirs.values("kept") == [5] * 3
    with ddip.Group(2, reach=Reach(cluster="theirs")) as group:
        assert [info.host for info in group.info()] == ["h2", "h2"]


def test_a_lost_host_is_reported(theirs: ForeignCluster, hosts: Network) -> None:
    with ddip.Group(reach=Reach(cluster="theirs")) as group:
        hosts["h1"].lose_power()
        with pytest.raises((CellError, GroupError), match="lost .*h1"):
            group.run("import torch, torch.distributed as dist\nwhile True: dist.all_reduce(torch.ones(2))")
