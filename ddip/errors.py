"""Every exception that a user can meet."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from IPython.core.error import UsageError

__all__ = [
    "BadInput",
    "CellError",
    "CellInterrupted",
    "DipUsageError",
    "NoGroup",
    "RankError",
    "GroupError",
    "TransferError",
]


class DipUsageError(UsageError):
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


class TransferError(DipUsageError, RuntimeError):
    """A push or a pull failed; nothing was delivered."""


@dataclass(frozen=True)
class RankError:
    """What one rank raised."""

    name: str
    message: str
    traceback: str
    """As IPython formatted it on the rank, ANSI colours included; may be empty."""

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


def exit_text(code: int | None) -> str:
    """How a process ended: ``SIGKILL``, ``exit code 3``."""
    if code is None:
        return "exit code unknown"
    return signal.Signals(-code).name if code < 0 else f"exit code {int(code)}"


def _groups(by_rank: Mapping[int, RankError]) -> list[tuple[list[int], RankError]]:
    """Ranks with the same error together, by their lowest rank."""
    groups: dict[tuple[str, str], tuple[list[int], RankError]] = {}
    for rank, error in sorted(by_rank.items()):
        groups.setdefault((error.name, error.message), ([], error))[0].append(rank)
    return list(groups.values())


def _tracebacks(by_rank: Mapping[int, RankError]) -> list[str]:
    """The ranks' own tracebacks, with the cell's lines and none of ddip's."""
    lines = []
    for ranks, error in _groups(by_rank):
        if error.traceback:
            lines += [f"[{ranks_text(ranks)}]", *error.traceback.splitlines()]
    return lines


class CellError(RuntimeError):
    """A cell failed on at least one rank; ``by_rank`` has what each of them raised."""

    def __init__(self, by_rank: Mapping[int, RankError]) -> None:
        self.by_rank = dict(by_rank)
        super().__init__("; ".join(f"{ranks_text(ranks)}: {error}" for ranks, error in _groups(by_rank)))

    def _render_traceback_(self) -> list[str]:
        """IPython's hook."""
        return [*_tracebacks(self.by_rank), f"{type(self).__name__}: {self}"]


class CellInterrupted(KeyboardInterrupt):
    """The user interrupted a cell that ran on ranks; ``by_rank`` has what those that ended raised."""

    def __init__(self, message: str, by_rank: Mapping[int, RankError]) -> None:
        self.by_rank = dict(by_rank)
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        own = {rank: error for rank, error in self.by_rank.items() if error.name != KeyboardInterrupt.__name__}
        return [*_tracebacks(own), f"KeyboardInterrupt: {self}"]


class LocalCellFailed(RuntimeError):
    """The notebook's own part of a cell failed; its traceback has been shown already."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
