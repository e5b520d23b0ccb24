"""Who owns which process, known by pid and starting time; and the end of what a dead owner left.

A cluster belongs to one notebook kernel. Its run folder, which only this user can enter, is named after that owner; a
record in it says which processes are the cluster's, and by which mark in their environment they are known. Whoever
finds the folder of an owner who is gone may clear it up: the controller does it when its kernel dies, and the next
``%makedip`` does it if the controller was killed too.

Everybody may make a folder with such a name in the system's temporary folder, and links in it. So a folder and its
record are opened without following links, what is known of them is asked of the open files, and nothing that a record
says makes us remove a file by a path of its choice, or end a process without the mark.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ddip.cluster.processes.processes import MARK, Proc, end_processes, living

RECORD = "owner.json"
RECORD_BYTES = 1_000_000
"""Larger than any record."""
SOCKETS = "s"
"""The controller's sockets in the run folder are s:1, s:2, and so on."""
CLUSTER = re.compile(r"ddip-\d+-[0-9a-f]+")
"""Ids of clusters."""


def _here() -> str:
    """Where a pid means what it means to us: this host since its boot, and this pid namespace."""
    if sys.platform != "linux":
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class Record:
    """What belongs to one cluster."""

    owner: Proc
    processes: tuple[Proc, ...]
    profile: str
    """The IPython profile in which ipyparallel looks for clusters; empty: there is nothing of this one yet."""
    cluster: str
    """The id of the cluster, from which the names of its files there are made."""
    mark: str = MARK
    place: str = field(default_factory=_here)

    def write(self, folder: Path) -> None:
        """Replace the record in `folder`, atomically."""
        new = folder / f"{RECORD}.new"
        new.touch(0o600)
        new.write_text(json.dumps(asdict(self)))
        new.replace(folder / RECORD)

    @classmethod
    def read(cls, folder: int) -> Record | None:
        """The record in the open `folder`; None if there is none that can be trusted here."""
        try:
            data = json.loads(_content(folder, RECORD))
            record = cls(
                Proc(int(data["owner"]["pid"]), float(data["owner"]["started"])),
                tuple(Proc(int(p["pid"]), float(p["started"])) for p in data["processes"]),
                str(data["profile"]),
                str(data["cluster"]),
                str(data["mark"]),
                str(data["place"]),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return record if record.place == _here() else None


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the run folder `folder`; raises OSError if it is a link, not ours, or open to anybody else."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.getuid() or status.st_mode & 0o777 != 0o700:
            raise PermissionError(f"{folder} is not ours alone")
        yield opened
    finally:
        os.close(opened)


def _content(folder: int, name: str) -> bytes:
    """What is in the file `name` of the open `folder`; raises OSError if it is a link, not ours, or open to others."""
    # of a pipe, the opening would wait for its other end
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with os.fdopen(opened, "rb") as file:
        status = os.fstat(opened)
        private = status.st_uid == os.getuid() and not status.st_mode & 0o077
        if not private or not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise PermissionError(f"{name} is not ours alone")
        return file.read(RECORD_BYTES)


def _places() -> list[Path]:
    """Where run folders may be, the best place first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(runtime)] if runtime.startswith("/") and _outlives_the_login(Path(runtime)) else []
    with contextlib.suppress(FileNotFoundError):  # it can write to none
        places.append(Path(tempfile.gettempdir()))
    return list(dict.fromkeys([*places, Path("/tmp")]))


def _outlives_the_login(runtime: Path) -> bool:
    """Is the folder `runtime` this user's alone, and there as long as a kernel may be?

    systemd removes it when the user logs out: of a notebook that runs on in tmux, no new rank could join the group.
    """
    try:
        status = runtime.stat()
    except OSError:
        return False
    private = status.st_uid == os.getuid() and status.st_mode & 0o777 == 0o700
    managed = Path(f"/run/systemd/users/{os.getuid()}").exists()
    return private and (not managed or Path(f"/var/lib/systemd/linger/{psutil.Process().username()}").exists())


def _prefix() -> str:
    """How the names of run folders begin: with this user and this place, in which the owner's pid means something."""
    return f"ddip-{os.getuid()}-{hashlib.sha256(_here().encode()).hexdigest()[:6]}-"


def _named_after(name: str) -> Proc | None:
    """The owner of the run folder of this name; None if it is no run folder of this user in this place."""
    found = re.fullmatch(rf"{_prefix()}(\d+)-([\d.]+)-\w+", name)
    return Proc(int(found[1]), float(found[2])) if found else None


def make_run_folder() -> Path:
    """A new folder for one cluster's files and sockets, which no other user can enter.

    Raises OSError if there is no place for one. The name alone tells the owner: it may be killed before it has written
    a record.
    """
    me = Proc.of(os.getpid())
    why = []
    for place in _places():
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{me.pid}-{me.started:.15g}-", dir=place))
            longest = str(folder / f"{SOCKETS}:999")
            longest.encode()  # as ZeroMQ takes it
            if urlsplit(f"file://{longest}").path != longest:  # as torch takes the path of the group's store
                raise ValueError("a name in its path has a character that is not part of a file's address")
            with _opened(folder), socket.socket(socket.AF_UNIX) as tried:
                tried.bind(longest)  # not every file system has sockets, and none has one at a path of 108 bytes
            os.unlink(longest)
            return folder
        except (OSError, ValueError) as error:
            why.append(f"{place}: {error}")
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    raise OSError("; ".join(why))


def remove_files(folder: Path, profile: str, cluster: str) -> None:
    """Remove the run folder with what is in it, and the files that ipyparallel keeps of `cluster` in `profile`."""
    _forget(profile, cluster)
    with contextlib.suppress(OSError), _opened(folder) as opened:
        _empty(opened)
        os.rmdir(folder)


def _empty(folder: int) -> None:
    """Remove all that is in the open `folder`."""
    for _, folders, files, opened in os.fwalk(".", topdown=False, dir_fd=folder):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=opened)
        for name in folders:
            with contextlib.suppress(OSError):
                link = stat.S_ISLNK(os.lstat(name, dir_fd=opened).st_mode)
                (os.unlink if link else os.rmdir)(name, dir_fd=opened)


