"""Submits a job to Slurm, and cancels it when its stdin ends: the group is gone, or the notebook, however it ended.

Run as ``python -P -m ddip.cluster.slurm_keeper``; one line of JSON on stdin is the job's script, one on stdout says
``{"job": 17}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    script = json.loads(sys.stdin.readline())
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    job = done.stdout.strip().partition(";")[0]
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.strip().splitlines()]
    why = "; ".join(line for line in lines if not line.startswith("Try "))
    said = {"job": job} if done.returncode == 0 else {"error": why}
    with contextlib.suppress(BrokenPipeError):  # the notebook was killed meanwhile
        print(json.dumps(said), flush=True)
    sys.stdin.read()
    if job:
        subprocess.run(["scancel", job], capture_output=True)


if __name__ == "__main__":
    main()
