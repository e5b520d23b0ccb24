"""Losses of a group on Slurm nodes, and their replacement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import ddip
from ddip.cluster.reach import Reach
from ddip.errors import BadInput, CellError, GroupError, RequestInterrupted
from ddip.group.members.placement import Request, parse_hosts

from ..cluster.leftovers import wait_until
from .network import Network
from .slurm import Slurm
from .test_faults import do_in_a_second
from .test_slurm import run_command
from .test_slurm_groups import NOTEBOOK, TWO_NODES, allocate_job, press_stop_when_queued
from .test_ssh import sums_of_ranks


def test_a_cancelled_job_counts_as_a_lost_host(slurm: Slurm) -> None:
    with ddip.Group(1, reach=TWO_NODES) as group:
        group.run("import torch, torch.distributed as dist; x = torch.ones(1)")
        (job,) = slurm.jobs()
        taker = threading.Timer(1, lambda: run_command(f"scancel {job}"))
        taker.start()
        began = time.monotonic()
        with pytest.raises(CellError, match=r"RankEnded: .*h\d: .*CANCELLED"):
            group.run("while True: dist.all_reduce(x)")
        taker.join()
        assert time.monotonic() - began < 20
        wait_until(lambda: not slurm.jobs())
        group.restart()  # the job is over, so another one is submitted
        assert sums_of_ranks(group) == [3.0] * 2


@pytest.mark.long
@pytest.mark.parametrize("lost", ["h1", "h2"], ids=["that of the script", "another"])
def test_a_node_without_power_ends_neither_job_nor_ranks(slurm: Slurm, hosts: Network, lost: str) -> None:
    with ddip.Group(1, reach=TWO_NODES) as group:
        group.run("import torch, torch.distributed as dist; x = torch.ones(1)")
        jobs = slurm.jobs()
        do_in_a_second(hosts[lost].lose_power)
        with pytest.raises(CellError, match=f"RankEnded: .*{lost}"):
            group.run("while True: dist.all_reduce(x)")
        wait_until(lambda: slurm.states()[lost] == "down", 60)
        assert slurm.jobs() == jobs
        assert {info.host: info.state for info in group.info()} == {"h1": "idle", "h2": "idle", lost: "ended"}
    wait_until(lambda: not slurm.jobs())


@pytest.mark.long
def test_a_repair_gets_another_node_in_a_new_job(three_nodes: Slurm, hosts: Network) -> None:
    messages: list[str] = []
    with ddip.Group(1, reach=TWO_NODES) as group:
        group.run("import torch, torch.distributed as dist; x = torch.ones(1); kept = rank + 10")
        (first,) = three_nodes.jobs()
        other = int(run_command("sbatch --parsable --nodelist=h3 --exclusive --output=/dev/null --wrap='sleep 1000'"))
        wait_until(lambda: three_nodes.jobs() == {first: "RUNNING", other: "RUNNING"})
        do_in_a_second(hosts["h2"].lose_power)
        with pytest.raises(CellError, match="RankEnded: .*h2"):
            group.run("while True: dist.all_reduce(x)")
        with pytest.raises(BadInput, match="--hosts h1,h3: .*--repair"):
            group.repair(hosts=parse_hosts("h1,h3"))
        stopper = press_stop_when_queued(messages)
        with pytest.raises(RequestInterrupted, match="job was cancelled"):
            group.repair(progress=lambda text, share=None: messages.append(text))
        stopper.join()
        assert three_nodes.jobs() == {first: "RUNNING", other: "RUNNING"}
        run_command(f"scancel {other}")
        wait_until(lambda: three_nodes.jobs() == {first: "RUNNING"})
        assert group.repair() == [1]
        assert group.pull(["kept"], 0) == {"kept": 10}
        assert sums_of_ranks(group) == [3.0] * 2
        assert [info.host for info in group.info()] == ["h1", "h3"]
        _, second = sorted(three_nodes.jobs())
        assert group.repair() == [] and sorted(three_nodes.jobs()) == [first, second]
        assert group.lifecycle.place.text().startswith(f"Slurm job {first} ends in ")
        run_command(f"scontrol update job={second} timelimit=20")
        assert group.lifecycle.place.text().startswith(f"Slurm job {second} ends in ")
        assert not group.change(Request(reach=TWO_NODES))
        wait_until(lambda: three_nodes.states()["h2"] == "down", 60)
        group.restart()
        assert sums_of_ranks(group) == [3.0] * 2
        assert [info.host for info in group.info()] == ["h1", "h3"]
        (third,) = {job for job, state in three_nodes.jobs().items() if state == "RUNNING"}
        assert third not in (first, second)
    wait_until(lambda: not three_nodes.jobs())


def test_a_repair_reuses_a_node_that_is_up(slurm: Slurm) -> None:
    with ddip.Group(1, reach=TWO_NODES) as group:
        group.run("kept = rank + 10")
        jobs = slurm.jobs()
        os.kill(group.cluster.hosts[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        wait_until(lambda: group.cluster.hosts[1].lost)
        assert group.repair() == [1]
        assert group.pull(["kept"], 0) == {"kept": 10}
        assert sums_of_ranks(group) == [3.0] * 2
        assert slurm.jobs() == jobs
    wait_until(lambda: not slurm.jobs())


@pytest.mark.long
def test_a_notebook_killed_after_a_repair_leaves_nothing(three_nodes: Slurm, hosts: Network) -> None:
    script = f"{NOTEBOOK}print(group.repair(), flush=True)\ninput()\n"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as notebook:
        assert notebook.stdin is not None and notebook.stdout is not None
        try:
            assert notebook.stdout.readline() == "ready\n"
            hosts["h2"].lose_power()
            wait_until(lambda: three_nodes.states()["h2"] == "down", 60)
            notebook.stdin.write("\n")
            notebook.stdin.flush()
            assert notebook.stdout.readline() == "[1]\n"
            assert list(three_nodes.jobs().values()) == ["RUNNING"] * 2
        finally:
            notebook.kill()
    wait_until(lambda: not three_nodes.jobs(), 15)


@pytest.mark.long
def test_a_lost_node_in_a_foreign_job_is_not_replaced(
    slurm: Slurm, hosts: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = allocate_job("-N2 --no-kill", monkeypatch)
    with ddip.Group(1, reach=Reach(here=True)) as group:
        hosts["h2"].lose_power()
        wait_until(lambda: slurm.states()["h2"] == "down", 60)
        with pytest.raises(GroupError, match=f"^h2 .*job {job},.*%makedip -r"):
            group.repair()
        group.restart()
        assert sums_of_ranks(group) == [1.0]
    assert slurm.jobs() == {job: "RUNNING"}
    run_command(f"scancel {job}")
    wait_until(lambda: not slurm.jobs())
