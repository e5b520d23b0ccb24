"""`%makedip --hosts`: one process per host by ssh, whatever a host is called, prints or lacks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import ddip
from ddip.cluster.reach import Reach
from ddip.errors import BadInput, GroupError, PartitionError
from ddip.group.members.placement import Request, parse_hosts

from .host import BARE, DOCKER, Interface
from .network import Network

SUM = "import torch, torch.distributed as dist\nx = torch.ones(2) * (rank + 1)\ndist.all_reduce(x)\ntotal = x[0].item()"
WHERE = """
import os, socket
where = {name: os.environ.get(name) for name in (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")} | {"host": socket.gethostname(), "cwd": os.getcwd()}
"""
TRAIN = """
import torch, torch.nn as nn
torch.manual_seed(1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
opt = torch.optim.Adam(model.parameters(), 1e-2)
draw = torch.Generator().manual_seed(rank)
for step in range(10):
    opt.zero_grad()
    x = torch.randn(16, 8, generator=draw)
    nn.functional.cross_entropy(model(x), x.argmax(1) % 3).backward()
    opt.step()
trained = {name: value.clone() for name, value in model.module.state_dict().items()}
"""


def sums_of_ranks(group: ddip.Group) -> list[float]:
    """Return each rank's sum of 1, 2, ... over all ranks."""
    group.run(SUM)
    return pull_from_all(group, "total")


def pull_from_all(group: ddip.Group, name: str) -> list[Any]:
    """Return a variable of each rank."""
    return [values[name] for values in group.pull_all([name], range(group.world_size))[0]]


def test_ranks_are_grouped_by_host_with_correct_local_numbers(hosts: Network) -> None:
    with ddip.Group(hosts="h2:2,h1:1") as group:
        assert sums_of_ranks(group) == [6.0] * 3
        group.run(WHERE)
        where = pull_from_all(group, "where")
        assert [one["host"] for one in where] == ["h2", "h2", "h1"]
        assert [one["LOCAL_RANK"] for one in where] == ["0", "1", "0"]
        assert [one["LOCAL_WORLD_SIZE"] for one in where] == ["2", "2", "1"]
        assert [one["GROUP_RANK"] for one in where] == ["0", "0", "1"]
        assert {one["GROUP_WORLD_SIZE"] for one in where} == {"2"}
        assert {one["MASTER_ADDR"] for one in where} == {hosts["h2"].address}
        assert {one["GLOO_SOCKET_IFNAME"] for one in where} == {one["NCCL_SOCKET_IFNAME"] for one in where} == {"eth0"}
        assert [info.host for info in group.info()] == ["h2", "h2", "h1"]
        ways = f"h2 {hosts['h2'].address} (eth0), h1 {hosts['h1'].address} (eth0)"
        assert group.remarks() == [f"between the hosts: {ways}"]
        assert group.describe() == "ddip: 3 ranks on the CPU of h2, h1, gloo"
        group.restart()
        group.run(WHERE)
        assert [one["host"] for one in pull_from_all(group, "where")] == ["h2", "h2", "h1"]


def test_this_machine_can_be_one_of_the_hosts(hosts: Network) -> None:
    with ddip.Group(hosts="localhost:1,h1:2") as group:
        assert sums_of_ranks(group) == [6.0] * 3
        group.run(WHERE)
        where = pull_from_all(group, "where")
        assert [one["host"] for one in where] == ["nb", "h1", "h1"]
        assert {one["MASTER_ADDR"] for one in where} == {hosts["nb"].address}


def test_training_on_two_hosts_equals_training_on_one(hosts: Network) -> None:
    trained = []
    for arguments in ({"n": 4}, {"n": 2, "hosts": "h1,h2"}):
        with ddip.Group(**arguments) as group:  # type: ignore[arg-type]
            group.run(TRAIN)
            trained.append(pull_from_all(group, "trained"))
    here, on_two_hosts = trained
    for rank in range(4):
        for name, value in here[0].items():
            assert (on_two_hosts[rank][name] == value).all(), (rank, name)


def test_a_group_on_hosts_changes_and_keeps_variables(hosts: Network) -> None:
    with ddip.Group(1, hosts="h1,h2") as group:
        group.run("import socket; mine = socket.gethostname()")
        group.change(Request(n=2))
        assert sums_of_ranks(group) == [10.0] * 4
        group.run("mine = globals().get('mine')")
        assert pull_from_all(group, "mine") == ["h1", None, "h2", None]
        with pytest.raises(BadInput, match="on h1,h2; .*add -r"):
            group.change(Request(hosts=parse_hosts("h1,h3")))
        assert sums_of_ranks(group) == [10.0] * 4
        group.restart(Request(hosts=parse_hosts("h3:2")))
        assert sums_of_ranks(group) == [3.0] * 2
        group.run(WHERE)
        assert [one["host"] for one in pull_from_all(group, "where")] == ["h3"] * 2


@pytest.mark.parametrize(
    "trap",
    [
        {"hostname": "h1"},
        {"names": {"h2": "127.0.1.1"}},
        {"hostname": "nowhere", "names": {"nowhere": None}},
        {"interfaces": [DOCKER]},
        {"interface": "net7", "interfaces": [Interface("eth0", "10.99.0.12/24")]},
        {"bashrc": "echo hello; echo world >&2"},
        {"bashrc": "read -t 1 line; umask 777"},
        {"sshd": ["AllowStreamLocalForwarding no", "AllowTcpForwarding no", "DisableForwarding yes"]},
    ],
    ids=[
        "same name",
        "127.0.1.1",
        "unresolvable",
        "docker",
        "two interfaces",
        "bashrc",
        "bashrc reads",
        "no forwarding",
    ],
)
def test_unusual_hosts_can_form_a_group(hosts: Network, trap: dict[str, object]) -> None:
    with hosts["h2"].booted(**trap), ddip.Group(hosts="h1:1,h2:1") as group:
        assert sums_of_ranks(group) == [3.0] * 2
        group.run(WHERE)
        variables = pull_from_all(group, "where")[1]
        assert variables["GLOO_SOCKET_IFNAME"] == trap.get("interface", "eth0")
        assert variables["MASTER_ADDR"] == hosts["h1"].address


@pytest.mark.parametrize(
    ("names", "trap", "text"),
    [
        ("nosuchhost", {}, r"nosuchhost: .*[Rr]esolve.*~/.ssh/config"),
        ("h2", {"sshd": ["DenyUsers *"]}, r"h2: .*Permission denied.*ssh-add"),
        ("h2", {"path": BARE, "python": "python3"}, r"h2: .*'ddip'\); install ddip"),
        ("h2", {"python": "/no/such/python"}, "h2: .*No such file or directory; .*/no/such/python"),
        ("h2", {"setup": "module load cuda"}, "h2: .*module: .*not found; .*--setup 'module load cuda'"),
        ("h2", {"bashrc": "echo enough; exit 0"}, "h2: its login shell did not run .*~/.bashrc.*'enough'"),
        ("h2", {"sshd": ["ForceCommand /usr/bin/echo only this"]}, "h2: its login shell.*ForceCommand.*'only this'"),
    ],
    ids=["no such host", "no permission", "no ddip", "no python", "set up", "bashrc exits", "other command"],
)
def test_a_host_that_cannot_be_used_says_why(hosts: Network, names: str, trap: dict[str, Any], text: str) -> None:
    reach = Reach(python=trap.pop("python", ""), setup=trap.pop("setup", ""))
    with hosts["h2"].booted(**trap), pytest.raises(GroupError, match=text):
        ddip.Group(1, hosts=f"h1,{names}", reach=reach)


def test_a_login_shell_that_waits_for_input_is_reported(hosts: Network) -> None:
    notes: list[str] = []
    with hosts["h2"].booted(bashrc="exec sh -i"), pytest.raises(GroupError, match="h2: .*not begun .*~/.bashrc"):
        ddip.Group(1, hosts="h1,h2", timeout=16, progress=lambda text, share=None: notes.append(text))
    assert any(note.startswith("ddip: waiting for h2: ddip's command has not begun") for note in notes)


def test_a_stdin_that_ends_at_once_is_reported(hosts: Network) -> None:
    config = Path.home() / ".ssh" / "config"  # of nb
    config.write_text("Host h2\n  StdinNull yes\n")
    try:
        with pytest.raises(GroupError, match="h2: stdin ended .*StdinNull"):
            ddip.Group(1, hosts="h1,h2")
    finally:
        config.unlink()


def test_each_host_that_cannot_be_used_is_named(hosts: Network) -> None:
    with pytest.raises(GroupError) as raised:
        ddip.Group(1, hosts="nosuchhost,h1,norsuch")
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == ["nosuchhost", "norsuch"]


def test_a_firewall_between_the_hosts_is_reported(hosts: Network) -> None:
    h1, h2 = hosts["h1"], hosts["h2"]
    began = time.monotonic()
    with h1.blocks(h2, "1024-65535"), pytest.raises(PartitionError) as raised:
        ddip.Group(1, hosts="h1,h2")
    assert time.monotonic() - began < 45  # within the time limit of a start; about 10 s on an idle machine
    assert f"h2, {h2.address}, cannot reach h1, {h1.address} (no answer)" in str(raised.value)


def test_hosts_that_cannot_reach_each_other_are_all_named(hosts: Network) -> None:
    h1, h2, h3 = (hosts[name] for name in ("h1", "h2", "h3"))
    blocked = h1.blocks(h3, "1024-65535", "reject with tcp reset")
    with h2.parted_from(h3), blocked, pytest.raises(PartitionError) as raised:
        ddip.Group(1, hosts="h1,h2,h3")
    assert f"h3, {h3.address}, cannot reach h1, {h1.address} (Connection refused)" in str(raised.value)
    assert f"h2, {h2.address}, and h3, {h3.address}, cannot reach each other (no answer)" in str(raised.value)
