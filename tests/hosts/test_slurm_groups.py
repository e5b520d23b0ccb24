"""`%makedip --slurm` and `--here`: a group on the nodes of a real Slurm job."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ddip
from ddip.cluster.reach import Reach
from ddip.errors import GroupError, RequestInterrupted
from ddip.group.members import time_left
from ddip.group.members.placement import Request

from ..cluster.leftovers import wait_until
from ..cluster.notebook import Notebook
from .first_process import HOME
from .network import Network
from .slurm import Slurm, keepers
from .test_slurm import run_command
from .test_ssh import pull_from_all, sums_of_ranks

TWO_NODES = Reach(slurm="nodes=2 time=30")
WHERE = "import os, socket; where = socket.gethostname(), os.environ.get('CUDA_VISIBLE_DEVICES')"
NOTEBOOK = """
import ddip
from ddip.cluster.reach import Reach
group = ddip.Group(1, reach=Reach(slurm="nodes=2 time=30"))
group.run("x = 1")
print("ready", flush=True)
input()
"""


def allocate_job(options: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Create a job, and make this process part of it; return its ID."""
    reply = run_command(f"salloc --no-shell --time=1:00:00 {options}")
    found = re.search(r"Granted job allocation (\d+)", reply)
    assert found, reply
    monkeypatch.setenv("SLURM_JOB_ID", found[1])
    monkeypatch.setenv("SLURM_NTASKS", "1")  # of the job step that the notebook runs in
    return int(found[1])


def press_stop_when_queued(told: list[str]) -> threading.Thread:
    """Press the stop button once `told` says that a job is queued."""

    def wait_and_stop() -> None:
        wait_until(lambda: any("is pending" in text for text in told), 60)
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=wait_and_stop)
    stopper.start()
    return stopper


def test_a_job_is_submitted_and_ends_with_the_group(slurm: Slurm) -> None:
    messages: list[str] = []
    with ddip.Group(2, reach=TWO_NODES, progress=lambda text, share=None: messages.append(text)) as group:
        assert list(slurm.jobs().values()) == ["RUNNING"]
        assert sums_of_ranks(group) == [10.0] * 4
        group.run(WHERE)
        assert [host for host, _ in pull_from_all(group, "where")] == ["h1", "h1", "h2", "h2"]
        assert group.describe() == "ddip: 4 ranks on the CPU of h1, h2, gloo"
        jobs = slurm.jobs()
        group.change(Request(n=1))
        assert sums_of_ranks(group) == [3.0] * 2
        group.restart()
        assert sums_of_ranks(group) == [3.0] * 2
        assert slurm.jobs() == jobs
    wait_until(lambda: not slurm.jobs())


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        pytest.param("--gpus-per-node=2", ("0,1", "0,1"), marks=pytest.mark.long),
        pytest.param("--gpus=4", ("0,1", "0,1"), marks=pytest.mark.long),
        ("--gpus=3", ("0,1", "0")),
        ("-n3 --gpus-per-task=1", ("0,1", "0")),
    ],
)
def test_a_group_uses_the_nodes_of_its_current_allocation(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, options: str, gpus: tuple[str, str]
) -> None:
    job = allocate_job(f"-N2 {options}", monkeypatch)
    with ddip.Group(1, reach=Reach(here=True)) as group:
        assert group.notices == []  # ranks on the CPU, as requested
        assert sums_of_ranks(group) == [3.0] * 2
        group.run(WHERE)
        assert pull_from_all(group, "where") == [("h1", gpus[0]), ("h2", gpus[1])]
    assert slurm.jobs() == {job: "RUNNING"}
    run_command(f"scancel {job}")
    wait_until(lambda: not slurm.jobs())


