"""Run programs in turns, for the numbers that they print: the machines are shared and noisy."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


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
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode or not done.stdout.strip():
            sys.exit(f"failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [float(word) for word in done.stdout.splitlines()[-1].split()]


def in_turns(programs: dict[str, Program], rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """The numbers that each of `programs` prints, a list for each number with one of each round, by its name."""
    runs: dict[str, list[list[float]]] = {name: [] for name in programs}
    for number in range(rounds):
        for name, program in programs.items():
            runs[name].append(program.run())
            print(f"  round {number + 1} of {rounds}: {name} {runs[name][-1]}", file=sys.stderr)
    return {name: list(zip(*rows, strict=True)) for name, rows in runs.items()}