def _forget(profile: str, cluster: str) -> None:
    """Remove the files that ipyparallel keeps of `cluster` in `profile`."""
    if profile and CLUSTER.fullmatch(cluster):
        connections = [f"ipcontroller-{cluster}-{kind}.json" for kind in ("client", "engine")]
        new = [f"{name}.new" for name in connections]
        _unlink(profile, "security", [f"cluster-{cluster}.json", *connections, *new])
        _unlink(profile, "log", [f"engines{cluster}.json"])


def _unlink(profile: str, folder: str, names: Iterable[str]) -> None:
    """Remove the files `names` in a `folder` of `profile` that is ours."""
    with contextlib.suppress(OSError, ValueError):
        opened = os.open(os.path.join(profile, folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in names if os.fstat(opened).st_uid == os.getuid() else ():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=opened)
        finally:
            os.close(opened)


def clear_up(folder: Path, *, only_of_the_dead: bool = False) -> bool:
    """End everything that the record in `folder` lists, and remove its files and the folder; returns whether it did.

    It does not if the folder is not this user's alone, or, when asked for that, if its owner lives.
    """
    with contextlib.suppress(OSError), _opened(folder) as opened:
        record = Record.read(opened)
        owner = record.owner if record else _named_after(folder.name)
        if owner is None or (only_of_the_dead and owner.find() is not None):
            return False
        if record is not None:
            me = os.getpid()
            end_processes([p for p in record.processes if p.pid != me], record.mark)
            _forget(record.profile, record.cluster)
        _empty(opened)
        os.rmdir(folder)
        return True
    return False


def clear_up_orphans() -> int:
    """Clear up every cluster of this user whose owner is gone; returns how many."""
    return sum(clear_up(folder, only_of_the_dead=True) for folder in _run_folders())


def _run_folders() -> Iterator[Path]:
    """Every folder that has the name of a run folder of this user in this place, whoever has made it."""
    prefix = _prefix()
    for place in _places():
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(place) if name.startswith(prefix) and _named_after(name)]
            yield from (place / name for name in names)


@dataclass(frozen=True)
class Run:
    """A cluster of this user, or what is left of one."""

    folder: Path
    owner: Proc
    owner_lives: bool
    processes: int
    """That its record lists, and that still live."""


def runs() -> list[Run]:
    """Every cluster of this user in this place; changes nothing."""
    found = []
    for folder in _run_folders():
        with contextlib.suppress(OSError), _opened(folder) as opened:
            record = Record.read(opened)
            owner = record.owner if record else _named_after(folder.name)
            if owner is not None:
                live = living(record.processes, record.mark) if record else []
                found.append(Run(folder, owner, owner.find() is not None, len(live)))
    return found