def test_gpus_that_torch_cannot_see_are_reported(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of these nodes are copies of /dev/null."""
    job = allocate_job("-N1 --gpus=2", monkeypatch)
    with ddip.Group(reach=Reach(here=True)) as group:
        (notice,) = group.notices
        assert re.match(r"the job has 2 GPUs on h\d, and torch sees none there, so the ranks are on the CPU; ", notice)
    run_command(f"scancel {job}")
    wait_until(lambda: not slurm.jobs())


def test_a_job_that_waits_is_shown_and_stop_cancels_it(slurm: Slurm) -> None:
    run_command("sbatch --nodes=2 --exclusive --output=/dev/null --wrap='sleep 1000'")
    wait_until(lambda: list(slurm.jobs().values()) == ["RUNNING"])
    messages: list[str] = []
    stopper = press_stop_when_queued(messages)
    with pytest.raises(RequestInterrupted, match="job was cancelled"):
        ddip.Group(1, reach=TWO_NODES, progress=lambda text, share=None: messages.append(text))
    stopper.join()
    assert any(re.match(r"ddip: job \d+ is pending \(\w+\); stop cancels it", text) for text in messages)
    assert list(slurm.jobs().values()) == ["RUNNING"]
    run_command("scancel --user=root")
    wait_until(lambda: not slurm.jobs())


def test_a_job_that_slurm_rejects_is_reported(slurm: Slurm) -> None:
    with pytest.raises(GroupError, match="--slurm .*sbatch .*patrition"):
        ddip.Group(1, reach=Reach(slurm="nodes=1 patrition=x"))
    with pytest.raises(GroupError, match="--here: .*--hosts h1,h2"):
        ddip.Group(1, reach=Reach(here=True))
    assert slurm.jobs() == {}


def _environment_with_wrapper(folder: Path, command: str, line: str) -> dict[str, str]:
    """Return an environment in which `line` of bash replaces a Slurm command, whose path is in $REAL."""
    real = shutil.which(command)
    (folder / command).write_text(f"#!/bin/bash\nREAL={real}\n{line}\n")
    (folder / command).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_job_keeps_its_place_while_slurm_does_not_answer(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f'mkdir {tmp_path}/asked 2> /dev/null && {{ echo "Socket timed out" >&2; exit 1; }}\nexec "$REAL" "$@"'
    monkeypatch.setenv("PATH", _environment_with_wrapper(tmp_path, "squeue", line)["PATH"])
    messages: list[str] = []
    with ddip.Group(1, reach=TWO_NODES, progress=lambda text, share=None: messages.append(text)) as group:
        assert any("Slurm has not answered squeue (Socket timed out); stop cancels it" in text for text in messages)
        assert sums_of_ranks(group) == [3.0] * 2
    wait_until(lambda: not slurm.jobs())


def test_a_notebook_killed_during_submission_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    line = f'"$REAL" "$@"; touch {tmp_path}/submitted; until [ -e {tmp_path}/go ]; do sleep 0.1; done'
    notebook = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment_with_wrapper(tmp_path, "sbatch", line),
    )
    try:
        wait_until((tmp_path / "submitted").exists)
        assert len(slurm.jobs()) == 1
    finally:
        notebook.kill()
        notebook.communicate()
        (tmp_path / "go").touch()
    wait_until(lambda: not slurm.jobs(), 15)


def test_a_job_that_slurm_accepts_too_late_is_cancelled(slurm: Slurm) -> None:
    with (
        slurm.silent(),
        pytest.raises(GroupError, match=r"sbatch failed: .*; Slurm has not .*ddip-\w+ is"),
    ):
        ddip.Group(1, reach=TWO_NODES)
    wait_until(lambda: not keepers())  # it ends once Slurm knows no such job
    assert slurm.jobs() == {}


@pytest.mark.parametrize("with_notebook", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_job_outlives_its_killed_keeper(slurm: Slurm, with_notebook: bool) -> None:
    notebook = subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert notebook.stdout is not None and notebook.stdout.readline() == b"ready\n"
        (keeper,) = keepers()
        os.kill(keeper, signal.SIGKILL)
        if with_notebook:
            notebook.kill()
    finally:
        notebook.communicate(b"\n")
    wait_until(lambda: not slurm.jobs(), 75)


def test_a_job_close_to_its_end_is_reported_twice(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_left, "WARN_SECONDS", (600.0, 40.0))
    with ddip.Group(1, reach=Reach(slurm="nodes=1 time=1")):
        stderr = capsys.readouterr().err
        assert "save your work: the ranks end with the job" in stderr  # twice if the start takes 20 s

        def is_announced_twice() -> bool:
            nonlocal stderr
            stderr += capsys.readouterr().err
            return stderr.count("save your work: the ranks end with the job") == 2

        wait_until(is_announced_twice)


@pytest.mark.parametrize("when", ["idle", "in the queue"])
def test_a_killed_notebook_leaves_no_job(slurm: Slurm, when: str) -> None:
    if when == "in the queue":
        run_command("sbatch --nodes=2 --exclusive --output=/dev/null --wrap='sleep 1000'")
        wait_until(lambda: list(slurm.jobs().values()) == ["RUNNING"])
    before = len(slurm.jobs())
    notebook = subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        if when == "idle":
            assert notebook.stdout is not None and notebook.stdout.readline() == b"ready\n"
        else:
            wait_until(lambda: sorted(slurm.jobs().values()) == ["PENDING", "RUNNING"])
    finally:
        notebook.kill()
        notebook.communicate()
    wait_until(lambda: len(slurm.jobs()) == before, 15)
    run_command("scancel --user=root")
    wait_until(lambda: not slurm.jobs())


def test_the_remaining_time_of_a_job_is_shown(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_left, "WARN_SECONDS", (50.0,))
    with ddip.Group(1, reach=Reach(slurm="nodes=1 time=1")) as group:
        (job,) = slurm.jobs()
        assert re.fullmatch(rf"Slurm job {job} ends in 0:0[01]:\d\d", group.lifecycle.place.text())
        messages = ""

        def is_announced() -> bool:
            nonlocal messages
            messages += capsys.readouterr().err
            return "save your work: the ranks end with the job" in messages

        wait_until(is_announced)


def test_the_magic_submits_and_reuses_a_job(slurm: Slurm, tmp_path: Path) -> None:
    job = '--slurm "nodes=2 time=30" --setup "export PREPARED=yes" --python ' + sys.executable
    notebook = Notebook(tmp_path)
    try:
        notebook.run("%load_ext ddip")
        script = notebook.run('%makedip --slurm "nodes=2 gpus=2 time=30 mem=100" --dry-run').stdout
        assert "#SBATCH --gpus-per-node=2\n" in script and slurm.jobs() == {}
        notebook.run(f"%makedip -n 1 {job}")
        assert notebook.run("%%dip\nimport os; print(os.environ['PREPARED'], world_size)").stdout == "yes 2\n"
        jobs = slurm.jobs()
        assert "unchanged" in notebook.run(f"%makedip -n 1 {job}").text
        assert slurm.jobs() == jobs
        assert "add -r" in notebook.fails('%makedip --slurm "nodes=1"').message
        assert "leave out array" in notebook.fails('%makedip -r --slurm "nodes=1 array=3"').message
        notebook.run("%%dip\nassert world_size == 2")
        assert re.search(r"Slurm job \d+ ends in 0:2\d:\d\d", notebook.run("%makedip -i").stdout)
        notebook.run("%makedip -k")
    finally:
        notebook.shut_down()
    wait_until(lambda: not slurm.jobs())


@pytest.mark.long
def test_an_exported_job_gives_the_numbers_of_the_session(slurm: Slurm, hosts: Network, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    try:
        notebook.ok("%load_ext ddip")
        notebook.ok(f'%makedip -n 1 --slurm "nodes=2 time=30" --python {sys.executable}')
        notebook.ok("%%dip\nimport torch\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))")
        notebook.ok("""
            %%dip
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for _ in range(10):
                loss = model(torch.randn(8, 3)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            torch.save([torch.tensor(losses), *model.state_dict().values()], f"rank{rank}.pt")
        """)
        notebook.ok("%dipexport train.py --slurm")
        notebook.run("%makedip -k")
    finally:
        notebook.shut_down()
    wait_until(lambda: not slurm.jobs())
    saved = [hosts[f"h{rank + 1}"].path(f"{HOME}/rank{rank}.pt") for rank in range(2)]
    ours = [torch.load(path) for path in saved]
    for path in saved:
        path.unlink()
        shutil.copy(tmp_path / "train.py", path.parent)  # the folders of a real cluster are shared
    command = ["sbatch", "--wait", f"--chdir={HOME}", "--output=job.log", str(tmp_path / "train.sbatch")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr + saved[0].with_name("job.log").read_text()
    for mine, path in zip(ours, saved, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, torch.load(path), strict=True))
