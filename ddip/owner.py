"""Who owns which process, known by pid and starting time; and the end of what a dead owner left.

A cluster belongs to one notebook kernel. Its record lies in its run folder, and says who the owner is, which processes
are the cluster's and which files. Whoever finds a record whose owner is gone may clear it up: the controller does it
when its kernel dies, and the next ``%makedip`` does it if the controller was killed too.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

RECORD = "owner.json"
TERM_SECONDS = 1.5
"""Grace between SIGTERM and SIGKILL."""


def _started(pid: int) -> float:
    """When `pid` was started, on a clock that nobody sets; raises ``psutil.NoSuchProcess``."""
    if sys.platform != "linux":
        return float(psutil.Process(pid).create_time())
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(stat.rpartition(")")[2].split()[19])  # field 22 of proc(5): clock ticks since the boot


def _here() -> str:
    """Where a pid means what it means to us: this host since its boot, and this pid namespace."""
    if sys.platform != "linux":
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


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
        except psutil.NoSuchProcess:
            return None
        return process if same else None


@dataclass(frozen=True)
class Record:
    """What belongs to one cluster."""

    owner: Proc
    processes: tuple[Proc, ...]
    files: tuple[str, ...]
    """Patterns of files that the cluster's processes write outside the run folder."""
    place: str = field(default_factory=_here)

    def write(self, folder: Path) -> None:
        """Replace the record in `folder`, atomically."""
        new = folder / f"{RECORD}.new"
        new.write_text(json.dumps(asdict(self)))
        new.replace(folder / RECORD)

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record in `folder`; None if there is none that can be trusted here."""
        path = folder / RECORD
        try:
            if path.stat().st_uid != os.getuid():
                return None
            data = json.loads(path.read_text())
            record = cls(
                Proc(int(data["owner"]["pid"]), float(data["owner"]["started"])),
                tuple(Proc(int(p["pid"]), float(p["started"])) for p in data["processes"]),
                tuple(str(f) for f in data["files"]),
                str(data["place"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if record.place == _here() else None


def _lives(process: psutil.Process) -> bool:
    """Is it running? A zombie has ended, though nobody may have asked for its exit code yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False


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


def end_processes(processes: Iterable[Proc]) -> None:
    """End `processes`, each the leader of a session, and then all that they started."""
    leaders = list(processes)
    followers = _followers(leaders)
    _end([process for process in (leader.find() for leader in leaders) if process])
    # multiprocessing's tracker of shared memory is one of these: it tidies up and leaves when its leader is gone
    _end([process for process in followers | _followers(leaders) if _lives(process)])


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


def make_run_folder() -> Path:
    """A new folder for one cluster's files, private to the user."""
    return Path(tempfile.mkdtemp(prefix=f"ddip-{os.getuid()}-"))


def remove_files(folder: Path, files: Iterable[str]) -> None:
    """Remove the run folder and whatever matches the patterns `files`."""
    for pattern in files:
        for path in glob.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
    shutil.rmtree(folder, ignore_errors=True)


def clear_up(folder: Path) -> None:
    """End everything that the record in `folder` lists, and remove its files and the folder."""
    record = Record.read(folder)
    if record is not None:
        me = os.getpid()
        end_processes(p for p in record.processes if p.pid != me)
        remove_files(folder, record.files)


def clear_up_orphans() -> int:
    """Clear up every cluster of this user whose owner is gone; returns how many."""
    cleared = 0
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"ddip-{os.getuid()}-*", RECORD)):
        folder = Path(path).parent
        record = Record.read(folder)
        if record is not None and record.owner.find() is None:
            clear_up(folder)
            cleared += 1
    return cleared
