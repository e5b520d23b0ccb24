"""Run tests, each with a time limit, and write a report: what ran, what hung, and where.

    python -m tests.gpu_report --report gpu-report.txt --jobs 4

With ``--jobs`` several processes share the tests and GPUs. A test that hangs is killed with all its processes, after
``py-spy`` has dumped their stacks; the next test follows.
``tests/gpu.sh`` runs this on a machine with GPUs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "grid or not grid"]
LOG = "DDIP_TEST_LOG"
"""Environment variable with the path of the file in which running tests record their progress."""
START_SECONDS = 60.0
"""Time limit of a pytest process until its first test."""
END_SECONDS = 20.0
"""Time limit of the teardown after the last test."""
LINES = 60
"""Lines of a failed test's text that the report keeps."""


# -- in the process of the tests: a pytest plugin


def _write_record(**what: Any) -> None:
    path = os.environ.get(LOG)
    if path:
        with Path(path).open("a") as log:
            print(json.dumps(what), file=log)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the start of a test."""
    _write_record(begins=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the end of a test's set-up, call or teardown."""
    text = ""
    if report.failed:
        text = report.longreprtext
    elif report.skipped and isinstance(report.longrepr, tuple):
        text = report.longrepr[2].removeprefix("Skipped: ")
    _write_record(ends=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration, text=text)


# -- in the supervising process


@dataclass
class Result:
    """Result of one test."""

    test: str
    outcome: str = "did not run: the time was over"
    seconds: float = 0.0
    text: str = ""
    """Reason of a failure or a skip, or the place of a hang."""
    is_over: bool = False

    def add_record(self, record: dict[str, Any]) -> None:
        """Add the record of one phase; the worst outcome counts."""
        self.seconds += record["seconds"]
        self.is_over = record["when"] == "teardown"
        rank = ["passed", "skipped", "failed"].index
        if self.outcome not in ("passed", "skipped", "failed") or rank(record["outcome"]) > rank(self.outcome):
            self.outcome = record["outcome"]
        self.text = "\n".join([self.text, record["text"]]).strip()


