"""Submit a job to Slurm, and cancel it when stdin ends, because the group or the notebook has ended in any way.

Run as ``python -P -m ddip.cluster.hosts.slurm_keeper``. It reads the job's script as one line of JSON, and writes one
line, ``{"job": 17}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

SUBMIT_SECONDS = 120.0


def main() -> None:
    """Submit the job described on stdin, and cancel it when stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    script = json.loads(sys.stdin.readline())
    answer = _submit_job(script)
    with contextlib.suppress(BrokenPipeError):  # the notebook was killed meanwhile
        print(json.dumps(answer), flush=True)
    sys.stdin.read()
    if answer.get("job"):
        subprocess.run(["scancel", answer["job"]], capture_output=True)


def _submit_job(script: str) -> dict[str, str]:
    """Submit a job with `script`; return ``{"job": id}`` or ``{"error": text}``."""
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
