"""Record which processes a cluster owns, and clean up after an owner that died.

A cluster belongs to one notebook kernel, its owner. Its run folder, which only this user can enter, is named after the
owner's PID and start time. A record in the folder lists the cluster's processes and the mark that they have in their
environment. Any ddip process that finds the folder of a dead owner may clean it up: the controller does so when its
kernel dies, and the next ``%makedip`` does so if the controller was killed as well.

Any user can create a folder with such a name in the system's temporary folder, and links in it. So ddip opens a folder
and its record without following links and checks owner and mode on the open descriptors. No record can make ddip
remove a file at a path of the record's choice, or end a process without the mark.
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

from ddip.cluster.processes.processes import MARK, Proc, end_processes, find_live

RECORD = "owner.json"
RECORD_BYTES = 1_000_000
"""Upper bound for the size of a record."""
SOCKETS = "s"
"""The controller's sockets in the run folder are s:1, s:2, and so on."""
CLUSTER = re.compile(r"ddip-\d+-[0-9a-f]+")
"""Pattern of ddip's cluster IDs."""


def _pid_scope() -> str:
    """Return the scope in which a PID is unique: this host since its boot, and this PID namespace."""
    if sys.platform != "linux":
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class Record:
    """The processes and files that belong to one cluster."""

    owner: Proc
    processes: tuple[Proc, ...]
    profile: str
    """IPython profile in which ipyparallel stores the cluster's files; empty if there are none yet."""
    cluster: str
    """Cluster ID, from which the names of these files are derived."""
    mark: str = MARK
    place: str = field(default_factory=_pid_scope)

    def write(self, folder: Path) -> None:
        """Replace the record in `folder`, atomically."""
        new = folder / f"{RECORD}.new"
        new.touch(0o600)
        new.write_text(json.dumps(asdict(self)))
        new.replace(folder / RECORD)

    @classmethod
    def read(cls, folder: int) -> Record | None:
        """Return the record in the open `folder`.

        None if there is no valid record, or if it is from another PID scope.
        """
        try:
            data = json.loads(_read_private(folder, RECORD))
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
        return record if record.place == _pid_scope() else None


@contextlib.contextmanager
def _open_private(folder: Path) -> Iterator[int]:
    """Open the run folder `folder`, and close it afterwards.

    Raises OSError if it is a link, not this user's, or open to other users.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.getuid() or status.st_mode & 0o777 != 0o700:
            raise PermissionError(f"{folder} is not ours alone")
        yield opened
    finally:
        os.close(opened)


def _read_private(folder: int, name: str) -> bytes:
    """Read the file `name` of the open `folder`.

    Raises OSError if it is a link, not this user's, or open to other users.
    """
    # O_NONBLOCK: opening a named pipe would otherwise wait for its other end
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with os.fdopen(opened, "rb") as file:
        status = os.fstat(opened)
        private = status.st_uid == os.getuid() and not status.st_mode & 0o077
        if not private or not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise PermissionError(f"{name} is not ours alone")
        return file.read(RECORD_BYTES)


def read_file(folder: Path, name: str) -> bytes:
    """Return the content of the file `name` in a run folder.

    Raises OSError if another user could have written it.
    """
    with _open_private(folder) as opened:
        return _read_private(opened, name)


def _candidate_folders() -> list[Path]:
    """Return the folders in which run folders may be created, the best one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(runtime)] if runtime.startswith("/") and _outlives_the_login(Path(runtime)) else []
    with contextlib.suppress(FileNotFoundError):  # no temporary folder is writable
        places.append(Path(tempfile.gettempdir()))
    return list(dict.fromkeys([*places, Path("/tmp")]))


def _outlives_the_login(runtime: Path) -> bool:
    """Return True if the folder `runtime` is private to this user and is kept after logout.

    systemd removes it at logout unless the user lingers. Then no new rank could join the group of a notebook that
    continues to run in tmux.
    """
    try:
        status = runtime.stat()
    except OSError:
        return False
    private = status.st_uid == os.getuid() and status.st_mode & 0o777 == 0o700
    managed = Path(f"/run/systemd/users/{os.getuid()}").exists()
    return private and (not managed or Path(f"/var/lib/systemd/linger/{psutil.Process().username()}").exists())


def _folder_prefix() -> str:
    """Return the prefix of run folder names: this user, and the scope in which the owner's PID is valid."""
    return f"ddip-{os.getuid()}-{hashlib.sha256(_pid_scope().encode()).hexdigest()[:6]}-"


def _owner_in_name(name: str) -> Proc | None:
    """Return the owner in a run folder's `name`.

    None if it is not the name of a run folder of this user in this PID scope.
    """
    found = re.fullmatch(rf"{_folder_prefix()}(\d+)-([\d.]+)-\w+", name)
    return Proc(int(found[1]), float(found[2])) if found else None


