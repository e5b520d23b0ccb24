"""Slurm: jobs whose nodes are a group's hosts, submitted by ddip, or the one that the notebook is in.

A group begins in one job. What takes the place of a lost node is in another, since a running job gets no more nodes.
A job of ddip's own runs nothing but a script that waits; the agents are steps in it (``ways.Srun``). Its keeper
(``slurm_keeper.py``), a process beside the notebook, has submitted it, and cancels it when the group, or the notebook,
is gone. Should the keeper's host be gone, too, the script ends by itself, when no step has run for a while. The job
outlives the node of its script: nothing but that last resort is missing then.
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
from collections.abc import Callable, Iterable, Iterator, Mapping

from ddip.cluster.processes import processes
from ddip.errors import BadInput, GroupError, RequestInterrupted

EXAMPLE = 'such as --slurm "nodes=2 gpus=4 time=2:00:00"'
WORDS = {"gpus": "gpus-per-node", "cpus": "cpus-per-task"}
"""Those of ours that Slurm calls otherwise; all others are options of sbatch."""
TAKEN = ("job-name", "output", "ntasks", "ntasks-per-node", "wrap", "array", "parsable")
"""Options of sbatch that ddip sets, or that would make another kind of job."""
NAMING = ("nodelist", "nodefile")
"""Options that say by name which nodes a job has."""
NO_GROUP = "the start was interrupted; its job was cancelled, and there is no group"
KEPT = {"no-kill": "", "no-requeue": ""}
"""With them, a job goes on when it loses a node, and one that has ended does not begin again, without ranks."""
POLL_SECONDS = 1.0
ASK_SECONDS = 20.0
IDLE_LOOKS = 30
WAITING = f"""
# holds the nodes for the ranks, which ddip starts as steps; ends when none has run for five minutes, as far as is known
idle=0
while [ $idle -lt {IDLE_LOOKS} ]; do
    sleep 10
    listed=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i) || continue
    steps=$(grep -cE '\\.[0-9]+$' <<< "$listed")
    idle=$((steps ? 0 : idle + 1))
done
"""

_keepers: dict[int, subprocess.Popen[bytes]] = {}
"""Of jobs that are not to be cancelled yet."""
_holds: dict[int, int] = {}
"""How many want that."""


class Silent(GroupError):
    """Slurm has not answered; what it would have said is not known."""


def parse(typed: str) -> dict[str, str]:
    """Options of sbatch out of ``nodes=2 gpus=4 time=2:00:00 exclusive``; raises BadInput."""
    try:
        words = shlex.split(typed)
    except ValueError:
        raise BadInput(f"--slurm {typed!r}: a quote is not closed") from None
    found = {}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise BadInput(f"--slurm {typed!r}: {word!r} is no option of sbatch; type name=value, {EXAMPLE}")
        if name in TAKEN:
            raise BadInput(f"--slurm {typed!r}: leave out {name}; ddip starts the ranks itself, one agent on each node")
        found[WORDS.get(name, name)] = value
    if "nodes" not in found:
        raise BadInput(f"--slurm {typed!r}: type how many nodes, {EXAMPLE}")
    return found


def script(typed: str) -> str:
    """What is submitted for ``--slurm typed``; raises BadInput."""
    own = {"job-name": "ddip", "output": "/dev/null", "ntasks-per-node": "1", **KEPT}
    lines = [f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in (own | parse(typed)).items()]
    return "\n".join(["#!/bin/bash", *lines, WAITING])


def like(typed: str, count: int, without: Iterable[str]) -> str:
    """What to type for `count` more nodes like those of ``--slurm typed``, none of them one of `without`."""
    options = {name: value for name, value in parse(typed).items() if name not in NAMING}
    options["nodes"] = str(count)
    not_these = ",".join(filter(None, [options.pop("exclude", ""), *without]))
    if not_these:
        options["exclude"] = not_these
    return " ".join(shlex.quote(f"{name}={value}" if value else name) for name, value in options.items())


def submit(typed: str, progress: Callable[[str], None], stopped: str = NO_GROUP) -> int:
    """Submit a job for ``--slurm typed``, and wait until it runs; returns its id, which is held.

    Raises BadInput, GroupError, and RequestInterrupted, which says `stopped`, if that is interrupted, when it has been
    cancelled.
    """
    text = script(typed)
    _ensure_there()
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "ddip.cluster.hosts.slurm_keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, processes.MARKED: processes.MARK},
        start_new_session=True,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        keeper.stdin.write(json.dumps(text).encode() + b"\n")
        keeper.stdin.flush()
        told = json.loads(keeper.stdout.readline() or b'{"error": "nothing was said"}')
        if "error" in told:
            raise GroupError(f"--slurm {typed!r}: sbatch has not taken the job: {told['error']}")
        job = int(told["job"])
        _keepers[job], _holds[job] = keeper, 1
        _wait(job, progress)
    except BaseException as error:
        _end(keeper)
        for known in [job for job, its in _keepers.items() if its is keeper]:
            del _keepers[known], _holds[known]
        if isinstance(error, KeyboardInterrupt):
            raise RequestInterrupted(stopped) from None
        raise
    return job


def _ensure_there() -> None:
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise GroupError(
            "there is no Slurm here: sbatch and srun are not on the PATH; --hosts h1,h2 takes hosts by ssh"
        )


def _wait(job: int, progress: Callable[[str], None]) -> None:
    """Until it runs."""
    while True:
        try:
            said = _asked("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r")
        except Silent as error:  # the job keeps its place in the queue
            progress(f"ddip: job {job}: {error}; stop cancels it")
            time.sleep(POLL_SECONDS)
            continue
        state, _, why = said.partition("|")
        if state == "RUNNING":
            return
        if state not in ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED"):
            raise GroupError(f"job {job} has ended before it ran ({state.lower() or 'it is in no queue any more'})")
        progress(f"ddip: job {job} is {state.lower()}{f' ({why})' if why not in ('', 'None') else ''}; stop cancels it")
        time.sleep(POLL_SECONDS)


def hold(job: int) -> bool:
    """Keep a job of ddip's own, until `give_back`; returns False if it does not run any more."""
    if not nodes(job):
        return False
    if job in _holds:
        _holds[job] += 1
    return True


