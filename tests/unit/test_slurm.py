"""What `--slurm` submits, and how `--here` finds its job; runs without Slurm."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from ddip.cluster.hosts import slurm, slurm_keeper
from ddip.cluster.reach import Reach
from ddip.errors import BadInput, GroupError
from ddip.group.members import places, time_left
from ddip.group.members.placement import HostRequest, Request


def test_words_are_options_of_sbatch() -> None:
    lines = slurm.batch_script("nodes=2 gpus=4 cpus=8 time=2:00:00 partition=x --account=y exclusive").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "output=/dev/null",
        "ntasks-per-node=1",
        "no-kill",
        "no-requeue",
        "nodes=2",
        "gpus-per-node=4",
        "cpus-per-task=8",
        "time=2:00:00",
        "partition=x",
        "account=y",
        "exclusive",
    ]


@pytest.mark.parametrize(
    ("squeue", "seconds"),
    [
        ("echo 7.batch", 300),
        ("[ $(wc -l < slept) -gt 3 ] || echo 7.0", 2 + 10 + 10 + 50),
        pytest.param("[ $(wc -l < slept) -gt 1 ] || echo 7.0", 2 + 50, marks=pytest.mark.grid),
        pytest.param("exit 1", None, marks=pytest.mark.grid),
        ("echo 7.0", None),
    ],
)
def test_a_job_ends_only_once_no_step_runs(squeue: str, seconds: int | None, tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/bash\n{squeue}\n")
    (tmp_path / "sleep").write_text(
        f"#!/bin/bash\necho $1 >> {tmp_path}/slept\n[ $(wc -l < {tmp_path}/slept) -lt 200 ] || kill $PPID\n"
    )
    for name in ("squeue", "sleep"):
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", slurm.batch_script("nodes=1")], env=variables, cwd=tmp_path)
    assert (done.returncode == 0) == (seconds is not None)
    assert seconds is None or sum(map(int, (tmp_path / "slept").read_text().split())) == seconds


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("gpus=4", "how many nodes"),
        ("nodes=2 ,x", "',x'.*name=value"),
        ("nodes=2 array=1-3", "leave out array"),
        ("nodes=2 arra=1-3", "leave out arra"),
        ("nodes=2 wait", "leave out wait"),
        ("nodes=2 'time=1", "quote"),
        ("", "how many nodes"),
    ],
)
def test_invalid_slurm_options_are_named(typed: str, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        slurm.parse_options(typed)


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:2(IDX:0-1)", 2),
        ("gpu:h200:8(IDX:0-7),nic:1", 8),
        ("gpu:a:2(IDX:0,1),gpu:b:1(IDX:2)", 3),
        ("nic:4", 0),
        ("", 0),
    ],
)
def test_the_gpus_of_a_node_are_its_slurm_allocation(
    gres: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        f"JobId=7 JOB_GRES=gpu:9   Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:5(IDX:0-4) Nodes=n1 CPU_IDs=0-3 Mem=0 GRES={gres} "
    )
    (tmp_path / "scontrol").write_text(
        f'#!/bin/bash\n[ "$2" == hostnames ] && echo "$3" || echo "{line} MinCPUsNode=1"\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert (slurm.count_gpus(7, "n1"), slurm.count_gpus(7, "n2"), slurm.count_gpus(7, "n3")) == (count, 5, 0)


def test_missing_slurm_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GroupError, match="sbatch and srun"):
        places.allocate_hosts(Request(reach=Reach(slurm="nodes=2")), lambda text, share=None: None)


def test_here_uses_the_hosts_of_another_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*places.HOST_FILES, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    place = places.allocate_hosts(Request(reach=Reach(here=True)), lambda text, share=None: None)
    assert place.request.hosts == (HostRequest("n1"), HostRequest("n2")) and place.text() == ""
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nowhere"))
    with pytest.raises(GroupError, match="PBS_NODEFILE=.*/nowhere"):
        places.allocate_hosts(Request(reach=Reach(here=True)), lambda text, share=None: None)


def test_a_request_for_the_same_job_keeps_its_hosts() -> None:
    found = Request(1, hosts=(HostRequest("n1"), HostRequest("n2")), reach=Reach(slurm="nodes=2", jobs=(7, 7)))
    again = Request(reach=Reach(slurm="nodes=2")).after(found)
    assert (again.hosts, again.reach, again.n) == (found.hosts, found.reach, 1)
    other = Request(reach=Reach(slurm="nodes=3")).after(found)
    assert (other.hosts, other.reach.jobs) == ((), ())
    bigger = Request(4).after(found)
    assert (bigger.hosts, bigger.reach, bigger.n) == (found.hosts, found.reach, 4)


def test_an_sbatch_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_keeper, "SUBMIT_SECONDS", 0.1)
    answer = slurm_keeper.submit_job("ddip-1", "#!/bin/sh", threading.Event())
    assert answer == {"error": "sbatch did not answer within 0.1 s", "may_exist": True}


def test_each_job_near_its_end_gets_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(time_left, "notify", warnings.append)
    monkeypatch.setattr(time_left.slurm, "seconds_left", lambda job: 60.0)
    watch = time_left.TimeLeft()
    for jobs in ([1], [1], [2]):
        watch.follow(jobs)
    assert [warning.split(" ends")[0] for warning in warnings] == ["Slurm job 1", "Slurm job 2"]
