"""The exceptions that ddip raises to users."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from IPython.core.error import UsageError


class DdipError(BaseException):
    """Base class of all ddip exceptions.

    Exceptions caused by the stop button also derive from ``KeyboardInterrupt``, so ``except Exception`` does not catch
    them; all others also derive from ``Exception``.
    """


class DipUsageError(DdipError, UsageError):
    """An error that the notebook shows as one line, without a traceback, like IPython's ``UsageError``."""

    def _render_traceback_(self) -> list[str]:
        return [f"UsageError: {self}"]


class BadInput(DipUsageError, ValueError):
    """Invalid input; the message says what to type instead."""


class NoGroup(DipUsageError, RuntimeError):
    """A command that needs a group was used while there was none."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: there is no group yet; start one with %makedip -n 2, or %makedip -g all")


class GroupError(DipUsageError, RuntimeError):
    """The group did not form, or one of its ranks has ended or is busy."""


class PartitionError(GroupError):
    """Hosts of the group cannot reach each other; no rank is replaced for that."""


class RequestFailed(GroupError):
    """A request to ranks, such as forming a process group, failed.

    Attributes
    ----------
    by_rank : dict[int, RankError]
        Error of each rank that raised one before ddip interrupted the other ranks.
    late : list[int]
        Ranks that did not reply in time.
    """

    def __init__(self, message: str, by_rank: Mapping[int, RankError], late: Sequence[int] = ()) -> None:
        self.by_rank = dict(sorted(by_rank.items()))
        self.late = list(late)
        super().__init__(message)


class RequestInterrupted(DdipError, KeyboardInterrupt):
    """The user interrupted a ddip operation on ranks, such as a push; the message says how it ended."""

    has_succeeded = False
    """Whether the interrupt came too late, after all ranks had done what they were asked for."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


class TransferError(DipUsageError, RuntimeError):
    """A push or a pull failed; nothing was delivered."""


