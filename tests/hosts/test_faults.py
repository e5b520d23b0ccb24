"""A group on several hosts when a rank, a ddip process, a host or a link is lost."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip
from ddip.errors import BadInput, CellError, CellInterrupted, GroupError
from ddip.group.members.placement import parse_hosts

from ..cluster.leftovers import wait_until
from .host import Host
from .network import Network
from .test_ssh import pull_from_all, sums_of_ranks

BEGIN = "import os, time, torch, torch.distributed as dist\nx = torch.ones(2)\ndist.all_reduce(x)\nkept = rank"
BUSY = "while True: dist.all_reduce(x)"
BUSY_ALONE = "while True: pass"
NOTEBOOK = """
import ddip
group = ddip.Group(1, hosts="h1,h2")
group.run({begin!r})
print("ready", flush=True)
input()
group.run({code!r})
"""


@pytest.fixture
def group(hosts: Network) -> Iterator[ddip.Group]:
    """Start two ranks on h1 and two on h2."""
    with ddip.Group(2, hosts="h1,h2") as group:
        group.run(BEGIN)
        yield group


def ddip_processes_on(host: Host) -> list[str]:
    """Return the command lines of ddip's processes on a host."""
    checkout = str(Path(__file__).parents[2])  # whose folder may have ddip's name
    return [line for _, line in host.processes() if "ddip" in line.replace(checkout, "")]


def pid_of(host: Host, what: str) -> int:
    """Return the PID of the only process on the host whose command line contains `what`."""
    (pid,) = [pid for pid, line in host.processes() if what in line]
    return pid


def do_in_a_second(do: object) -> None:
    """Run a function one second into a cell, after all ranks have begun to wait for each other."""
    threading.Timer(1.0, do).start()  # type: ignore[arg-type]


def assert_works(group: ddip.Group) -> None:
    assert sums_of_ranks(group) == [10.0] * 4


def assert_power_loss_is_noticed(group: ddip.Group, host: Host) -> None:
    """Let `host` lose its power in a cell, and assert that the cell ends with an error of its ranks."""
    do_in_a_second(host.lose_power)
    began = time.monotonic()
    with pytest.raises(CellError, match=f"{host.name} has sent nothing") as caught:
        group.run(BUSY)
    assert caught.value.by_rank[2].name == "RankEnded"
    assert time.monotonic() - began < 20


def assert_blocked(error: CellError, ranks: list[int], operation: str) -> None:
    """Assert that the failed cell had blocked `ranks` in `operation`."""
    places = {rank: error.by_rank[rank].waited for rank in ranks}
    assert all(place and place.startswith(operation) for place in places.values()), places


def test_only_log_lines_of_the_last_cell_explain_a_death(group: ddip.Group) -> None:
    group.run("if rank == 3: os.write(2, b'an earlier problem\\n'); print()")
    with pytest.raises(CellError, match="rank 3: .*exit code 3") as caught:
        group.run("if rank == 3: os._exit(3)")
    assert caught.value.by_rank[3].traceback == ""
    assert group.repair() == [3]
    with pytest.raises(CellError) as caught:
        group.run(
            "import os\nif rank == 3: print('printed', flush=True); os.write(2, b'the cause\\n'); print(); os._exit(3)"
        )
    assert caught.value.by_rank[3].traceback == "end of its log:\nprinted\nthe cause"
    assert group.repair() == [3]


def test_a_killed_rank_is_noticed_at_once_and_replaced(group: ddip.Group) -> None:
    with pytest.raises(CellError, match="SIGKILL") as caught:
        group.run("if rank == 3: os.kill(os.getpid(), 9)\ndist.all_reduce(x)")
    assert caught.value.by_rank[3].name == "RankEnded"
    assert_blocked(caught.value, [0, 1, 2], "all_reduce")
    assert group.repair() == [3]
    assert_works(group)
    assert group.pull(["kept"], 2) == {"kept": 2}


def test_a_failure_on_one_host_unblocks_the_others(group: ddip.Group) -> None:
    with pytest.raises(CellError) as caught:
        group.run("if rank == 0: raise ValueError('no')\ndist.all_reduce(x)")
    assert caught.value.by_rank[0].name == "ValueError"
    assert_blocked(caught.value, [1, 2, 3], "all_reduce")
    assert_works(group)
    with pytest.raises(CellError) as caught:
        group.run("if rank == 3: raise ValueError('no')\ndist.recv(x, 3)")
    assert caught.value.by_rank[3].name == "ValueError"
    assert_blocked(caught.value, [0, 1, 2], "recv")
    assert_works(group)
    with pytest.raises(CellError) as caught:
        group.run("if rank == 3: raise ValueError('no')\ndist.new_group([0, 3])")
    assert caught.value.by_rank[3].name == "ValueError"
    assert_blocked(caught.value, [0], "new_group")
    assert_works(group)


