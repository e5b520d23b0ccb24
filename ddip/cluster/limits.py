"""What the system lets a process have (``ulimit``), against what a group needs: known before a start waits in vain."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from ddip.errors import GroupError

CONTROLLER_FILES, A_RANKS_FILES = 125, 7
"""Descriptors that the controller or its heart monitor opens at most, and how many more for each rank."""
RANK_FILES, A_PEERS_FILES = 60, 2
"""Those that a rank opens before its first cell, and how many more for each rank of the group."""
NOTEBOOK_FILES = 32
"""Those that a group adds to the notebook's."""
THREADS, A_RANKS_THREADS = 20, 16
"""Threads of the controller, the warm process and the notebook's end of them, and of each rank."""
MANY_THREADS = 20_000
"""A limit above this is not looked at: to count the threads of all processes takes a while."""


@dataclass(frozen=True)
class Limits:
    """Of this process, and so of what it starts; ``inf`` where there is none."""

    files: float
    most_files: float
    """To which a process may raise the limit for itself."""
    threads: float
    """Of all processes of this user together."""
    memory: float
    """Address space, bytes."""

    @classmethod
    def now(cls) -> Limits:
        """Read them."""
        files, most = map(_number, resource.getrlimit(resource.RLIMIT_NOFILE))
        threads = _number(resource.getrlimit(resource.RLIMIT_NPROC)[0]) if os.getuid() else float("inf")
        return cls(files, most, threads, _number(resource.getrlimit(resource.RLIMIT_AS)[0]))


def _number(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)


def shortage(ranks: int, there: int, limits: Limits, files: int, threads: int) -> str:
    """What `limits` deny a group of `ranks`, of which `there` are there; empty if there is enough of everything.

    `files`: how many this process has opened; `threads`: how many the user's processes have.
    """
    controller = CONTROLLER_FILES + A_RANKS_FILES * ranks
    if limits.most_files < controller:
        return _files_text(ranks, f"the controller opens up to {controller}", limits.most_files, controller)
    rank = RANK_FILES + A_PEERS_FILES * ranks
    if limits.files < rank:
        return _files_text(ranks, f"a rank opens {rank}", limits.files, rank)
    notebook = files + (0 if there else NOTEBOOK_FILES)
    if limits.files < notebook:
        return _files_text(ranks, f"the notebook opens {notebook}", limits.files, notebook)
    more = A_RANKS_THREADS * max(0, ranks - there) + (0 if there else THREADS)
    if limits.threads < threads + more:
        return (
            f"{_ranks(ranks)}: {more} more threads and processes are needed, this user has {threads}, and may have "
            f"{limits.threads:.0f} (ulimit -u); type a smaller number, or raise that limit before Jupyter starts"
        )
    return ""


def _files_text(ranks: int, what: str, limit: float, need: int) -> str:
    return (
        f"{_ranks(ranks)}: {what} files, and the limit is {limit:.0f}; "
        f"raise it with ulimit -n {need}, or more, before Jupyter starts"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def ensure_room(ranks: int, there: int = 0) -> None:
    """Raise GroupError if a group of `ranks`, of which `there` are there, cannot be on this system."""
    limits = Limits.now()
    threads = user_threads() if limits.threads < MANY_THREADS else 0
    short = shortage(ranks, there, limits, len(os.listdir("/dev/fd")), threads)
    if short:
        raise GroupError(short)


def user_threads() -> int:
    """How many threads the processes of this user have."""
    count, me = 0, os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == me:
                count += process.num_threads()
    return count


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Add to what fails in it the limit that is probably the reason: how much torch needs, nobody can know before."""
    try:
        yield
    except RuntimeError as error:  # a GroupError, or "can't start new thread"
        memory = Limits.now().memory
        if memory == float("inf"):
            raise
        text = f"a process may have {memory / 1e9:.1f} GB of address space here (ulimit -v), which may be too little"
        raise GroupError(f"{error}\n{text}") from None
