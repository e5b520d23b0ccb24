"""Identify processes by PID and start time, and end them with all processes that they started."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

MARKED = "DDIP_MARK"
MARK = os.urandom(16).hex()
"""Value of the variable MARKED in the environment of every process that this one starts for ddip, and of their
descendants."""
TERM_SECONDS = 1.5
"""Grace between SIGTERM and SIGKILL."""


def _start_time(pid: int) -> float:
    """Return the start time of `pid`: clock ticks since the boot on Linux, else seconds since the epoch.

    Setting the clock does not change the former. Raises ``psutil.NoSuchProcess``.
    """
    if sys.platform != "linux":
        return round(float(psutil.Process(pid).create_time()), 2)  # as precise as in the name of a run folder
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()  # the process name in it may be any bytes
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(fields.rpartition(b")")[2].split()[19])  # field 22 of proc(5)


@dataclass(frozen=True)
class Proc:
    """A process, identified by PID and start time, since the PID alone may have been reused."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Proc:
        """Return the process that has `pid` now; raise ``psutil.NoSuchProcess`` if there is none."""
        return cls(pid, _start_time(pid))

    def find(self) -> psutil.Process | None:
        """Return the live process, or None if it has ended (a zombie has ended)."""
        try:
            process = psutil.Process(self.pid)
            same = _start_time(self.pid) == self.started and _is_alive(process)
        except (psutil.NoSuchProcess, ValueError):  # ValueError: not a valid PID
            return None
        return process if same else None


def find_existing(pids: Iterable[int]) -> list[Proc]:
    """Return the processes among `pids` that exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(Proc.of(pid))
    return found


def stopped_text(pid: int) -> str:
    """Describe a process that a signal or a debugger has stopped, with a remedy; empty for others."""
    with contextlib.suppress(psutil.Error):
        match psutil.Process(pid).status():
            case psutil.STATUS_STOPPED:
                return f"stopped (SIGSTOP); kill -CONT {pid} continues it"
            case psutil.STATUS_TRACING_STOP:
                return f"stopped by a debugger, as process {pid}"
    return ""


def _is_alive(process: psutil.Process) -> bool:
    """Return True unless the process has ended.

    A zombie, whose exit code was not collected yet, has ended.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_and_wait(pid: int) -> None:
    """Kill a process that was just started, and wait until it has ended, at most TERM_SECONDS.

    It may be another process's child.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        process.kill()
        _wait_for_exits([process])


def _has_mark(process: psutil.Process, mark: str | None) -> bool:
    """Return True if this user's process has `mark` in its environment, or if `mark` is None."""
    with contextlib.suppress(psutil.Error):
        return mark is None or (process.uids().real == os.getuid() and process.environ().get(MARKED) == mark)
    return False


def find_live(processes: Iterable[Proc], mark: str | None) -> list[psutil.Process]:
    """Return the live processes among `processes` that carry `mark`, or all live ones for None."""
    return [live for live in (process.find() for process in processes) if live and _has_mark(live, mark)]


def _started_by(leaders: Iterable[Proc]) -> set[psutil.Process]:
    """Return the live processes that `leaders` started, such as data loader workers.

    These are their descendants and, since each leader leads a session, the processes of that session, which can be
    found even after the leader ended.
    """
    began = {leader.pid: leader.started for leader in leaders}
    found: set[psutil.Process] = set()
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():  # once for all leaders: it reads a file of every process of the machine
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            children.setdefault(process.ppid(), []).append(process)
            session = os.getsid(process.pid)
            if session in began and process.pid not in began and _start_time(process.pid) >= began[session]:
                found.add(process)
    pending = [leader for leader in leaders if leader.find() is not None]
    while pending:
        parent = pending.pop()
        for process in children.pop(parent.pid, []):
            with contextlib.suppress(psutil.NoSuchProcess):
                child = Proc.of(process.pid)
                if child.started >= parent.started:  # else the PID was reused
                    found.add(process)
                    pending.append(child)
    return found


def end_processes(processes: Iterable[Proc], mark: str | None = None) -> None:
    """End `processes`, each the leader of a session, and then all processes that they started.

    They get SIGTERM, and SIGKILL after TERM_SECONDS; the function waits for both. With a `mark`, end only processes
    that carry it: PIDs from a file prove nothing.
    """
    leaders = list(processes)
    followers = _started_by(leaders)
    _terminate_all(find_live(leaders, mark))
    # one of these is multiprocessing's resource tracker, which cleans up shared memory and exits after its leader
    followers |= _started_by(leaders)
    _terminate_all([process for process in followers if _is_alive(process) and _has_mark(process, mark)])


def _terminate_all(processes: list[psutil.Process]) -> None:
    """Send SIGTERM, then SIGKILL to the processes that are still alive after TERM_SECONDS."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    survivors = _wait_for_exits(processes)
    for process in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for_exits(survivors)


def _wait_for_exits(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait up to TERM_SECONDS for the ends of `processes`, and return the ones still alive.

    Polls, since they need not be children of this process.
    """
    deadline = time.monotonic() + TERM_SECONDS
    live = [process for process in processes if _is_alive(process)]
    while live and time.monotonic() < deadline:
        time.sleep(0.005 + 0.0005 * len(live))  # the ends of many processes need the cores themselves
        live = [process for process in live if _is_alive(process)]
    return live
