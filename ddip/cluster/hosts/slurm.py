"""Slurm jobs whose nodes are a group's hosts: jobs that ddip submits, or the job that the notebook runs in.

A group starts in one job. A replacement for a lost node is in another job, since a running job gets no further nodes.
A job submitted by ddip runs only a script that waits; the agents are steps in the job (``ways.Srun``). Its keeper
(``slurm_keeper.py``), a process beside the notebook, submits the job, and cancels it when the group or the notebook
ends. If the keeper is killed, the notebook cancels the job; if both are, the script ends by itself once no step has run
for a while. The job survives the loss of the script's node; only that last resort is missing then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping

from ddip.cluster.hosts import slurm_keeper
from ddip.cluster.processes import processes
from ddip.errors import BadInput, GroupError, RequestInterrupted

EXAMPLE = 'such as --slurm "nodes=2 gpus=4 time=2:00:00"'
WORDS = {"gpus": "gpus-per-node", "cpus": "cpus-per-task"}
"""Short names for options of sbatch; all other names are passed on."""
TAKEN = (
    *("job-name", "output", "ntasks", "ntasks-per-node", "wrap", "array", "parsable", "wait", "test-only"),
    *("help", "usage", "version"),
)
"""Options of sbatch that ddip sets itself, or that would create another kind of job, or none; also abbreviated."""
NAMING = ("nodelist", "nodefile")
"""Options of sbatch that name the nodes of a job."""
NO_GROUP = "the start was interrupted; {job}, and there is no group"
"""Message after a stop; {job} stands for what has become of the job."""
KEPT = {"no-kill": "", "no-requeue": ""}
"""Options that keep a job running after it loses a node, and keep Slurm from requeuing an ended job, which would have
no ranks."""
POLL_SECONDS = 1.0
ASK_SECONDS = slurm_keeper.ASK_SECONDS
SHOW_SECONDS = 2.0
"""Time limit of a Slurm command whose result is only shown."""
CANCEL_SECONDS = 10.0
"""Longest wait for Slurm to confirm that a job is cancelled; the keeper keeps trying."""
WAITING = """
# holds the nodes for the ranks, which ddip starts as steps; ends when none has run for 50 s, as far as is known, or
# when none has begun for five minutes, since a step may have to wait for the nodes' prolog
seconds=2 looks=150 idle=0
while [ $idle -lt $looks ]; do
    sleep $seconds
    listed=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i) || continue
    if grep -qE '\\.[0-9]+$' <<< "$listed"; then seconds=10 looks=5 idle=0; else idle=$((idle + 1)); fi
