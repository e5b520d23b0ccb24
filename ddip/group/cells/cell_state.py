"""A pure state machine for one cell on several ranks: it uses no process, thread, clock or socket.

``running.py`` runs the cell: it passes every event to ``CellState.step``, with the time, and carries out the actions
that ``step`` returns.

    event                       decision
    ------------------------    ---------------------------------------------------------------------------------
    a rank has replied          if it is the first error, the other ranks get `failure_grace` seconds to finish
    a rank's output has ended   the cell is over once every rank has replied and its output has ended
    the stop button             interrupt all running ranks; on a second press, abort their collectives at once
    time passes                 abort waiting collectives, interrupt at the timeout, report which rank holds the
                                cell up, abandon ranks that do not stop
    ranks wait in vain          abort their collectives at once, even if no rank has failed
    an answer to a question     whether ranks make progress, which only the runner can find out

A rank whose process has ended also counts as having replied: its error is ``RANK_ENDED``. A rank can therefore leave
the cell only by its reply and the end of its output, and a cell lasts only while an uninterrupted rank runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, TypeAlias

from ddip.errors import RANK_ENDED, RankError
from ddip.protocol.reports import CellReport
from ddip.settings import DEFAULTS

PATIENCE_SECONDS = 2.0
"""Time that ranks may keep running after collectives were aborted for another rank's error, before ddip reports
them."""
STOP_GRACE_SECONDS = 0.5
"""Time that ranks may take to end by the interrupt alone, before waiting collectives are aborted."""
STOP_SECONDS = 2.2
"""Time that an interrupted cell may take. A rank that is still running then, and makes no progress towards its end, is
reported and abandoned."""
ASK_SECONDS = 1.5
"""Time from the interrupt until the ranks are first checked for such progress."""
LOOK_SECONDS = 0.25
"""Interval at which the ranks are checked while the cell runs."""
IDLE_SECONDS, ENDING_SECONDS = 0.1, 0.02
"""Time that the runner waits for an event before it sends `TimePassed`; the second applies while the cell is being
ended."""

INTERRUPTED = "ddip interrupted this rank because of the failure"
"""Text shown for ranks that cannot be unblocked."""


@dataclass(frozen=True)
class Limits:
    """Time limits of one cell, in seconds."""

    failure_grace: float = DEFAULTS.failure_grace
    """Time from the first failure until the collectives of the other ranks are aborted, unless they wait in vain."""
    stall_timeout: float = DEFAULTS.stall_timeout
    """Time without progress until the user is told which rank waits where."""
    timeout: float | None = None
    """Time limit for the whole cell; None: no limit."""
    can_unblock: bool = True
    """False if waiting collectives cannot be aborted on every rank. Ranks that run on after another's failure are then
    interrupted as well, and reported if they do not stop."""


# -- events


@dataclass(frozen=True)
class RankReplied:
    """A rank has replied: the cell has ended there, or the rank's process has."""

    rank: int
    error: RankError | None = None
    caught: RankError | None = None
    """Error that the cell's own code caught and showed, although the cell succeeded."""


@dataclass(frozen=True)
class OutputEnded:
    """The last message of a rank's output has arrived."""

    rank: int


@dataclass(frozen=True)
class StopPressed:
    """The user pressed the stop button."""


@dataclass(frozen=True)
class TimePassed:
    """No other event arrived within `CellState.interval`."""


@dataclass(frozen=True)
class MovingRanks:
    """The answer to `Question.WHO_MOVES`."""

    ranks: Sequence[int]


@dataclass(frozen=True)
class CellStalled:
    """The answer to `Question.STALL` or `Question.STALL_AFTER_CAUGHT`; sent only if no rank makes progress."""

    after_caught: bool = False


@dataclass(frozen=True)
class WaitsInVain:
    """The answer to `Question.WAITS_IN_VAIN`; sent only if that is proved."""


@dataclass(frozen=True)
class CannotStop:
    """The answer to `Question.WHO_CANNOT_STOP`; sent only if there are such ranks."""

    ranks: Sequence[int]


Event: TypeAlias = (
    CannotStop | RankReplied | OutputEnded | StopPressed | TimePassed | MovingRanks | CellStalled | WaitsInVain
)


# -- actions


class RankAction(Enum):
    """Actions on the ranks that still run the cell."""

    INTERRUPT = auto()
    ABORT = auto()
    """Abort every waiting collective."""
    RECORD_PLACES = auto()
    """Record where the ranks are, for the error message."""
    CHECK = auto()
    """Check that the controller is running, and record the memory of the ranks."""
    REPORT_RUNNING = auto()
    """Tell the user which ranks keep running after another's error."""
    REPORT_STALL = auto()
    """Tell the user where each rank waits, as no rank makes progress."""


