"""The process group of the ranks: formed, released when somebody waits in it for ever, and formed again.

a cell fails on rank 0, ranks 1-3 wait in all_reduce
    store        :  replaced by what nobody can read               who waits for a key raises
    connections  <- both ends of each, from every rank             those that two ranks share are the group's
    release      -> every rank shuts them down, aborts nccl        who waits in a collective raises
the next cell
    leave, join  -> main thread of every rank                      a new group; the variables are where they were
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddip import warming
from ddip.placement import Wish
from ddip.rank.seat import Seat
from ddip.ranks import Ranks

ADOPT_SECONDS = 2.0
"""How long a rank may take to note that a group is its own."""


class Formation:
    """The one group that the ranks are in, one after the other."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._formed = 0
        self._store: Path | None = None
        self.sound = False
        """False if the group must be formed (again) before anything can be done with it."""

    def join(self, wish: Wish, collect: bool, deadline: float) -> None:
        """Have all ranks join a new group; until `deadline` on ``time.monotonic``. Raises GroupError."""
        self.sound = False
        self._formed += 1
        former, self._store = self._store, self._ranks.cluster.run_folder / f"store-{self._formed}"
        port = _free_port()
        seats = {
            rank: Seat(
                rank=rank,
                world_size=wish.size,
                local_rank=rank,
                local_world_size=wish.size,
                group_rank=0,
                master_addr="127.0.0.1",
                master_port=port,
                device=wish.device(rank),
                backend=wish.backend,
                store=str(self._store),
                interface=_loopback(),
                threads=None if "OMP_NUM_THREADS" in os.environ else threads(wish.size),
                notebook=warming.notebook(),
                collect=collect,
                directory=_directory(),
                path=tuple(sys.path),
            )
            for rank in range(wish.size)
        }
        try:
            self._ranks.ask_each({rank: (seat,) for rank, seat in seats.items()}, "process_group.join", deadline)
        except BaseException:
            self.release()  # those that wait for one that does not come
            raise
        if former is not None:
            former.unlink(missing_ok=True)
        self.sound = True

    def leave(self, deadline: float) -> int:
        """Have all ranks leave their group, whatever state it is in.

        Returns how many wrappers (DDP) and subgroups go with it.
        """
        if not self.sound:
            self.release()
        self.sound = False
        nothing: dict[int, tuple[Any, ...]] = dict.fromkeys(self._ranks.live, ())
        return max(self._ranks.ask_each(nothing, "process_group.leave", deadline), default=0)

    def release(self) -> None:
        """Make every collective that waits fail, on every rank, now."""
        self.sound = False
        live = self._ranks.live
        if self._store is not None:
            _break(self._store)
        ours = _shared(self._ranks.connections(live))
        self._ranks.ask_beside(live, "process_group.release", str(self._store), ours)

    def judge(self, reports: Mapping[int, Mapping[str, Any] | None], failed: bool) -> None:
        """Look at what the ranks that have run a cell report of their group: it may have to be formed again."""
        told = {rank: report for rank, report in reports.items() if report is not None}
        size = len(self._ranks.members)
        if len(told) < len(reports) or any(report["released"] for report in told.values()):
            self.sound = False
        elif all(report["state"] == "ours" for report in told.values()):
            self.sound = self.sound and (not failed or _in_step(list(told.values())))
        elif len(told) == size and all(_fits(report, rank, size) for rank, report in told.items()):
            answers = self._ranks.ask_beside(range(size), "process_group.adopt", seconds=ADOPT_SECONDS)
            self.sound = all(answer is not None for answer in answers.values())
        else:
            self.sound = False


def _fits(report: Mapping[str, Any], rank: int, size: int) -> bool:
    """Has the cell formed a group in which `rank` is what it is in ours?"""
    return report["state"] == "other" and (report["rank"], report["size"]) == (rank, size)


def _in_step(reports: Sequence[Mapping[str, Any]]) -> bool:
    """Have all ranks begun as many collectives in the cell, in each of their groups?

    If not, the next one would wait for ever, or take the result of another.
    """
    counts: dict[tuple[str, int], list[int]] = {}
    for report in reports:
        for group, (count, size) in report["counts"].items():
            counts.setdefault((group, size), []).append(count)
    return all(
        len(set(begun)) == 1
        and (len(begun) == size or begun[0] == 0)  # not all ranks of the group may have run the cell
        for (_, size), begun in counts.items()
    )


def _shared(tables: Mapping[int, list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Of the connections of all ranks, those with a rank at both ends."""
    ends = {end for table in tables.values() for end in table}
    return [end for end in ends if (*end[2:], *end[:2]) in ends]


def _break(store: Path) -> None:
    """Replace the file `store` by a link to itself: whoever waits for a key in it fails with "too many links" now.

    ``FileStore`` would wait for a file that is missing, and no thread can interrupt it.
    """
    loop = store.with_name(f"{store.name}-broken")
    with contextlib.suppress(OSError):  # the run folder is gone, and every rank with it
        loop.unlink(missing_ok=True)
        loop.symlink_to(store)
        loop.replace(store)


def threads(ranks: int) -> int:
    """CPU threads for each of `ranks` on this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _directory() -> str:
    """Where the notebook is, for new ranks."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        return "/"


def _loopback() -> str:
    """Name of the loopback interface."""
    return "lo" if sys.platform == "linux" else "lo0"


def _free_port() -> int:
    """A TCP port that is free on loopback, for programs that want a MASTER_PORT; the group itself needs none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