done
"""


class Keeper:
    """The process that submits one job, whose name no other job has, and cancels it."""

    def __init__(self) -> None:
        self.name = f"ddip-{uuid.uuid4().hex[:8]}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", slurm_keeper.__name__, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, processes.MARKED: processes.MARK},
            start_new_session=True,
        )

    def submit(self, script: str) -> slurm_keeper.Answer:
        """Submit a job with `script`, wait for sbatch, and return the job ID or the error; raises nothing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self._process.stdin.write(json.dumps(script).encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "ddip's process for the job has ended", "may_exist": True}

    def cancel(self) -> str:
        """Make the keeper cancel the job, and return a clause that says whether Slurm has confirmed it.

        Waits up to CANCEL_SECONDS for the keeper, and as long again if it has failed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        is_cancelled = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(CANCEL_SECONDS)
            is_cancelled = code == 0 or slurm_keeper.cancel_job(self.name, slurm_keeper.LOOKS, CANCEL_SECONDS)
        self._process.stdout.close()
        if is_cancelled:
            return "its job was cancelled"
        _trying.append(self)
        return f"Slurm has not confirmed yet that its job {self.name} is cancelled; ddip keeps trying"


_keepers: dict[int, Keeper] = {}
"""The keeper of each job that ddip submitted and has not cancelled."""
_holds: dict[int, int] = {}
"""Number of users of each of these jobs."""
_trying: list[Keeper] = []
"""Keepers that try to cancel their jobs after the group has ended."""


class SlurmUnavailable(GroupError):
    """Slurm did not answer or reported an error, so the state of its jobs is unknown."""


def parse_options(typed: str) -> dict[str, str]:
    """Parse options such as ``nodes=2 gpus=4 time=2:00:00 exclusive``; return values by option of sbatch.

    An option without a value has an empty one. Raises BadInput, for example if ``nodes`` is missing.
    """
    try:
        words = shlex.split(typed)
    except ValueError:
        raise BadInput(
            f"--slurm {typed!r}: a quote is not closed; type it on both sides of the text, or leave it out"
        ) from None
    found = {}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise BadInput(f"--slurm {typed!r}: {word!r} is not an option of sbatch; type name=value, {EXAMPLE}")
        if name in TAKEN or any(taken.startswith(name) for taken in TAKEN):
            raise BadInput(f"--slurm {typed!r}: leave out {name}; ddip starts the ranks itself, one agent on each node")
        found[WORDS.get(name, name)] = value
    if "nodes" not in found:
        raise BadInput(f"--slurm {typed!r}: type how many nodes, {EXAMPLE}")
    return found


def batch_script(typed: str) -> str:
    """Return the batch script for ``--slurm typed``; raise BadInput."""
    own = {"output": "/dev/null", "ntasks-per-node": "1", **KEPT}
    lines = [f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in (own | parse_options(typed)).items()]
    return "\n".join(["#!/bin/bash", *lines, WAITING])


def further_node_options(typed: str, count: int, without: Iterable[str]) -> str:
    """Return the options for `count` further nodes like those of ``--slurm typed``.

    The nodes `without` are excluded. Raises BadInput if `typed` is invalid.
    """
    options = {name: value for name, value in parse_options(typed).items() if name not in NAMING}
    options["nodes"] = str(count)
    not_these = ",".join(filter(None, [options.pop("exclude", ""), *without]))
    if not_these:
        options["exclude"] = not_these
    return " ".join(shlex.quote(f"{name}={value}" if value else name) for name, value in options.items())


def submit_job(typed: str, progress: Callable[[str], None], stopped: str = NO_GROUP) -> int:
    """Submit a job for ``--slurm typed``, wait until it runs, hold it, and return its ID.

    `give_back` gives up the hold; the last one cancels the job. `progress` gets a line for the user about every second
    while the job waits. Raises BadInput or GroupError, or RequestInterrupted after an interrupt; the job is then
    cancelled, or its keeper keeps trying to cancel it. The text of RequestInterrupted is `stopped`, in which
    ``{job}`` is replaced by a clause that says which of the two has happened.
    """
    script = batch_script(typed)
    _ensure_slurm()
    keeper = Keeper()
    try:
        answer = keeper.submit(script)
        if "job" in answer:
            job = int(answer["job"])
            _keepers[job], _holds[job] = keeper, 1
            _wait_until_running(job, progress)
            return job
    except BaseException as error:
        cancelled = keeper.cancel()
        for known in [job for job, its_keeper in _keepers.items() if its_keeper is keeper]:
            del _keepers[known], _holds[known]
        if isinstance(error, KeyboardInterrupt):
            raise RequestInterrupted(stopped.format(job=cancelled)) from None
        raise
    cancelled = keeper.cancel()
    if answer["may_exist"]:
        raise GroupError(f"--slurm {typed!r}: sbatch failed: {answer['error']}; {cancelled}")
    raise GroupError(f"--slurm {typed!r}: sbatch rejected the job: {answer['error']}")


def _ensure_slurm() -> None:
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise GroupError(
            "there is no Slurm here: sbatch and srun are not on the PATH; --hosts h1,h2 reaches hosts over ssh"
        )


def _wait_until_running(job: int, progress: Callable[[str], None]) -> None:
    """Wait until `job` runs; raise GroupError if it ends before."""
    while True:
        try:
            state_and_reason = _slurm_output("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r")
        except SlurmUnavailable as error:  # the job keeps its place in the queue
            progress(f"ddip: job {job}: {error}; stop cancels it")
            time.sleep(POLL_SECONDS)
            continue
        state, _, why = state_and_reason.partition("|")
        if state == "RUNNING":
            return
        if state not in ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED"):
            raise GroupError(f"job {job} ended before it started ({state.lower() or 'it has left the queue'})")
        progress(f"ddip: job {job} is {state.lower()}{f' ({why})' if why not in ('', 'None') else ''}; stop cancels it")
        time.sleep(POLL_SECONDS)


def hold_job(job: int) -> bool:
    """Keep a job that ddip submitted until one more `give_back`; return False if it does not run.

    Returns True also for a running job of others, which `give_back` leaves alone. Raises GroupError if there is no
    Slurm command, and SlurmUnavailable if Slurm does not answer.
    """
    if not node_names(job):
        return False
    if job in _holds:
        _holds[job] += 1
    return True


def give_back(job: int) -> None:
    """Give up one hold on `job`; after the last hold, cancel it.

    Waits briefly until Slurm confirms that. Does nothing for a job that ddip did not submit.
    """
    if job in _holds:
        _holds[job] -= 1
        if not _holds[job]:
            del _holds[job]
            _keepers.pop(job).cancel()


def own_job() -> int:
    """Return the ID of the job that this process runs in; 0 if there is none."""
    number = os.environ.get("SLURM_JOB_ID", "")
    return int(number) if number.isdecimal() else 0


def node_names(job: int) -> list[str]:
    """Return the names of a job's nodes, in Slurm's order; an empty list if the job is not running.

    Raises GroupError if there is no Slurm command, and SlurmUnavailable if Slurm does not answer.
    """
    state, _, compressed = _slurm_output("squeue", "--noheader", f"--jobs={job}", "--format=%T|%N").partition("|")
    return _slurm_output("scontrol", "show", "hostnames", compressed).split() if state == "RUNNING" else []


def seconds_left(job: int) -> float | None:
    """Return the seconds until the job's time limit.

    None if it has no limit, does not run, or Slurm does not answer. Raises GroupError if there is no Slurm command.
    """
    try:
        text = _slurm_output("squeue", "--noheader", f"--jobs={job}", "--format=%L", seconds=SHOW_SECONDS)
    except SlurmUnavailable:
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def count_gpus(job: int, node: str) -> int:
    """Return the number of GPUs that `job` has on `node`, whatever option requested them; may be 0.

    Raises GroupError if there is no Slurm command, and SlurmUnavailable if Slurm does not answer.
    """
    text = _slurm_output("scontrol", "--details", "--oneliner", "show", "job", str(job))
    for names, gres in re.findall(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", text):
        if node in _slurm_output("scontrol", "show", "hostnames", names).split():
            return sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres)))
    return 0


def step_command(job: int, node: str) -> list[str]:
    """Return the start of the srun command for a step on `node` of `job`, with all its resources there.

    Raises GroupError if there is no Slurm command, and SlurmUnavailable if Slurm does not answer.
    """
    gpu_count = count_gpus(job, node)
    words = ["--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0", "--unbuffered", "--quiet"]
    # the total, not --gpus-per-node: Slurm refuses the latter if the job's nodes have different numbers of GPUs
    words += [f"--gpus={gpu_count}"] * bool(gpu_count)
    return ["srun", f"--jobid={job}", f"--nodelist={node}", *words]


def step_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the variables of this process's own job step, which srun would read as options."""
    return (name for name in variables if name.startswith(("SLURM_", "SRUN_")) and name != "SLURM_CONF")


def _slurm_output(*command: str, seconds: float = ASK_SECONDS) -> str:
    """Run a Slurm command for at most `seconds`, and return its output.

    It is empty for a job that ended long ago. Raises SlurmUnavailable if it fails or does not answer, and GroupError if
    there is no such command.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise GroupError(f"there is no Slurm here: {command[0]} is not on the PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"Slurm has not answered {command[0]} for {seconds:g} s") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        why = (done.stderr.strip().splitlines() or ["no error text"])[-1]
        raise SlurmUnavailable(f"Slurm has not answered {command[0]} ({why})")
    return done.stdout.strip()
