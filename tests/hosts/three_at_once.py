"""Run the files of tests/hosts, three at once, each in its own network of hosts, because most of them wait.

Run as ``python -m tests.hosts.three_at_once``, with pytest options.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).parent
NO_TESTS = 5
"""Exit code of pytest if the options deselect all tests of a file."""


def run_file(file: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the tests of a file, and return their output."""
    pytest = [sys.executable, "-m", "pytest", str(file.relative_to(Path.cwd())), *options]
    command = [sys.executable, "-m", "tests.hosts.network", "run", "--", *pytest]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(options: list[str]) -> int:
    """Return 1 if a test has failed, or if there was none."""
    files = sorted(HERE.glob("test_*.py"), key=lambda file: file.stat().st_size, reverse=True)  # long ones first
    with ThreadPoolExecutor(3) as pool:
        codes = []
        for done in as_completed([pool.submit(run_file, file, options) for file in files]):
            codes.append(done.result().returncode)
            if codes[-1] != NO_TESTS:
                print(done.result().stdout, flush=True)
    return int(set(codes) == {NO_TESTS} or bool(set(codes) - {0, NO_TESTS}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
