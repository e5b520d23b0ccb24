"""Slurm on the hosts does what its users would type."""

from __future__ import annotations

import re
import shlex
import subprocess

from ..cluster.leftovers import wait_until
from .network import Network
from .slurm import Slurm


def run_command(command: str) -> str:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout or done.stderr


def test_a_step_runs_on_two_nodes(slurm: Slurm) -> None:
    assert sorted(run_command("srun -N2 hostname").split()) == ["h1", "h2"]
    assert run_command("srun -N1 -n2 printenv SLURM_LOCALID").split() in (["0", "1"], ["1", "0"])


def test_an_allocation_is_held_and_released(slurm: Slurm, hosts: Network) -> None:
    output = run_command("salloc --no-shell -N2 --gpus-per-node=2 --time=2:00:00")
    found = re.search(r"Granted job allocation (\d+)", output)
    assert found, output
    job = found[1]
    assert slurm.jobs() == {int(job): "RUNNING"}
    assert sorted(run_command(f"srun --jobid={job} hostname").split()) == ["h1", "h2"]
    assert run_command(f"srun --jobid={job} printenv CUDA_VISIBLE_DEVICES").split() == ["0,1", "0,1"]
    assert "2:00:00" in run_command(f"squeue --noheader --format=%l --jobs={job}")
    run_command(f"scancel {job}")
    wait_until(lambda: not slurm.jobs())


def test_a_cancelled_job_ends_its_processes(slurm: Slurm, hosts: Network) -> None:
    def hosts_with_sleep() -> list[str]:
        return [name for name in ("h1", "h2") for _, line in hosts[name].processes() if line.endswith("sleep 1000")]

    step = subprocess.Popen(["srun", "-N2", "sleep", "1000"], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: hosts_with_sleep() == ["h1", "h2"])
        (job,) = slurm.jobs()
        run_command(f"scancel {job}")
        assert step.wait(20) != 0
        wait_until(lambda: not hosts_with_sleep())
    finally:
        step.kill()
        step.wait()


def test_a_job_waits_in_the_queue_until_it_is_cancelled(slurm: Slurm) -> None:
    run_command("sbatch --nodes=2 --exclusive --output=/dev/null --wrap='sleep 1000'")
    second = run_command("sbatch --nodes=2 --exclusive --output=/dev/null --wrap=true").split()[-1]
    wait_until(lambda: sorted(slurm.jobs().values()) == ["PENDING", "RUNNING"])
    assert slurm.jobs()[int(second)] == "PENDING"
    run_command("scancel --user=root")
    wait_until(lambda: not slurm.jobs())


def test_a_node_that_has_lost_its_power_comes_back(slurm: Slurm, hosts: Network) -> None:
    hosts["h2"].lose_power()
    hosts["h2"].boot()
    slurm.start_node("h2")
    assert run_command("srun -w h2 hostname") == "h2\n"