@pytest.mark.parametrize("code", ["time.sleep(1000)", BUSY, BUSY_ALONE], ids=["sleep", "all_reduce", "loop"])
def test_a_stop_reaches_every_host(group: ddip.Group, code: str) -> None:
    do_in_a_second(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(CellInterrupted):
        group.run(code)
    assert_works(group)


def test_a_link_that_is_cut_for_five_seconds_changes_nothing(group: ddip.Group, hosts: Network) -> None:
    hosts["h2"].cut()
    time.sleep(5)  # the outage that the test is about
    hosts["h2"].mend()
    assert_works(group)
    assert pull_from_all(group, "kept") == [0, 1, 2, 3]


def test_an_unresponsive_agent_blocks_neither_stops_nor_the_end(group: ddip.Group, hosts: Network) -> None:
    agent = pid_of(hosts["h2"], "ddip.cluster.hosts.agent")
    os.kill(agent, signal.SIGSTOP)
    try:
        do_in_a_second(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            group.push({"big": os.urandom(64 << 20)})
        began = time.monotonic()
        group.shutdown()
        assert time.monotonic() - began < 30
    finally:
        os.kill(agent, signal.SIGCONT)


def test_a_host_without_power_is_noticed_and_another_replaces_it(group: ddip.Group, hosts: Network) -> None:
    assert_power_loss_is_noticed(group, hosts["h2"])
    with pytest.raises(GroupError, match="lost .*h2.*--repair"):
        group.run("pass")
    with pytest.raises(BadInput, match="h1 is not lost"):
        group.repair(hosts=parse_hosts("h3,h2"))
    with pytest.raises(GroupError, match="^h2: ssh: connect"):
        group.repair()
    assert group.repair(hosts=parse_hosts("h1,h3")) == [2, 3]
    assert_works(group)
    assert group.pull(["kept"], 1) == {"kept": 1}
    assert [info.host for info in group.info()] == ["h1", "h1", "h3", "h3"]
    assert group.describe() == "ddip: 4 ranks on the CPU of h1, h3, gloo"


def test_a_link_cut_permanently_ends_the_ranks_behind_it(group: ddip.Group, hosts: Network) -> None:
    do_in_a_second(hosts["h2"].cut)
    with pytest.raises(CellError, match="RankEnded: .*h2"):
        group.run(BUSY)
    wait_until(lambda: not ddip_processes_on(hosts["h2"]), 15, "the end of the ranks behind the link")
    hosts["h2"].mend()
    assert group.repair() == [2, 3]
    assert_works(group)


@pytest.fixture
def relayed_group(hosts: Network) -> Iterator[ddip.Group]:
    """Start two ranks on h1 and two on h2, which ssh reaches through h3."""
    config = Path.home() / ".ssh" / "config"  # of nb
    config.write_text("Host h2\n  ProxyJump h3\n")
    try:
        with ddip.Group(2, hosts="h1,h2") as group:
            group.run(BEGIN)
            yield group
    finally:
        config.unlink()


def test_a_host_without_power_behind_a_relay_is_noticed(relayed_group: ddip.Group, hosts: Network) -> None:
    ctypes.PyDLL(None).sleep(13)  # the notebook's interpreter is not free, and no rank is lost for that
    assert_works(relayed_group)
    assert_power_loss_is_noticed(relayed_group, hosts["h2"])


def test_a_host_whose_relay_lost_the_notebook_ends_all(relayed_group: ddip.Group, hosts: Network) -> None:
    """The relay still acknowledges what the agent sends, as if the notebook existed."""
    with hosts["h3"].parted_from(hosts["nb"]):
        wait_until(lambda: not ddip_processes_on(hosts["h2"]), 40, "the end of the ranks behind the relay")


@pytest.mark.parametrize("which", ["ssh", "agent", "preload process"])
def test_a_host_whose_processes_end_is_reused(group: ddip.Group, hosts: Network, which: str) -> None:
    pids = {
        "ssh": lambda: group.cluster.hosts[1].pid,  # type: ignore[attr-defined]
        "agent": lambda: pid_of(hosts["h2"], "ddip.cluster.hosts.agent"),
        "preload process": lambda: pid_of(hosts["h2"], "ddip preload process"),
    }
    do_in_a_second(lambda: os.kill(pids[which](), signal.SIGKILL))
    with pytest.raises(CellError, match="RankEnded") as caught:
        group.run(BUSY)
    assert_blocked(caught.value, [0, 1], "")
    if which != "preload process":
        wait_until(lambda: not ddip_processes_on(hosts["h2"]), 10, "the end of the ranks there")
    assert group.repair() == [2, 3]
    assert_works(group)
    assert group.pull(["kept"], 1) == {"kept": 1}


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("", id="idle"),
        pytest.param(BUSY, id="all_reduce", marks=pytest.mark.long),
        pytest.param(BUSY_ALONE, id="loop"),
    ],
)
@pytest.mark.parametrize("which", ["notebook", "controller"])
def test_nothing_outlives_the_notebook_or_its_controller(hosts: Network, which: str, code: str) -> None:
    script = NOTEBOOK.format(begin=BEGIN, code=code)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as notebook:
        assert notebook.stdout is not None and notebook.stdin is not None
        assert notebook.stdout.readline() == "ready\n", notebook.communicate()
        assert ddip_processes_on(hosts["h1"]) and ddip_processes_on(hosts["h2"])
        if code:
            notebook.stdin.write("\n")
            notebook.stdin.flush()
        # the lowest PID, because the controller has forked its heart monitor
        controller = min(pid for pid, line in hosts["nb"].processes() if "ddip controller" in line)
        os.kill(notebook.pid if which == "notebook" else controller, signal.SIGKILL)
        both = hosts["h1"], hosts["h2"]
        wait_until(
            lambda: not any("ddip rank" in line for host in both for line in ddip_processes_on(host)),
            15,
            "the end of all ranks",
        )
        notebook.communicate(timeout=60)  # without its controller the notebook ends, and then the agents
        wait_until(lambda: not any(map(ddip_processes_on, both)), 15, "the end of all that the hosts ran")