def give_back(job: int) -> None:
    """One who wanted `job` does not any more; cancels one of ddip's own that nobody wants."""
    if job in _holds:
        _holds[job] -= 1
        if not _holds[job]:
            del _holds[job]
            _end(_keepers.pop(job))


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """Have it cancel its job, and wait for its end."""
    assert keeper.stdin is not None and keeper.stdout is not None
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(ASK_SECONDS)  # one that takes longer has still to cancel it, and ends by itself
    keeper.stdout.close()


def own_job() -> int:
    """The job that this process is in; 0: none."""
    number = os.environ.get("SLURM_JOB_ID", "")
    return int(number) if number.isdecimal() else 0


def nodes(job: int) -> list[str]:
    """The names of a running job's nodes, in Slurm's order; none if it does not run."""
    state, _, compressed = _asked("squeue", "--noheader", f"--jobs={job}", "--format=%T|%N").partition("|")
    return _asked("scontrol", "show", "hostnames", compressed).split() if state == "RUNNING" else []


def seconds_left(job: int) -> float | None:
    """Until its time is over; None: there is no limit, or it does not run, or Slurm does not say."""
    try:
        text = _asked("squeue", "--noheader", f"--jobs={job}", "--format=%L")
    except Silent:
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def gpus(job: int, node: str) -> int:
    """GPUs that a job has on a node, however it has asked for them."""
    text = _asked("scontrol", "--details", "--oneliner", "show", "job", str(job))
    for names, has in re.findall(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", text):
        if node in _asked("scontrol", "show", "hostnames", names).split():
            return sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", has)))
    return 0


def step(job: int, node: str) -> list[str]:
    """What begins a command that is to run on `node` of `job`, with all that the job has there."""
    has = gpus(job, node)
    words = ["--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0", "--unbuffered", "--quiet"]
    # All in all, not by node: where nodes have different numbers, Slurm refuses those by node.
    words += [f"--gpus={has}"] * bool(has)
    return ["srun", f"--jobid={job}", f"--nodelist={node}", *words]


def environment(variables: Mapping[str, str]) -> Iterator[str]:
    """Names of variables by which srun would take this process's own job step for an order."""
    return (name for name in variables if name.startswith(("SLURM_", "SRUN_")) and name != "SLURM_CONF")


def _asked(*command: str) -> str:
    """What a command of Slurm's says; empty for jobs that are long over. Raises GroupError, Silent."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise GroupError(f"there is no Slurm here: {command[0]} is not on the PATH") from None
    except subprocess.TimeoutExpired:
        raise Silent(f"Slurm has not answered {command[0]} for {ASK_SECONDS:g} s") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Silent(f"Slurm has not answered {command[0]} ({why})")
    return done.stdout.strip()
