"""Compare the system's limits (``ulimit``) with the needs of a group, before a start waits in vain."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddip.errors import GroupError

CONTROLLER_FILES, A_RANKS_FILES = 125, 7
"""Largest number of descriptors that the controller or its heart monitor opens, and how many more per rank."""
RANK_FILES, A_PEERS_FILES = 60, 2
"""Descriptors that a rank opens before its first cell, and how many more per rank of the group."""
NOTEBOOK_FILES = 32
"""Descriptors that a group opens in the notebook's process."""
THREADS, A_RANKS_THREADS = 20, 16
"""Threads of the controller, the preload process and the notebook's side of both, and threads per rank."""
MANY_THREADS = 20_000
"""Limit above which threads are not counted, since counting those of all processes takes a while."""
CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Limits:
    """Limits of this process, which its children inherit; ``inf`` if there is no limit."""

    files: float
    most_files: float
    """Hard limit, to which a process may raise `files` itself."""
    threads: float
    """Threads of all processes of this user together."""
    memory: float
    """Address space, bytes."""

    @classmethod
    def now(cls) -> Limits:
        """Read the current limits."""
        files, most = map(_limit_value, resource.getrlimit(resource.RLIMIT_NOFILE))
        threads = _limit_value(resource.getrlimit(resource.RLIMIT_NPROC)[0]) if os.getuid() else float("inf")
        return cls(files, most, threads, _limit_value(resource.getrlimit(resource.RLIMIT_AS)[0]))


def _limit_value(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)


def find_shortage(ranks: int, running: int, limits: Limits, files: int, threads: int) -> str:
    """Return the message for the first limit that is too low for a group of `ranks`; empty if none is.

    `ranks`: number of ranks, of which `running` already run; `files`: open descriptors of this process; `threads`:
    threads of all the user's processes.
    """
    controller = CONTROLLER_FILES + A_RANKS_FILES * ranks
    if limits.most_files < controller:
        return _files_text(ranks, f"the controller opens up to {controller}", limits.most_files, controller)
    rank = RANK_FILES + A_PEERS_FILES * ranks
    if limits.files < rank:
        return _files_text(ranks, f"a rank opens {rank}", limits.files, rank)
    notebook = files + (0 if running else NOTEBOOK_FILES)
    if limits.files < notebook:
        return _files_text(ranks, f"the notebook opens {notebook}", limits.files, notebook)
    more = A_RANKS_THREADS * max(0, ranks - running) + (0 if running else THREADS)
    if limits.threads < threads + more:
        return (
            f"{_ranks_text(ranks)}: {more} more threads and processes are needed, this user has {threads}, and may "
            f"have {limits.threads:.0f} (ulimit -u); type a smaller number, or raise that limit before Jupyter starts"
        )
    return ""


def _files_text(ranks: int, what: str, limit: float, need: int) -> str:
    return (
        f"{_ranks_text(ranks)}: {what} files, and the limit is {limit:.0f}; "
        f"raise it with ulimit -n {need}, or more, before Jupyter starts"
    )


def _ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def ensure_room(ranks: int, running: int = 0) -> None:
    """Raise GroupError if the limits are too low for a group of `ranks`, of which `running` already run."""
    limits = Limits.now()
    threads = user_threads() if limits.threads < MANY_THREADS else 0
    short = find_shortage(ranks, running, limits, len(os.listdir("/dev/fd")), threads)
    if short:
        raise GroupError(short)


def control_groups(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return the folders of this process's control group and of those around it; none for version 1."""
    with contextlib.suppress(OSError, IndexError):  # the file may be empty
        _, _, path = membership.read_text(errors="replace").splitlines()[-1].partition("::")  # "0::/a/b"
        folder = root / path.lstrip("/")
        return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return []


def control_group(controller: str, root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> tuple[int, int]:
    """Return limit and use of `controller` in the tightest control group of this process.

    `controller`: ``memory``, in bytes, or ``pids``. (0, 0) if there is no limit, or no control groups of version 2.
    """
    found = []
    for group in control_groups(root, membership):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number; containers lack some of the files
            limit, used = (int((group / f"{controller}.{name}").read_text()) for name in ("max", "current"))
            if controller == "memory":  # the kernel reclaims cached files on demand
                words = (group / "memory.stat").read_text().split()
                used -= int(words[words.index("inactive_file") + 1])
            found.append((limit, max(0, used)))
    return min(found, key=lambda bound: bound[0] - bound[1], default=(0, 0))


def user_threads() -> int:
    """Return the number of threads of all processes of this user."""
    count, me = 0, os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == me:
                count += process.num_threads()
    return count


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Turn a RuntimeError raised within into a GroupError that adds the limit on address space.

    Without a limit, the error stays. No one can know beforehand how much torch needs.
    """
    try:
        yield
    except RuntimeError as error:  # a GroupError, or "can't start new thread"
        memory = Limits.now().memory
        if memory == float("inf"):
            raise
        text = f"a process may have {memory / 1e9:.1f} GB of address space (ulimit -v), which may be too little"
        raise GroupError(f"{error}\n{text}") from None
