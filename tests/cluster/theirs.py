"""A plain ipyparallel cluster that ddip did not start: one controller and several engines, each a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ipyparallel
import psutil

from .leftovers import is_alive, wait_until

QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
Line = Callable[[Sequence[str]], list[str]]


def local_command(words: Sequence[str]) -> list[str]:
    """Return the command unchanged: a process on this machine."""
    return list(words)


class ForeignCluster:
    """An ipyparallel cluster whose controller listens on `ip`."""

    def __init__(self, id: str, ip: str = "127.0.0.1") -> None:
        self.id = id
        self.file = Path(os.environ["IPYTHONDIR"]) / "profile_default" / "security" / f"ipcontroller-{id}-client.json"
        self.engines: list[subprocess.Popen[bytes]] = []
        self.controller = self._start("controller", [f"--ip={ip}"], local_command)
        wait_until(self.file.exists, 30, "the controller's file")
        self.client = ipyparallel.Client(str(self.file), timeout=30)

    def _start(self, what: str, options: Sequence[str], line: Line) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", f"ipyparallel.{what}", f"--cluster-id={self.id}", *options]
        return subprocess.Popen(line(words), **QUIET)  # type: ignore[call-overload,no-any-return]

    def add(self, count: int = 1, options: Sequence[str] = (), line: Line = local_command) -> None:
        """Start engines, and wait until they have registered."""
        registered = len(self.client.ids)
        for number in range(registered, registered + count):
            self.engines.append(self._start("engine", options, line))
            wait_until(lambda number=number: len(self.client.ids) > number, 30, "an engine")

    def values(self, name: str) -> list[object]:
        """Return the variable `name` of every engine."""
        view = self.client[:]
        return list(view.pull(name, block=True))

    def resources(self) -> list[object]:
        """Return the threads and descriptors of every engine, and the handlers of its control channel."""
        return list(self.client[:].apply_sync(_list_resources))

    def kill_controller(self) -> None:
        """Kill the controller and its schedulers, which are separate processes."""
        for process in [*psutil.Process(self.controller.pid).children(recursive=True), self.controller]:
            process.kill()

    def close(self) -> None:
        """End the cluster."""
        self.client.close(linger=0)
        engines = [_behind_nsenter(engine.pid) for engine in self.engines if is_alive(engine.pid)]
        helpers = [helper for engine in engines for helper in engine.children()]
        for engine in engines:
            engine.terminate()
        self.controller.terminate()
        for process in [*self.engines, self.controller]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        wait_until(lambda: not any(helper.is_running() for helper in helpers), 15, "the end of the engines' nannies")
        self.file.unlink(missing_ok=True)


def _behind_nsenter(pid: int) -> psutil.Process:
    """Return the process `pid`; if it is nsenter, the process that it started in another namespace."""
    process = psutil.Process(pid)
    return _behind_nsenter(process.children()[0].pid) if process.name() == "nsenter" else process


def _list_resources() -> tuple[list[str], int, list[str]]:
    import os
    import threading

    from IPython import get_ipython

    threads = sorted(thread.name for thread in threading.enumerate())
    return threads, len(os.listdir("/proc/self/fd")), sorted(get_ipython().kernel.control_handlers)


@contextlib.contextmanager
def foreign_cluster(id: str, engines: int) -> Iterator[ForeignCluster]:
    """Start a cluster on this machine whose engines have the variable ``kept``."""
    cluster = ForeignCluster(id)
    try:
        cluster.add(engines)
        cluster.client[:].push({"kept": 5}, block=True)
        yield cluster
    finally:
        cluster.close()