class Run:
    """A run of `tests` with a `limit` per test, and `seconds` for all."""

    def __init__(self, tests: list[str], folder: Path, limit: float, seconds: float) -> None:
        self.folder = folder
        self.limit = limit
        self.until = time.monotonic() + seconds
        self.results = {test: Result(test) for test in tests}

    def all(self) -> None:
        """Run the tests in order, with a new process after each one that hung."""
        remaining = list(self.results)
        while remaining and time.monotonic() < self.until:
            remaining = self._run_until_hang(remaining)

    def _run_until_hang(self, tests: list[str]) -> list[str]:
        """Run `tests` until one hangs or the time is over; return the remaining ones."""
        with tempfile.TemporaryDirectory() as folder:
            log, output = Path(folder, "log"), Path(folder, "output")
            log.touch()
            with output.open("w") as file:
                process = psutil.Popen(
                    [*PYTEST, "-p", "tests.gpu_report", f"--timeout={10 * self.limit}", *tests],
                    cwd=self.folder,
                    env={**os.environ, LOG: str(log), "PYTHONPATH": _python_path_with(HERE)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            try:
                running = self._follow(process, log)
                if running is not None:
                    self.results[running].outcome = "hung"
                    self.results[running].text = "\n".join(_stack_dumps(process))
            finally:
                _kill_family(process)
            begun = [record["begins"] for record in _read_records(log) if "begins" in record]
            if not begun and time.monotonic() < self.until:
                sys.exit(f"pytest ran nothing:\n{output.read_text()}")
            return [test for test in tests if test not in begun]

    def _follow(self, process: psutil.Popen, log: Path) -> str | None:
        """Follow the tests' records until they end; return the test that hangs, or runs when the time is over."""
        taken, running, since, limit = 0, None, time.monotonic(), START_SECONDS
        while True:
            ended = process.poll() is not None  # before the log is read, so that no record is missed
            records = _read_records(log)
            for record in records[taken:]:
                since = time.monotonic()
                if "begins" in record:
                    running, limit = record["begins"], self.limit
                else:
                    self.results[record["ends"]].add_record(record)
                    if self.results[record["ends"]].is_over:
                        print(f"{self.results[record['ends']].outcome:8} {record['ends']}", flush=True)
            taken = len(records)
            if ended:
                if running is not None and not self.results[running].is_over:
                    self.results[running].outcome = f"ended pytest with exit code {process.returncode}"
                return None
            now = time.monotonic()
            if now > since + limit or now > self.until + END_SECONDS:
                return running
            time.sleep(0.1)


def _read_records(log: Path) -> list[dict[str, Any]]:
    complete_lines = log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete_lines.splitlines()]


def _family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def _stack_dumps(process: psutil.Process) -> Iterator[str]:
    """Return the stack dump of each process of the tests."""
    spy = shutil.which("py-spy") or next(
        (str(path) for folder in sys.path if (path := Path(folder, "bin", "py-spy")).is_file()), None
    )
    for one in _family(process):
        with contextlib.suppress(psutil.Error):
            yield f"pid {one.pid}, {one.status()}: {' '.join(one.cmdline())[:200]}"
        if spy is None:
            yield "there is no py-spy here to look where it is"
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            seen = subprocess.run([spy, "dump", "--pid", str(one.pid)], capture_output=True, text=True, timeout=10)
            yield seen.stdout or seen.stderr


def _kill_family(process: psutil.Process) -> None:
    family = _family(process)
    for one in family:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(family, timeout=10)


def _python_path_with(folder: Path) -> str:
    """Return PYTHONPATH with `folder` first."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _output_of(*command: str, folder: Path = HERE) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"


VERSIONS = """
import importlib.metadata, platform, torch
print("Python", platform.python_version(), "on", platform.platform())
print("torch", torch.__version__, "CUDA", torch.version.cuda)
for name in ("ddip", "ipyparallel", "ipykernel", "ipython", "fastai"):
    try: print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError: print(name, "is not installed")
from tests.cluster.gpu_cases import nccl_version
print("NCCL", *nccl_version())
"""


def format_report(results: list[Result], seconds: float) -> str:
    """Return the whole report as text."""
    outcomes: dict[str, int] = {}
    for result in results:
        outcomes[result.outcome] = outcomes.get(result.outcome, 0) + 1
    parts = [
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) + f", in {seconds:.0f} s",
        _output_of(sys.executable, "-c", VERSIONS),
        _output_of("nvidia-smi"),
        "\n".join(f"{result.outcome:8} {result.seconds:6.1f} s  {result.test}" for result in results),
    ]
    for result in results:
        if result.text and result.outcome != "skipped":
            lines = result.text.splitlines()
            kept = lines if result.outcome == "hung" else lines[-LINES:]
            parts.append("\n".join([f"--- {result.outcome}: {result.test}", *kept]))
    parts += sorted({f"skipped: {result.text}" for result in results if result.outcome == "skipped"})
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=HERE / "gpu-report.txt")
    parser.add_argument("--limit", type=float, default=75, help="seconds for each test")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that share the tests")
    parser.add_argument("--minutes", type=float, default=7, help="for all tests; the report says which did not run")
    parser.add_argument("--folder", type=Path, default=HERE, help="that the names of the tests begin in")
    parser.add_argument("tests", nargs="*", default=["tests/cluster/test_gpus.py"])
    arguments = parser.parse_args()
    began = time.monotonic()
    listed = _output_of(*PYTEST, "--co", *arguments.tests, folder=arguments.folder)
    tests = [line for line in listed.splitlines() if "::" in line]
    if not tests:
        sys.exit(f"no test was found:\n{listed}")
    shares = [tests[i :: arguments.jobs] for i in range(min(arguments.jobs, len(tests)))]
    runs = [Run(share, arguments.folder, arguments.limit, arguments.minutes * 60) for share in shares]
    with concurrent.futures.ThreadPoolExecutor(len(runs)) as threads:
        list(threads.map(Run.all, runs))
    result_of = {test: result for run in runs for test, result in run.results.items()}
    results = [result_of[test] for test in tests]
    text = format_report(results, time.monotonic() - began)
    arguments.report.write_text(text)
    print(text.partition("\n")[0], f"-> {arguments.report}")
    return int(any(result.outcome not in ("passed", "skipped") for result in results))


if __name__ == "__main__":
    sys.exit(main())
