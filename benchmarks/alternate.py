"""Run programs in turns, and compare the medians of the seconds that they print: the machines are shared and noisy."""

from __future__ import annotations

import statistics
import subprocess
import sys


def seconds(code: str, *arguments: str) -> list[float]:
    """Run Python `code` in a process of its own; returns the numbers on the last line that it prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {done.stderr}")
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def medians(programs: dict[str, str], rounds: int, *arguments: str) -> dict[str, list[float]]:
    """Medians over `rounds` of the numbers that each of `programs` prints, by its name."""
    runs: dict[str, list[list[float]]] = {name: [] for name in programs}
    for number in range(rounds):
        for name, code in programs.items():
            runs[name].append(seconds(code, *arguments))
            print(f"  round {number + 1} of {rounds}: {name} {runs[name][-1]}", file=sys.stderr)
    return {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()}
