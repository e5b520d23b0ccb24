"""Every exception that a user can meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from IPython.core.error import UsageError

__all__ = [
    "BadInput",
    "CellError",
    "CellInterrupted",
    "CellTimeout",
    "DdipError",
    "DipUsageError",
    "GroupError",
    "LocalCellFailed",
    "NoGroup",
    "RankError",
    "RequestFailed",
    "RequestInterrupted",
    "TransferError",
]


class DdipError(BaseException):
    """Base of every exception of ddip's.

    Those of the stop button are a ``KeyboardInterrupt``, which ``except Exception`` lets pass; all others are an
    ``Exception``.
    """


class DipUsageError(DdipError, UsageError):
    """The notebook shows its message alone, without a traceback of ours, as for IPython's own ``UsageError``."""

    def _render_traceback_(self) -> list[str]:
        return [f"UsageError: {self}"]


class BadInput(DipUsageError, ValueError):
    """Something that was typed cannot be done; the message says what to type instead."""


class NoGroup(DipUsageError, RuntimeError):
    """There is no group to run this in."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: there is no group yet; start one with %makedip -n 2, or %makedip -g all")


class GroupError(DipUsageError, RuntimeError):
    """The group did not form, or a rank of it is gone or busy."""


class RequestFailed(GroupError):
    """Ranks did not do what ddip asked of them.

    ``by_rank`` has what was raised before anybody was interrupted for it; ``late`` are those that took too long.
    """

    def __init__(self, message: str, by_rank: Mapping[int, RankError], late: Sequence[int] = ()) -> None:
        self.by_rank = dict(sorted(by_rank.items()))
        self.late = list(late)
        super().__init__(message)


class RequestInterrupted(DdipError, KeyboardInterrupt):
    """The user interrupted what ddip itself did on ranks; the message says what became of it."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


class TransferError(DipUsageError, RuntimeError):
    """A push or a pull failed; nothing was delivered."""


@dataclass(frozen=True)
class RankError:
    """What one rank raised."""

    name: str
    message: str
    traceback: str
    """As IPython formatted it on the rank, ANSI colours included; may be empty."""
    waited: str = ""
    """Where the rank waited for others when it was released, or lost them, and so raised this; else empty."""
    at: float = 0.0
    """When it was raised, on the rank's clock, seconds."""
    pid: int | None = None
    """Of a process that is gone."""

    @property
    def what(self) -> str:
        """The message without what each rank has of its own."""
        return self.message.removeprefix(f"pid {self.pid} ")

    def __str__(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name


def ranks_text(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``ranks 0-2, 5``.

    >>> ranks_text([3])
    'rank 3'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(spans)


STOPPED = ("KeyboardInterrupt", "CancelledError")
"""Names of what an interrupt raises; the second where a cell awaits."""
RANK_ENDED = "RankEnded"
"""Name of the error of a rank whose process is gone."""
REPAIR = "%makedip --repair puts a new process in its place; the other ranks keep their variables"
NONE_LEFT = "no rank is left, nor any variable: %makedip --repair starts new processes"
"""What is said instead where all ranks are gone."""


def _own(by_rank: Mapping[int, RankError]) -> dict[int, RankError]:
    """Without what ranks raised only because they were released."""
    return {rank: error for rank, error in by_rank.items() if not error.waited}


def _groups(by_rank: Mapping[int, RankError]) -> list[tuple[list[int], RankError]]:
    """Ranks with the same error together, the earliest first."""
    groups: dict[tuple[str, str], tuple[list[int], RankError]] = {}
    for rank, error in sorted(by_rank.items(), key=lambda item: (item[1].at, item[0])):
        groups.setdefault((error.name, error.what), ([], error))[0].append(rank)
    return list(groups.values())


def clauses(by_rank: Mapping[int, RankError], *, named: bool = True) -> list[str]:
    """One for each error, the earliest first; ranks with the same error together. `named`: with the errors' names."""
    found = []
    for ranks, error in _groups(by_rank):
        pids = [str(pid) for pid in (by_rank[rank].pid for rank in ranks) if pid is not None]
        message = f"pids {', '.join(pids)} {error.what}" if len(pids) > 1 else error.message
        found.append(f"{ranks_text(ranks)}: {replace(error, message=message) if named else message}")
    return found


def _tracebacks(by_rank: Mapping[int, RankError], in_tabs: Collection[int]) -> list[str]:
    """The ranks' own tracebacks, with the cell's lines and none of ddip's; of what is also `in_tabs`, the first."""
    lines: list[str] = []
    for ranks, error in _groups(_own(by_rank)):
        if error.traceback and not (lines and set(ranks) <= set(in_tabs)):
            lines += [f"[{ranks_text(ranks)}]", *error.traceback.splitlines()]
    return lines


def _summary(by_rank: Mapping[int, RankError], repair: str) -> str:
    """One clause for each error, the earliest first, and one for each place where ranks waited."""
    parts = clauses(_own(by_rank))
    waited: dict[str, list[int]] = {}
    for rank, error in sorted(by_rank.items()):
        if error.waited:
            waited.setdefault(error.waited, []).append(rank)
    parts += [
        f"{ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} blocked in {place}, until ddip aborted it"
        for place, ranks in waited.items()
    ]
    if any(error.name == RANK_ENDED for error in by_rank.values()):
        parts.append(repair)
    return "; ".join(parts)


class CellError(DdipError, RuntimeError):
    """A cell failed on at least one rank; ``by_rank`` has what each of them raised."""

    in_tabs: Collection[int] = ()
    """Ranks whose tracebacks the cell's output shows."""

    def __init__(self, by_rank: Mapping[int, RankError], repair: str = REPAIR) -> None:
        self.by_rank = dict(sorted(by_rank.items()))
        super().__init__(_summary(by_rank, repair))

    def _render_traceback_(self) -> list[str]:
        """IPython's hook."""
        return [*_tracebacks(self.by_rank, self.in_tabs), f"{type(self).__name__}: {self}"]


class CellTimeout(CellError):
    """A cell took longer than ``--timeout`` allows; ``by_rank`` has what the ranks that ended raised."""

    def __init__(self, message: str, by_rank: Mapping[int, RankError]) -> None:
        super().__init__(by_rank)
        self.args = (message,)

    def _render_traceback_(self) -> list[str]:
        return [*_tracebacks(_not_stopped(self.by_rank), self.in_tabs), f"{type(self).__name__}: {self}"]


class CellInterrupted(DdipError, KeyboardInterrupt):
    """The user interrupted a cell that ran on ranks; ``by_rank`` has what those that ended raised."""

    in_tabs: Collection[int] = ()
    """Ranks whose tracebacks the cell's output shows."""

    def __init__(self, message: str, by_rank: Mapping[int, RankError]) -> None:
        self.by_rank = dict(sorted(by_rank.items()))
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        return [*_tracebacks(_not_stopped(self.by_rank), self.in_tabs), f"KeyboardInterrupt: {self}"]


def _not_stopped(by_rank: Mapping[int, RankError]) -> dict[int, RankError]:
    """What was raised for other reasons than that the cell was stopped."""
    return {rank: error for rank, error in by_rank.items() if error.name not in STOPPED}


class LocalCellFailed(DdipError, RuntimeError):
    """The notebook's own part of a cell failed; its traceback has been shown already."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