class Question(Enum):
    """Questions of the state machine to the runner, which answers with an event."""

    WHO_MOVES = auto()
    """Ask which interrupted ranks make progress towards their end."""
    WAITS_IN_VAIN = auto()
    """Ask whether every running rank waits for one on which the cell has ended, or, after a stop, for each other."""
    WHO_CANNOT_STOP = auto()
    """Ask which interrupted ranks are in a wait that nothing can end."""
    STALL = auto()
    """Ask whether no rank has made progress for `Limits.stall_timeout`."""
    STALL_AFTER_CAUGHT = auto()
    """Ask whether no rank has made progress since a rank caught an error and ended the cell successfully. The other
    ranks may wait for it."""


@dataclass(frozen=True)
class ShowEnded:
    """Show that a rank has finished: it has replied, and its output has ended."""

    rank: int
    failed: bool


Action: TypeAlias = RankAction | Question | ShowEnded
Ending: TypeAlias = Literal["good", "failed", "stopped", "timed out"]


@dataclass
class CellState:
    """The state of one cell on `ranks` since `began`; all times are seconds of one monotonic clock."""

    ranks: Sequence[int]
    limits: Limits
    began: float
    errors: dict[int, RankError] = field(default_factory=dict)
    is_abandoned: bool = False
    """True if the cell is over although ranks still run it."""
    stopped_at: float | None = None
    _timed_out: bool = False
    _failed_at: float | None = None
    _aborted_at: float | None = None
    _interrupted_at: float | None = None
    """Time of the interrupt by the stop button, or of ranks that an abort did not unblock."""
    _failed_before_abort: list[int] = field(default_factory=list)
    """The ranks that failed before any collective was aborted."""
    _caught: dict[int, RankError] = field(default_factory=dict)
    _replied: set[int] = field(default_factory=set)
    _output_ended: set[int] = field(default_factory=set)
    _moving: Sequence[int] = ()
    """The interrupted ranks that make progress towards their end."""
    _cannot_stop: Sequence[int] = ()
    """The ranks in a wait that nothing can end."""
    _running_reported: bool = False
    _stall_reported: bool = False
    _next_look: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_look = self.began + LOOK_SECONDS
        self._running_reported = not self.limits.can_unblock  # the error names them once they are abandoned

    def begin(self, ranks: Sequence[int], now: float) -> None:
        """Start the clock of the cell, which has been sent to `ranks` at time `now`."""
        self.ranks, self.began = ranks, now
        self._next_look = now + LOOK_SECONDS

    # -- queries of the runner

    @property
    def running(self) -> list[int]:
        """The ranks that have not replied."""
        return [rank for rank in self.ranks if rank not in self._replied]

    @property
    def is_over(self) -> bool:
        """True if the runner need not wait any longer."""
        return self.is_abandoned or (len(self._replied) == len(self._output_ended) == len(self.ranks))

    @property
    def interval(self) -> float:
        """Time that the runner may wait for an event, in seconds."""
        ending = self._failed_at is not None or self.stopped_at is not None
        return ENDING_SECONDS if ending else IDLE_SECONDS

    def ending(self) -> Ending:
        """Return how the cell has ended, or would end now."""
        if self._timed_out:
            return "timed out"
        if self.stopped_at is not None:
            return "stopped"
        return "failed" if self.errors or self.is_abandoned else "good"

    def reportable_errors(self) -> dict[int, RankError]:
        """Return the errors to report to the user, by rank.

        An error says so if its rank only waited for others. If ranks waited, or still wait, for a rank that had caught
        its own error, that caught error is included.
        """
        errors = {rank: self._final_error(rank) for rank in self.errors}
        waited = any(error.waited for error in errors.values()) or (self.is_abandoned and self.stopped_at is None)
        return {**self._caught, **errors} if waited else errors

    def _final_error(self, rank: int) -> RankError:
        """Return the error of `rank` as far as is known now.

        If the rank failed before any collective was aborted, a broken connection counts as its own error, unless the
        process of a rank has ended.
        """
        error = self.errors[rank]
        ended = any(other.name == RANK_ENDED for other in self.errors.values())
        return error if ended or rank not in self._failed_before_abort else replace(error, waited="")

    # -- events in the cell

    def step(self, event: Event, now: float) -> list[Action]:
        """Update the state for `event` at time `now`, and return the actions for the runner to take, in order.

        If an action is a `Question`, the runner passes the answer to a further `step`.
        """
        match event:
            case MovingRanks(ranks):
                self._moving = ranks
                self._abandon_if_due(now)
                return []
            case CannotStop(ranks):
                self._cannot_stop = ranks
                self._abandon_if_due(now)
                return []
            case CellStalled(after_caught=True) | WaitsInVain():
                return self._abort_collectives(now) if self._aborted_at is None else []
            case CellStalled():
                reported, self._stall_reported = self._stall_reported, True
                return [] if reported else [RankAction.REPORT_STALL]
            case RankReplied(rank, error, caught):
                actions = self._note_reply(rank, error, caught, now)
            case OutputEnded(rank):
                self._output_ended.add(rank)
                actions = self._show_if_ended(rank)
            case StopPressed():
                actions = self._interrupt(now)
            case TimePassed():
                actions = []
        return [*actions, *self._timed_actions(now)]

    def _note_reply(self, rank: int, error: RankError | None, caught: RankError | None, now: float) -> list[Action]:
        self._replied.add(rank)
        if error is not None:
            by_ddip = error.name == "KeyboardInterrupt" and self._interrupted_at is not None and self.stopped_at is None
            self.errors[rank] = replace(error, message=INTERRUPTED) if by_ddip else error
            if self._aborted_at is None:
                self._failed_before_abort.append(rank)
            if self._failed_at is None:
                self._failed_at = now
        if caught is not None:
            self._caught[rank] = caught
        return self._show_if_ended(rank)

    def _show_if_ended(self, rank: int) -> list[Action]:
        if rank not in self._replied or rank not in self._output_ended:
            return []
        return [ShowEnded(rank, rank in self.errors and not self._final_error(rank).waited)]

    def _interrupt(self, now: float) -> list[Action]:
        """Interrupt the ranks; on a second press, also abort their collectives."""
        if self.stopped_at is None:
            self.stopped_at = self._interrupted_at = now
            return [RankAction.INTERRUPT, Question.WHO_CANNOT_STOP]
        return [RankAction.INTERRUPT, *(self._abort_collectives(now) if self.running else [])]

    def _abort_collectives(self, now: float) -> list[Action]:
        self._aborted_at = now
        return [RankAction.ABORT]

    # -- time limits

    def _timed_actions(self, now: float) -> list[Action]:
        check_due = now >= self._next_look
        if check_due:
            self._next_look = now + LOOK_SECONDS
        if not self.running:  # only messages are outstanding; these come through the controller, which may have ended
            self.is_abandoned = self.is_abandoned or _has_passed(self.stopped_at, STOP_SECONDS, now)
            return [RankAction.CHECK] if check_due else []
        actions: list[Action] = []
        timeout = self.limits.timeout
        if timeout is not None and now >= self.began + timeout and self.stopped_at is None:
            self._timed_out = True
            actions += [RankAction.RECORD_PLACES, *self._interrupt(now)]
        if self._aborted_at is None:
            if _has_passed(self._failed_at, self.limits.failure_grace, now) or _has_passed(
                self.stopped_at, STOP_GRACE_SECONDS, now
            ):
                actions += self._abort_collectives(now)
            else:
                if (self._replied or self.stopped_at is not None) and self.limits.can_unblock:
                    actions.append(Question.WAITS_IN_VAIN)
                if self._caught:
                    actions.append(Question.STALL_AFTER_CAUGHT)
        if self._must_interrupt(now):
            self._interrupted_at = now
            actions.append(RankAction.INTERRUPT)
        if check_due and _has_passed(self._interrupted_at, ASK_SECONDS, now):
            actions.append(Question.WHO_MOVES)  # the answer, `MovingRanks`, decides whether they are abandoned
        else:
            self._abandon_if_due(now)
        if check_due and not self.is_abandoned:
            actions += self._check_ranks(now)
        return actions

    def _must_interrupt(self, now: float) -> bool:
        """Return whether to interrupt, once, ranks that still run after an abort that cannot unblock every rank."""
        is_late = _has_passed(self._aborted_at, STOP_GRACE_SECONDS, now)
        return is_late and not self.limits.can_unblock and self._interrupted_at is None

    def _abandon_if_due(self, now: float) -> None:
        hopeless = bool(self._cannot_stop) and set(self.running) <= set(self._cannot_stop)
        if hopeless or (_has_passed(self._interrupted_at, STOP_SECONDS, now) and not self._moving):
            self.is_abandoned = True

    def _check_ranks(self, now: float) -> list[Action]:
        actions: list[Action] = [RankAction.CHECK]
        if self.stopped_at is not None:
            return actions
        if self._failed_at is not None:
            if not self._running_reported and _has_passed(self._aborted_at, PATIENCE_SECONDS, now):
                self._running_reported = True
                actions.append(RankAction.REPORT_RUNNING)
        else:  # also after a report, since the ranks may wait in different collectives only then
            actions.append(Question.STALL)
        return actions


def _has_passed(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now >= since + seconds


def caught_in(report: CellReport | None) -> RankError | None:
    """Return the error that the cell caught and showed, from a rank's report; None if there is none."""
    if report is None or "caught" not in report:
        return None
    caught = report["caught"]
    return RankError(caught["name"], caught["message"], "\n".join(caught["traceback"]), at=report["at"])
