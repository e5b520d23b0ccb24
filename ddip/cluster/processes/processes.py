"""Processes, known by more than their numbers, and how they are ended with all that they have started."""

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
"""In the environment, as MARKED, of every process that this one has for ddip, and of what they start."""
TERM_SECONDS = 1.5
"""Grace between SIGTERM and SIGKILL."""


def _started(pid: int) -> float:
    """When `pid` was started, on a clock that nobody sets; raises ``psutil.NoSuchProcess``."""
    if sys.platform != "linux":
        return round(float(psutil.Process(pid).create_time()), 2)  # as a name of a folder tells it
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()  # a name that a process gives itself may be any bytes
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(fields.rpartition(b")")[2].split()[19])  # field 22 of proc(5): clock ticks since the boot


@dataclass(frozen=True)
class Proc:
    """A process: a pid alone may by now be another one's."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Proc:
        """The process `pid`; raises ``psutil.NoSuchProcess``."""
        return cls(pid, _started(pid))

    def find(self) -> psutil.Process | None:
        """The live process, or None if it ended (a zombie has ended)."""
        try:
            process = psutil.Process(self.pid)
            same = _started(self.pid) == self.started and _lives(process)
        except (psutil.NoSuchProcess, ValueError):  # no process has such a number
            return None
        return process if same else None


def existing(pids: Iterable[int]) -> list[Proc]:
    """Those of the processes that there are."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(Proc.of(pid))
    return found


def stopped_text(pid: int) -> str:
    """What to say of a process that a signal or a debugger has stopped; empty for one that runs, or has ended."""
    with contextlib.suppress(psutil.Error):
        match psutil.Process(pid).status():
            case psutil.STATUS_STOPPED:
                return f"stopped (SIGSTOP); kill -CONT {pid} continues it"
            case psutil.STATUS_TRACING_STOP:
                return f"stopped by a debugger, as process {pid}"
    return ""


def _lives(process: psutil.Process) -> bool:
    """Is it running? A zombie has ended, though nobody may have asked for its exit code yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill(pid: int) -> None:
    """End a process that has just been started, and wait until it has ended; it may be somebody else's child."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        process.kill()
        _wait([process])


def _carries(process: psutil.Process, mark: str | None) -> bool:
    """Is it a process of this user that has `mark` in its environment? None: any process is."""
    with contextlib.suppress(psutil.Error):
        return mark is None or (process.uids().real == os.getuid() and process.environ().get(MARKED) == mark)
    return False


def living(processes: Iterable[Proc], mark: str | None) -> list[psutil.Process]:
    """Those of `processes` that live and carry `mark`; None: any."""
    return [live for live in (process.find() for process in processes) if live and _carries(live, mark)]


def _followers(leaders: Iterable[Proc]) -> set[psutil.Process]:
    """What `leaders` started and has not ended, such as data loader workers: their descendants, and, since each leads a
    session of its own, the processes of its session, which are still known when it is gone."""
    sessions = {leader.pid: leader.started for leader in leaders}
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            began = sessions.get(os.getsid(process.pid))
            if began is not None and _started(process.pid) >= began and process.pid not in sessions:
                found.add(process)
    for leader in leaders:
        process = leader.find()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.update(process.children(recursive=True))
    return found


def end_processes(processes: Iterable[Proc], mark: str | None = None) -> None:
    """End `processes`, each the leader of a session, and then all that they started.

    With a `mark` only what carries it is ended: numbers of processes that somebody wrote down prove nothing.
    """
    leaders = list(processes)
    followers = _followers(leaders)
    _end(living(leaders, mark))
    # multiprocessing's tracker of shared memory is one of these: it tidies up and leaves when its leader is gone
    followers |= _followers(leaders)
    _end([process for process in followers if _lives(process) and _carries(process, mark)])


def _end(processes: list[psutil.Process]) -> None:
    """SIGTERM, and SIGKILL for those that stay."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    stay = _wait(processes)
    for process in stay:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait(stay)


def _wait(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait TERM_SECONDS for their ends; returns those that live on. They may be nobody's children here."""
    deadline = time.monotonic() + TERM_SECONDS
    live = [process for process in processes if _lives(process)]
    while live and time.monotonic() < deadline:
        time.sleep(0.005)
        live = [process for process in live if _lives(process)]
    return live
