"""The model of a group: its ranks and their variables. It touches no real group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .tools import NAMES

Values = dict[str, set[Any]]
"""Possible values of each variable, by name; None stands for a missing variable."""


MOST_DESCRIPTORS, MOST_THREADS = 500, 150
"""Limits of a rank after 50 steps, some of which leave loaders and threads behind."""


class Broken(AssertionError):
    """A broken promise."""


def new_values() -> Values:
    """Return the variables of a new process."""
    return {name: {None} for name in NAMES}


class Model:
    """The ranks by process: a process keeps its variables, whatever happens to the group."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        """PIDs by rank."""
        self.has: dict[int, Values] = {pid: new_values() for pid in pids}
        self.dead: set[int] = set()
        """Ranks whose process has ended."""
        self.lost = ""
        """Why only a restart helps; empty if it does not take one."""

    @property
    def size(self) -> int:
        return len(self.pids)

    @property
    def live(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.dead]

    def count(self, name: str, ranks: Iterable[int], surely: bool = True) -> None:
        """Increment a counter; if not `surely`, the former value also stays possible."""
        for rank in ranks:
            values = self.has[self.pids[rank]]
            more = {(value or 0) + 1 for value in values[name]}
            values[name] = more if surely else values[name] | more

    def put(self, name: str, value: Any, ranks: Iterable[int], surely: bool = True) -> None:
        """Set a variable; if not `surely`, the former value also stays possible."""
        for rank in ranks:
            values = self.has[self.pids[rank]]
            values[name] = {value} if surely else values[name] | {value}

    def forget(self, ranks: Iterable[int], surely: bool = True) -> None:
        """Delete all variables; if not `surely`, the former values also stay possible."""
        for rank in ranks:
            values = self.has[self.pids[rank]]
            self.has[self.pids[rank]] = {n: {None} if surely else v | {None} for n, v in values.items()}

    def members(self, pids: Sequence[int], kept: Iterable[int] | None = None) -> None:
        """Set the processes of the group; the ranks in `kept` must not have changed.

        Without `kept`, ranks may have changed places: a former process keeps its variables.
        """
        for rank in kept or ():
            if rank >= len(pids) or pids[rank] != self.pids[rank]:
                raise Broken(f"rank {rank} was healthy, and is another process now: {self.pids} -> {list(pids)}")
        former = self.has
        self.pids = list(pids)
        self.has = {pid: former.get(pid) or new_values() for pid in pids}
        self.dead.clear()

    def check(self, n: int, found: Sequence[tuple[Any, ...]]) -> None:
        """Compare with the result of ``prove``; what it found becomes certain."""
        if len(found) != self.size:
            raise Broken(f"{len(found)} ranks instead of {self.size}")
        total = n * self.size * (self.size + 1) / 2
        for rank, (pid, reported, size, reduced, values, held) in enumerate(found):
            if (reported, size) != (rank, self.size):
                raise Broken(f"rank {rank} of {self.size} says that it is rank {reported} of {size}")
            if pid != self.pids[rank]:
                raise Broken(f"rank {rank} is process {pid}, not {self.pids[rank]}")
            if reduced != [total] * 3:
                raise Broken(f"wrong number: all_reduce gave {reduced} on rank {rank}, not {total}")
            if held[0] > MOST_DESCRIPTORS or held[1] > MOST_THREADS:
                raise Broken(f"rank {rank} holds {held[0]} descriptors and {held[1]} threads")
            for name, value in values.items():
                possible = self.has[pid][name]
                if value not in possible:
                    raise Broken(f"{name} is {value!r} on rank {rank}, not {' or '.join(map(repr, possible))}")
                self.has[pid][name] = {value}
