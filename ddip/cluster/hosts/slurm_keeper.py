"""Submit a job to Slurm, and cancel it when stdin ends, because the group or the notebook has ended in any way.

Run as ``python -P -m ddip.cluster.hosts.slurm_keeper NAME``. It reads the job's script as one line of JSON, and writes
one line: ``{"job": "17"}``, or ``{"error": ..., "may_exist": false}``. Slurm may accept a job although sbatch has
failed, so the job has a name of its own, by which it is found. The exit code is 0 once Slurm has confirmed that there
is no such job.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TypedDict

SUBMIT_SECONDS = 120.0
ASK_SECONDS = 20.0
"""Time limit of a Slurm command."""
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
LOOKS = 3
"""Number of times that Slurm must know no job if sbatch has failed: it may still have to handle the submission."""
CANCEL_SECONDS = 24 * 3600.0
"""Time after which the keeper no longer tries to cancel its job."""
SILENT = re.compile(r"timed? ?out|contact|communicat|connect|zero bytes|did not answer", re.IGNORECASE)
"""Matches errors of sbatch after which Slurm may have accepted the job nevertheless."""


class Answer(TypedDict, total=False):
    """The result of a submission."""

    job: str
    """Job ID; missing if sbatch failed."""
    error: str
    may_exist: bool
    """True if Slurm may have accepted the job although sbatch failed."""


def main() -> None:
    """Submit the job described on stdin, print the answer, and cancel the job when stdin ends.

    Exits with 1 if Slurm has not confirmed the cancellation.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, script = sys.argv[1], json.loads(sys.stdin.readline())
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    answer = submit_job(name, script, ended)
    with contextlib.suppress(BrokenPipeError):  # the notebook was killed meanwhile
        print(json.dumps(answer), flush=True)
    ended.wait()
    if "job" in answer or answer["may_exist"]:
        sys.exit(not cancel_job(name, LOOKS if "error" in answer else 1, CANCEL_SECONDS))


def submit_job(name: str, script: str, ended: threading.Event) -> Answer:
    """Submit a job with this `name` and `script`, and return its ID or the error.

    Gives up once `ended` is set, or after SUBMIT_SECONDS.
    """
    command = ["sbatch", "--parsable", f"--job-name={name}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        end = time.monotonic() + SUBMIT_SECONDS
        rest: str | None = script
        while True:
            try:
                output, errors = process.communicate(rest, timeout=POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                rest = None
                if ended.is_set() or time.monotonic() > end:
                    process.kill()
                    return {"error": f"sbatch did not answer within {SUBMIT_SECONDS:g} s", "may_exist": True}
    job = output.strip().partition(";")[0]
    if process.returncode == 0 and job.isdecimal():
        return {"job": job}
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in errors.strip().splitlines()]
    error = "; ".join(line for line in lines if not line.startswith("Try ")) or f"sbatch printed {job!r}"
    return {"error": error, "may_exist": process.returncode == 0 or bool(SILENT.search(error))}


def cancel_job(name: str, looks: int, seconds: float) -> bool:
    """Cancel the job `name`, and wait until Slurm has reported `looks` times that it is gone.

    Returns False after `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", f"--name={name}"], capture_output=True, timeout=ASK_SECONDS)
            command = ["squeue", "--noheader", f"--name={name}", "--format=%T"]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS)
            if done.returncode == 0 and set(done.stdout.split()) <= {"COMPLETING"}:
                looks -= 1
        if looks <= 0 or time.monotonic() > end:
            return looks <= 0
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