@dataclass(frozen=True)
class RankError:
    """An exception that one rank raised."""

    name: str
    """Class name of the exception; ``RankEnded`` if the rank's process has ended."""
    message: str
    """Message of the exception; may be empty."""
    traceback: str
    """Traceback that IPython formatted on the rank, with ANSI colours; may be empty."""
    waited: str = ""
    """Location at which the rank waited for other ranks, such as in a collective, if that wait failed because ddip
    aborted it or the other ranks were lost; empty if the rank's own code raised the error."""
    at: float = 0.0
    """Time of the error, in seconds on the rank's clock."""
    pid: int | None = None
    """PID of the rank's process if the process has ended, otherwise None."""
    output: str = ""
    """Last lines that the rank printed in the cell; empty if the cell shows the rank's output."""

    @property
    def what(self) -> str:
        """Message without the PID, so that equal errors of several ranks compare equal."""
        return self.message.removeprefix(f"pid {self.pid} ")

    def __str__(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers as text: ``[0, 1, 2, 5]`` becomes ``ranks 0-2, 5``.

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
"""Error names of an interrupted cell: ``CancelledError`` if the cell awaited something."""
RANK_ENDED = "RankEnded"
"""Error name of a rank whose process has ended."""
REPAIR = "%makedip --repair replaces its process; the other ranks keep their variables"
MOST_OUTPUTS = 4
"""Number of different outputs of ranks that an error shows."""
NONE_LEFT = "all ranks are lost, with their variables; %makedip --repair starts new processes"
"""Replaces `REPAIR` in messages if all ranks have ended."""


def _without_aborted(by_rank: Mapping[int, RankError]) -> dict[int, RankError]:
    """Drop errors that ranks raised only because ddip aborted the operation that blocked them."""
    return {rank: error for rank, error in by_rank.items() if not error.waited}


def _group_equal_errors(by_rank: Mapping[int, RankError]) -> list[tuple[list[int], RankError]]:
    """Group ranks, in their order, that raised the same error; return the groups by the time of their first error."""
    groups: dict[tuple[str, str], tuple[list[int], RankError]] = {}
    for rank, error in sorted(by_rank.items(), key=lambda item: (item[1].at, item[0])):
        groups.setdefault((error.name, error.what), ([], error))[0].append(rank)
    return [(sorted(ranks), error) for ranks, error in groups.values()]


def error_clauses(by_rank: Mapping[int, RankError], *, named: bool = True) -> list[str]:
    """Return one clause per distinct error with the ranks that raised it, the earliest first.

    `named`: include the name of the exception class.
    """
    found = []
    for ranks, error in _group_equal_errors(by_rank):
        pids = [str(pid) for pid in (by_rank[rank].pid for rank in ranks) if pid is not None]
        message = f"pids {', '.join(pids)} {error.what}" if len(pids) > 1 else error.message
        found.append(f"{ranks_text(ranks)}: {replace(error, message=message) if named else message}")
    return found


def _traceback_lines(by_rank: Mapping[int, RankError], in_tabs: Collection[int]) -> list[str]:
    """Return the lines of the ranks' tracebacks, each below the last output of its ranks, the earliest error first.

    Those of the ranks `in_tabs` are omitted: the cell's output shows them.
    """
    lines: list[str] = []
    for ranks, error in _group_equal_errors(_without_aborted(by_rank)):
        if error.traceback and not set(ranks) <= set(in_tabs):
            lines += _output_lines({rank: by_rank[rank] for rank in ranks})
            lines += [f"[{ranks_text(ranks)}]", *error.traceback.splitlines()]
    return lines


def _output_lines(by_rank: Mapping[int, RankError]) -> list[str]:
    """Return up to `MOST_OUTPUTS` different last outputs of ranks that the cell does not show."""
    together: dict[str, list[int]] = {}
    for rank, error in by_rank.items():
        if error.output:
            together.setdefault(error.output, []).append(rank)
    shown, left_out = list(together.items())[:MOST_OUTPUTS], list(together.values())[MOST_OUTPUTS:]
    lines = [line for text, ranks in shown for line in (f"[{ranks_text(ranks)}] last output:", *text.splitlines())]
    ranks = [rank for same in left_out for rank in same]
    if ranks:
        lines.append(f"[{ranks_text(ranks)}] last output left out; -S {ranks[0]} shows rank {ranks[0]}")
    return lines


def _summary_text(by_rank: Mapping[int, RankError], repair: str) -> str:
    """Return one clause per error, the earliest first, and one per operation in which ranks were blocked."""
    parts = error_clauses(_without_aborted(by_rank))
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
    """A cell failed on at least one rank.

    Attributes
    ----------
    by_rank : dict[int, RankError]
        Error of each rank that raised one, in rank order.
    """

    in_tabs: Collection[int] = ()
    """Ranks whose tracebacks the cell's output shows."""

    def __init__(self, by_rank: Mapping[int, RankError], repair: str = REPAIR) -> None:
        self.by_rank = dict(sorted(by_rank.items()))
        super().__init__(_summary_text(by_rank, repair))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows for this exception; IPython calls this hook."""
        return [*_traceback_lines(self.by_rank, self.in_tabs), f"{type(self).__name__}: {self}"]


class CellTimeout(CellError):
    """A cell exceeded its time limit (``--timeout``), so ddip stopped it.

    Attributes
    ----------
    by_rank : dict[int, RankError]
        Error of each rank that failed or has stopped; a stopped rank has a ``KeyboardInterrupt``.
    """

    def __init__(self, message: str, by_rank: Mapping[int, RankError]) -> None:
        super().__init__(by_rank)
        self.args = (message,)

    def _render_traceback_(self) -> list[str]:
        stopped = {rank: error for rank, error in self.by_rank.items() if error.name in STOPPED or error.waited}
        lines = [*_output_lines(stopped), *_traceback_lines(_not_stopped(self.by_rank), self.in_tabs)]
        return [*lines, f"{type(self).__name__}: {self}"]


class CellInterrupted(DdipError, KeyboardInterrupt):
    """The user interrupted a cell on ranks.

    Attributes
    ----------
    by_rank : dict[int, RankError]
        Error of each rank that failed or has stopped; a stopped rank has a ``KeyboardInterrupt``.
    """

    in_tabs: Collection[int] = ()
    """Ranks whose tracebacks the cell's output shows."""

    def __init__(self, message: str, by_rank: Mapping[int, RankError]) -> None:
        self.by_rank = dict(sorted(by_rank.items()))
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        return [*_traceback_lines(_not_stopped(self.by_rank), self.in_tabs), f"KeyboardInterrupt: {self}"]


def _not_stopped(by_rank: Mapping[int, RankError]) -> dict[int, RankError]:
    """Drop the errors that stopping the cell caused."""
    return {rank: error for rank, error in by_rank.items() if error.name not in STOPPED}


class LocalCellFailed(DdipError, RuntimeError):
    """A cell failed in the notebook, which has already shown the traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
