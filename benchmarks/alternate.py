"""Run programs in turns, for the numbers that they print: the machines are shared and noisy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HANGS_SECONDS = 90
"""After which a program is ended, with all that it has started, and tried again; notebook_launcher may hang."""
TRIES = 3


@dataclass(frozen=True)
class Program:
    """Python code whose last line of output is numbers, and the Python to run it with."""

    code: str
    arguments: tuple[str, ...] = ()
    python: str = sys.executable

    def run(self) -> list[float]:
        """The numbers, from a process of its own."""
        command = [self.python, "-c", self.code, *self.arguments]
        # nothing else on the path: nbdistributed starts "python", and would end others' processes with "pkill"
        environment = {**os.environ, "PATH": str(Path(self.python).parent)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        for _ in range(TRIES):
            with subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True) as process:  # type: ignore[call-overload]
                try:
                    out, errors = process.communicate(timeout=HANGS_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    print(f"  hangs: {self.code[-400:]}", file=sys.stderr)
                    continue
            if process.returncode or not out.strip():
                sys.exit(f"failed: {out[-2000:]}{errors[-2000:]}")
            return [float(word) for word in out.splitlines()[-1].split()]
        sys.exit(f"hung {TRIES} times")


def in_turns(programs: dict[str, Program], rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """The numbers that each of `programs` prints, a list for each number with one of each round, by its name."""
    runs: dict[str, list[list[float]]] = {name: [] for name in programs}
    for number in range(rounds):
        for name, program in programs.items():
            runs[name].append(program.run())
            print(f"  round {number + 1} of {rounds}: {name} {runs[name][-1]}", file=sys.stderr)
    return {name: list(zip(*rows, strict=True)) for name, rows in runs.items()}
