"""Submits a job to Slurm, and cancels it when its stdin ends: the group is gone, or the notebook, however it ended.

Run as ``python -P -m ddip.cluster.hosts.slurm_keeper``; one line of JSON on stdin is the job's script, one on stdout
says ``{"job": 17}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

SUBMIT_SECONDS = 120.0


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    script = json.loads(sys.stdin.readline())
    said = _submit_job(script)
    with contextlib.suppress(BrokenPipeError):  # the notebook was killed meanwhile
        print(json.dumps(said), flush=True)
    sys.stdin.read()
    if said.get("job"):
        subprocess.run(["scancel", said["job"]], capture_output=True)


def _submit_job(script: str) -> dict[str, str]:
    """Return ``{"job": id}`` or ``{"error": text}``."""
    command = ["sbatch", "--parsable"]
    try:
        done = subprocess.run(
            command, input=script, capture_output=True, text=True, errors="replace", timeout=SUBMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"sbatch did not answer within {SUBMIT_SECONDS:g} s"}
    if done.returncode == 0:
        return {"job": done.stdout.strip().partition(";")[0]}
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.strip().splitlines()]
    return {"error": "; ".join(line for line in lines if not line.startswith("Try "))}


if __name__ == "__main__":
    main()
