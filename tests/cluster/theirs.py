"""A plain ipyparallel cluster that somebody else has started: one controller, and engines, each a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ipyparallel
import psutil

from .leftovers import wait_until

QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
Line = Callable[[Sequence[str]], list[str]]


def as_it_is(words: Sequence[str]) -> list[str]:
    """A process on this machine."""
    return list(words)


class Theirs:
    """`ip` is where its controller listens."""

    def __init__(self, id: str, ip: str = "127.0.0.1") -> None:
        self.id = id
        self.file = Path(os.environ["IPYTHONDIR"]) / "profile_default" / "security" / f"ipcontroller-{id}-client.json"
        self.engines: list[subprocess.Popen[bytes]] = []
        self.controller = self._start("controller", [f"--ip={ip}"], as_it_is)
        wait_until(self.file.exists, 30, "the controller's file")
        self.client = ipyparallel.Client(str(self.file), timeout=30)

    def _start(self, what: str, options: Sequence[str], line: Line) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", f"ipyparallel.{what}", f"--cluster-id={self.id}", *options]
        return subprocess.Popen(line(words), **QUIET)  # type: ignore[call-overload,no-any-return]

    def add(self, count: int = 1, options: Sequence[str] = (), line: Line = as_it_is) -> None:
        """Start engines, and wait for them."""
        there = len(self.client.ids)
        for number in range(there, there + count):
            self.engines.append(self._start("engine", options, line))
            wait_until(lambda number=number: len(self.client.ids) > number, 30, "an engine")

    def values(self, name: str) -> list[object]:
        """That variable of every engine."""
        view = self.client[:]
        return list(view.pull(name, block=True))

    def handlers(self) -> list[object]:
        """What every engine's control channel knows, and how many descriptors the engine has."""
        return list(self.client[:].apply_sync(_handlers))

    def kill_controller(self) -> None:
        """With its schedulers, which are processes of their own."""
        for process in [*psutil.Process(self.controller.pid).children(recursive=True), self.controller]:
            process.kill()

    def close(self) -> None:
        """End it."""
        self.client.close(linger=0)
        for process in [*self.engines, self.controller]:
            process.terminate()
        for process in [*self.engines, self.controller]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self.file.unlink(missing_ok=True)


def _handlers() -> list[str]:
    from IPython import get_ipython

    return sorted(get_ipython().kernel.control_handlers)


@contextlib.contextmanager
def theirs(id: str, engines: int) -> Iterator[Theirs]:
    """Such a cluster on this machine, whose engines have the variable ``kept``."""
    cluster = Theirs(id)
    try:
        cluster.add(engines)
        cluster.client[:].push({"kept": 5}, block=True)
        yield cluster
    finally:
        cluster.close()
