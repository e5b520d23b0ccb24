"""Run programs in alternation and collect the numbers they print: the machines are shared and noisy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RUN_LIMIT_SECONDS = 150
"""Time limit of one run. A program that exceeds it is killed with all its children and run again; notebook_launcher may
hang."""
TRIES = 3


@dataclass(frozen=True)
class Program:
    """Python code whose last line of output is the result, and the Python to run it with."""

    code: str
    arguments: tuple[str, ...] = ()
    python: str = sys.executable

    def run(self) -> list[float]:
        """Run the program in its own process and return the numbers it prints."""
        return [float(word) for word in self.last_line().split()]

    def last_line(self) -> str:
        """Run the program in its own process and return the last line it prints."""
        command = [self.python, "-c", self.code, *self.arguments]
        # PATH holds only this Python: nbdistributed starts "python", and its "pkill" would end unrelated processes
        environment = {**os.environ, "PATH": str(Path(self.python).parent)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process of ddip may compile all its modules
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        for _ in range(TRIES):
            with subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True) as process:  # type: ignore[call-overload]
                try:
                    out, errors = process.communicate(timeout=RUN_LIMIT_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    print(f"  timed out: {self.code[-400:]}", file=sys.stderr)
                    continue
            if process.returncode or not out.strip():
                sys.exit(f"failed: {out[-2000:]}{errors[-2000:]}")
            return str(out.splitlines()[-1])
        sys.exit(f"timed out {TRIES} times")


def run_alternately(programs: dict[str, Program], rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """Return, per program, one list per printed number, with one value per round."""
    runs: dict[str, list[list[float]]] = {name: [] for name in programs}
    for number in range(rounds):
        for name, program in programs.items():
            runs[name].append(program.run())
            print(f"  round {number + 1} of {rounds}: {name} {runs[name][-1]}", file=sys.stderr)
    return {name: list(zip(*rows, strict=True)) for name, rows in runs.items()}
