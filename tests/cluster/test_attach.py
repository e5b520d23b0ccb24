"""`%makedip --cluster`: ranks on the hosts of a foreign ipyparallel cluster, which keeps running."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ddip
from ddip.cluster.reach import Reach
from ddip.errors import CellError, GroupError
from ddip.group.members.placement import Request

from .leftovers import assert_nothing_left, is_alive, wait_until
from .theirs import ForeignCluster, foreign_cluster

pytestmark = pytest.mark.grid

SUM = "import torch, torch.distributed as dist\nx = torch.ones(2) * (rank + 1)\ndist.all_reduce(x)\ntotal = x[0].item()"
NOTEBOOK = """
import ddip
from ddip.cluster.reach import Reach
group = ddip.Group(reach=Reach(cluster="theirs"))
group.run("import os; pid = os.getpid()")
print(*[values["pid"] for values in group.pull_all(["pid"], [0, 1])[0]], flush=True)
input()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ForeignCluster]:
    """Start two engines on this machine."""
    with foreign_cluster("theirs", 2) as cluster:
        yield cluster


def attach_group(**options: object) -> ddip.Group:
    return ddip.Group(reach=Reach(cluster="theirs"), **options)  # type: ignore[arg-type]


def test_attached_ranks_leave_the_cluster_unchanged(cluster: ForeignCluster) -> None:
    with attach_group():  # the first group causes imports, which the engines keep
        pass
    before, slow = cluster.resources(), cluster.client[0].apply_async(_sleep, 3)
    with attach_group() as group:
        assert not slow.done() or slow.get()  # a busy engine is also a way to reach its host
        group.run(SUM)
        assert [values["total"] for values in group.pull_all(["total"], [0, 1])[0]] == [3.0, 3.0]
        group.push({"big": bytes(8 << 20)})
        assert group.pull(["big"], 1) == {"big": bytes(8 << 20)}
        assert cluster.values("kept") == [5, 5]
    wait_until(lambda: cluster.resources() == before, 10, "the end of what was in the engines")
    assert cluster.values("kept") == [5, 5]
    assert len(cluster.client.ids) == 2


def _sleep(seconds: float) -> bool:
    import time

    time.sleep(seconds)
    return True


def test_a_wrong_number_or_name_is_refused_before_any_change(cluster: ForeignCluster) -> None:
    with pytest.raises(GroupError, match="-n 3: .*2 engines"):
        attach_group(n=3)
    with pytest.raises(GroupError, match="-c their: .*/theirs"):
        ddip.Group(reach=Reach(cluster="their"))
    with attach_group(n=1) as group:
        assert group.world_size == 1
        group.run("kept = 7")
        with pytest.raises(GroupError, match="-c their: "):
            group.restart(Request(reach=Reach(cluster="their")))
        group.change(Request(n=2))
        assert group.pull(["kept"], 0) == {"kept": 7}
        with pytest.raises(GroupError, match="-n 3: .*2 engines"):
            group.change(Request(n=3))
        group.restart(Request(n=1))
        assert group.world_size == 1


def test_a_python_without_ddip_is_named(cluster: ForeignCluster) -> None:
    with pytest.raises(GroupError, match=r"install ddip there|there is no such program"):
        ddip.Group(reach=Reach(cluster="theirs", python="/usr/bin/python3"))


def test_killing_the_notebook_ends_its_ranks_but_no_engine(cluster: ForeignCluster) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert script.stdout is not None and script.stdin is not None
    with script:
        ranks = list(map(int, script.stdout.readline().split()))
        assert len(ranks) == 2
        script.kill()
    wait_until(lambda: not any(map(is_alive, ranks)), 15, "the end of the ranks")
    assert cluster.values("kept") == [5, 5]
    assert_nothing_left(script.pid, 15)


def test_killing_the_near_end_loses_the_host_and_its_ranks(cluster: ForeignCluster) -> None:
    with attach_group() as group:
        group.run("import os; pid = os.getpid()")
        ranks = [values["pid"] for values in group.pull_all(["pid"], [0, 1])[0]]
        (near,) = [p for p in psutil.Process().children() if "ddip.cluster.attach.near_end" in p.cmdline()]
        near.kill()
        with pytest.raises((CellError, GroupError), match="is lost|lost with"):
            group.run("import time; time.sleep(60)")
        wait_until(lambda: not any(map(is_alive, ranks)), 20, "the end of the ranks")
        assert group.repair() == [0, 1]
        group.run(SUM)


def test_another_engine_of_the_host_replaces_a_killed_one() -> None:
    with foreign_cluster("mortal", 2) as cluster, ddip.Group(reach=Reach(cluster="mortal")) as group:
        cluster.engines[0].kill()
        with pytest.raises((CellError, GroupError), match="engine 0 .*ended"):
            group.run("import time; time.sleep(60)")
        assert group.repair() == [0, 1]
        group.run(SUM)
        assert cluster.values("kept") == [5]


def test_a_killed_controller_is_reported() -> None:
    with foreign_cluster("lost", 1) as cluster, ddip.Group(reach=Reach(cluster="lost")) as group:
        cluster.kill_controller()
        with pytest.raises((CellError, GroupError), match="controller .*stopped"):
            group.run("import time; time.sleep(60)")
        with pytest.raises(GroupError, match="answer"):
            ddip.Group(reach=Reach(cluster="lost"))


def test_an_ipyparallel_launcher_starts_and_ends_with_the_group() -> None:
    with ddip.Group(2, reach=Reach(engines="local")) as group:
        group.run("import os; parent = os.getppid()")
        before = _ipyparallel_processes()
        assert before
        group.restart()
        assert _ipyparallel_processes() == before
        group.run(SUM)
    wait_until(lambda: not _ipyparallel_processes(), 10, "the end of the engines")


@pytest.mark.skipif(multiprocessing.cpu_count() > 8, reason="it starts as many engines as there are cores")
def test_a_launcher_says_how_many_engines_it_has() -> None:
    with ddip.Group(reach=Reach(engines="local")) as group:
        assert group.world_size == multiprocessing.cpu_count()
    wait_until(lambda: not _ipyparallel_processes(), 10, "the end of the engines")


@pytest.mark.parametrize("round_", range(3))
def test_nothing_is_left_of_a_launcher_that_fails(monkeypatch: pytest.MonkeyPatch, round_: int) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # no mpiexec
    with pytest.raises(GroupError, match="--engines mpi: .*mpiexec"):
        ddip.Group(2, reach=Reach(engines="mpi"))
    assert not _ipyparallel_processes()


def _ipyparallel_processes() -> set[int]:
    """Return the engines and controllers that this process has started."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("IPP_CLUSTER_ID", "").startswith(f"ddip-{os.getpid()}-"):
                found.add(process.pid)
    return found