def make_run_folder() -> Path:
    """Create a folder for one cluster's files and sockets, which no other user can enter.

    Its name contains the owner, which may be killed before it writes a record. Raises OSError if no candidate folder
    is suitable.
    """
    me = Proc.of(os.getpid())
    why = []
    for place in _candidate_folders():
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{_folder_prefix()}{me.pid}-{me.started:.15g}-", dir=place))
            longest = str(folder / f"{SOCKETS}:999")
            longest.encode()  # ZeroMQ needs a path that can be encoded
            if urlsplit(f"file://{longest}").path != longest:  # torch parses the store's path as part of a URL
                raise ValueError("a name in its path has a character that is not part of a file's address")
            with _open_private(folder), socket.socket(socket.AF_UNIX) as tried:
                tried.bind(longest)  # some file systems have no sockets, and no socket path may have 108 bytes
            os.unlink(longest)
            return folder
        except (OSError, ValueError) as error:
            why.append(f"{place}: {error}")
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    raise OSError("; ".join(why))


def remove_files(folder: Path, profile: str, cluster: str) -> None:
    """Remove the run folder with its content, and ipyparallel's files of `cluster` in `profile`."""
    _remove_ipyparallel_files(profile, cluster)
    with contextlib.suppress(OSError), _open_private(folder) as opened:
        _remove_content(opened)
        os.rmdir(folder)


def _remove_content(folder: int) -> None:
    """Remove the content of the open `folder`, without following links."""
    for _, folders, files, opened in os.fwalk(".", topdown=False, dir_fd=folder):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=opened)
        for name in folders:
            with contextlib.suppress(OSError):
                link = stat.S_ISLNK(os.lstat(name, dir_fd=opened).st_mode)
                (os.unlink if link else os.rmdir)(name, dir_fd=opened)


def _remove_ipyparallel_files(profile: str, cluster: str) -> None:
    """Remove ipyparallel's files of `cluster` in `profile`.

    Does nothing unless `cluster` has the form of a ddip cluster ID.
    """
    if profile and CLUSTER.fullmatch(cluster):
        connections = [f"ipcontroller-{cluster}-{kind}.json" for kind in ("client", "engine")]
        new = [f"{name}.new" for name in connections]
        _remove_owned_files(profile, "security", [*connections, *new])
        _remove_owned_files(profile, "log", [f"engines{cluster}.json"])


def _remove_owned_files(profile: str, folder: str, names: Iterable[str]) -> None:
    """Remove the files `names` in a `folder` of `profile`, if this user owns the folder."""
    with contextlib.suppress(OSError, ValueError):
        opened = os.open(os.path.join(profile, folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in names if os.fstat(opened).st_uid == os.getuid() else ():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=opened)
        finally:
            os.close(opened)


def clear_up(folder: Path, *, only_of_the_dead: bool = False) -> bool:
    """End the processes in the record of `folder`, remove its files and the folder, and return True.

    Does nothing, and returns False, if the folder is not private to this user or, with `only_of_the_dead`, if its
    owner is alive.
    """
    with contextlib.suppress(OSError), _open_private(folder) as opened:
        record = Record.read(opened)
        owner = record.owner if record else _owner_in_name(folder.name)
        if owner is None or (only_of_the_dead and owner.find() is not None):
            return False
        if record is not None:
            me = os.getpid()
            end_processes([p for p in record.processes if p.pid != me], record.mark)
            _remove_ipyparallel_files(record.profile, record.cluster)
        _remove_content(opened)
        os.rmdir(folder)
        return True
    return False


def clear_up_orphans() -> int:
    """Clean up every cluster of this user whose owner has ended, and return their number."""
    return sum(clear_up(folder, only_of_the_dead=True) for folder in run_folders())


def run_folders() -> Iterator[Path]:
    """Yield every folder with the name of a run folder of this user and PID scope, whoever created it."""
    prefix = _folder_prefix()
    for place in _candidate_folders():
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(place) if name.startswith(prefix) and _owner_in_name(name)]
            yield from (place / name for name in names)


@dataclass(frozen=True)
class Run:
    """A cluster of this user, or its leftovers."""

    folder: Path
    owner: Proc
    owner_lives: bool
    processes: int
    """Number of live processes that its record lists."""


def list_runs() -> list[Run]:
    """List every cluster of this user in this PID scope; change nothing."""
    found = []
    for folder in run_folders():
        with contextlib.suppress(OSError), _open_private(folder) as opened:
            record = Record.read(opened)
            owner = record.owner if record else _owner_in_name(folder.name)
            if owner is not None:
                live = find_live(record.processes, record.mark) if record else []
                found.append(Run(folder, owner, owner.find() is not None, len(live)))
    return found
