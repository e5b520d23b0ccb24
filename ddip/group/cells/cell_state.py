"""What becomes of a cell on several ranks, as decisions alone: no process, thread, clock or socket.

``cells.py`` runs the cell: it hands every event to ``CellState.step``, with the time, and does what that returns.

    event                       what is decided
    ------------------------    ---------------------------------------------------------------------------------
    a rank has answered         is it the first error? Then the others get `failure_grace` seconds to end by themselves
    its output has ended        with both ends of all ranks the cell is over
    the stop button             interrupt all that run; release at once if it is pressed again
    time passes                 release those that wait, interrupt at the timeout, tell who holds the cell up,
                                give up ranks that do not stop
    an answer to a question     whether ranks move, which only the runner can find out

A rank that has ended answers, too: its error is ``RANK_ENDED``. So there is no way for a rank to leave but the two
ends, and a cell can only last while a rank runs that nobody has told to stop.
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
"""How long ranks may run on after another's error, before the user is told who they are."""
STOP_GRACE_SECONDS = 0.5
"""How long ranks may take to end by the interrupt alone, before those that wait in a collective are released."""
STOP_SECONDS = 2.2
"""How long an interrupted cell may take; a rank that has not stopped by then, and makes no progress towards its end, is
named and left alone."""
ASK_SECONDS = 1.5
"""After which it is looked at which ranks make such progress."""
LOOK_SECONDS = 0.25
"""How often the ranks are looked at while the cell runs."""
IDLE_SECONDS, ENDING_SECONDS = 0.1, 0.05
"""How long the runner waits for an event before it says that time has passed; the second while the cell is being
ended."""

INTERRUPTED = "ddip interrupted this rank because of the failure"
"""Shown of ranks that cannot be unblocked."""


@dataclass(frozen=True)
class Limits:
    """How long a cell may do what; seconds."""

    failure_grace: float = DEFAULTS.failure_grace
    """From the first failure until the other ranks are released."""
    stall_timeout: float = DEFAULTS.stall_timeout
    """Without progress, until the user is told who waits where."""
    timeout: float | None = None
    """For the cell as a whole; None: for ever."""
    can_unblock: bool = True
    """Else ranks that still run after another's failure are interrupted as well, and named if they do not stop."""


# -- events


@dataclass(frozen=True)
class Replied:
    """A rank has answered: the cell has ended there, or the rank has."""

    rank: int
    error: RankError | None = None
    caught: RankError | None = None
    """What code of the cell has caught and shown, where the cell went well."""


@dataclass(frozen=True)
class OutputEnded:
    """The last message of a rank's output has come."""

    rank: int


@dataclass(frozen=True)
class StopPressed:
    """The stop button."""


@dataclass(frozen=True)
class TimePassed:
    """Nothing else has happened."""


@dataclass(frozen=True)
class Moving:
    """The answer to `Ask.WHO_MOVES`."""

    ranks: Sequence[int]


@dataclass(frozen=True)
class StandStill:
    """The answer to `Ask.STALL`, or `Ask.STALL_AFTER_CAUGHT`, where it is yes."""

    after_caught: bool = False


@dataclass(frozen=True)
class CannotStop:
    """The answer to `Ask.WHO_CANNOT_STOP`, if there are such ranks."""

    ranks: Sequence[int]


Event: TypeAlias = CannotStop | Replied | OutputEnded | StopPressed | TimePassed | Moving | StandStill


# -- actions


class Do(Enum):
    """For the ranks that run."""

    INTERRUPT = auto()
    RELEASE = auto()
    """Have every collective that waits fail."""
    KEEP_PLACES = auto()
    """Note where the ranks are, for the error."""
    LOOK = auto()
    """Is the controller there, and how much memory do the ranks hold?"""
    TELL_WHO_RUNS = auto()
    """After another's error."""
    TELL_WHO_WAITS = auto()
    """Nobody makes progress."""


class Ask(Enum):
    """What only the runner can find out; the answer is an event."""

    WHO_MOVES = auto()
    """Which of the ranks that were told to stop are on their way to it?"""
    WHO_CANNOT_STOP = auto()
    """Which of the ranks that were told to stop wait where nothing ends a wait?"""
    STALL = auto()
    """Has no rank made progress for `Limits.stall_timeout`?"""
    STALL_AFTER_CAUGHT = auto()
    """The same since a rank went well that had caught an error: do the others wait for it?"""


@dataclass(frozen=True)
class ShowEnded:
    """Both ends of a rank have come."""

    rank: int
    failed: bool


Action: TypeAlias = Do | Ask | ShowEnded
Ending: TypeAlias = Literal["good", "failed", "stopped", "timed out"]


@dataclass
class CellState:
    """One cell on `ranks`, since `began`; all times are of one clock that only goes forward, seconds."""

    ranks: Sequence[int]
    limits: Limits
    began: float
    errors: dict[int, RankError] = field(default_factory=dict)
    is_abandoned: bool = False
    """Ranks run on, and nobody waits for them."""
    stopped_at: float | None = None
    _timed_out: bool = False
    _failed_at: float | None = None
    _released_at: float | None = None
    _interrupted_at: float | None = None
    """By the stop button, or because a release cannot unblock them."""
    _before_release: list[int] = field(default_factory=list)
    """Ranks that failed before anybody was released."""
    _caught: dict[int, RankError] = field(default_factory=dict)
    _replied: set[int] = field(default_factory=set)
    _silent: set[int] = field(default_factory=set)
    _moving: Sequence[int] = ()
    """Ranks that are on their way to their end."""
    _cannot_stop: Sequence[int] = ()
    """Ranks for whose end nobody waits."""
    _told_who_runs: bool = False
    _told_who_waits: bool = False
    _next_look: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_look = self.began + LOOK_SECONDS
        self._told_who_runs = not self.limits.can_unblock  # they are named when they have been given up

    # -- what the runner asks

    @property
    def running(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self._replied]

    @property
    def is_over(self) -> bool:
        """Need nobody wait any more?"""
        return self.is_abandoned or (len(self._replied) == len(self._silent) == len(self.ranks))

    @property
    def interval(self) -> float:
        """For how long the runner may wait for an event."""
        ending = self._failed_at is not None or self.stopped_at is not None
        return ENDING_SECONDS if ending else IDLE_SECONDS

    def ending(self) -> Ending:
        """How the cell has ended."""
        if self._timed_out:
            return "timed out"
        if self.stopped_at is not None:
            return "stopped"
        return "failed" if self.errors or self.is_abandoned else "good"

    def news(self) -> dict[int, RankError]:
        """The errors that the user is told, by rank; of ranks that only waited, the error says so.

        If ranks waited, or still wait, for one that had caught its error, that one is told, too.
        """
        errors = {rank: self._settled(rank) for rank in self.errors}
        waited = any(error.waited for error in errors.values()) or (self.is_abandoned and self.stopped_at is None)
        return {**self._caught, **errors} if waited else errors

    def _settled(self, rank: int) -> RankError:
        """The error of `rank`, as far as is known now: that a connection broke which nobody had cut is news, unless a
        rank has ended."""
        error = self.errors[rank]
        ended = any(other.name == RANK_ENDED for other in self.errors.values())
        return error if ended or rank not in self._before_release else replace(error, waited="")

    # -- what happens

    def step(self, event: Event, now: float) -> list[Action]:
        """`event` has happened; returns what to do about it, in this order."""
        match event:
            case Moving(ranks):
                self._moving = ranks
                self._abandon_in_time(now)
                return []
            case CannotStop(ranks):
                self._cannot_stop = ranks
                self._abandon_in_time(now)
                return []
            case StandStill(after_caught=True):
                return self._release(now) if self._released_at is None else []
            case StandStill():
                self._told_who_waits = True
                return [Do.TELL_WHO_WAITS]
            case Replied(rank, error, caught):
                actions = self._replied_by(rank, error, caught, now)
            case OutputEnded(rank):
                self._silent.add(rank)
                actions = self._shown(rank)
            case StopPressed():
                actions = self._stop(now)
            case TimePassed():
                actions = []
        return [*actions, *self._in_time(now)]

    def _replied_by(self, rank: int, error: RankError | None, caught: RankError | None, now: float) -> list[Action]:
        self._replied.add(rank)
        if error is not None:
            by_ddip = error.name == "KeyboardInterrupt" and self._interrupted_at is not None and self.stopped_at is None
            self.errors[rank] = replace(error, message=INTERRUPTED) if by_ddip else error
            if self._released_at is None:
                self._before_release.append(rank)
            if self._failed_at is None:
                self._failed_at = now
        if caught is not None:
            self._caught[rank] = caught
        return self._shown(rank)

    def _shown(self, rank: int) -> list[Action]:
        if rank not in self._replied or rank not in self._silent:
            return []
        return [ShowEnded(rank, rank in self.errors and not self._settled(rank).waited)]

    def _stop(self, now: float) -> list[Action]:
        """Interrupt now; soon after, or when it is pressed again, release."""
        if self.stopped_at is None:
            self.stopped_at = self._interrupted_at = now
            return [Do.INTERRUPT, Ask.WHO_CANNOT_STOP]
        return [Do.INTERRUPT, *(self._release(now) if self.running else [])]

    def _release(self, now: float) -> list[Action]:
        self._released_at = now
        return [Do.RELEASE]

    # -- what the time asks for

    def _in_time(self, now: float) -> list[Action]:
        looks = now >= self._next_look
        if looks:
            self._next_look = now + LOOK_SECONDS
        if not self.running:  # only messages are missing, which come by way of the controller
            self.is_abandoned = self.is_abandoned or _is_over(self.stopped_at, STOP_SECONDS, now)
            return [Do.LOOK] if looks else []
        actions: list[Action] = []
        timeout = self.limits.timeout
        if timeout is not None and now >= self.began + timeout and self.stopped_at is None:
            self._timed_out = True
            actions += [Do.KEEP_PLACES, *self._stop(now)]
        if self._released_at is None:
            if _is_over(self._failed_at, self.limits.failure_grace, now) or _is_over(
                self.stopped_at, STOP_GRACE_SECONDS, now
            ):
                actions += self._release(now)
            elif self._caught:
                actions.append(Ask.STALL_AFTER_CAUGHT)
        if self._must_interrupt(now):
            self._interrupted_at = now
            actions.append(Do.INTERRUPT)
        if looks and _is_over(self._interrupted_at, ASK_SECONDS, now):
            actions.append(Ask.WHO_MOVES)  # whoever answers decides whether they are given up
        else:
            self._abandon_in_time(now)
        if looks and not self.is_abandoned:
            actions += self._look(now)
        return actions

    def _must_interrupt(self, now: float) -> bool:
        """Whether ranks have to be interrupted that a release cannot unblock."""
        released = _is_over(self._released_at, STOP_GRACE_SECONDS, now)
        return released and not self.limits.can_unblock and self._interrupted_at is None

    def _abandon_in_time(self, now: float) -> None:
        hopeless = bool(self._cannot_stop) and set(self.running) <= set(self._cannot_stop)
        if hopeless or (_is_over(self._interrupted_at, STOP_SECONDS, now) and not self._moving):
            self.is_abandoned = True

    def _look(self, now: float) -> list[Action]:
        actions: list[Action] = [Do.LOOK]
        if self.stopped_at is not None:
            return actions
        if self._failed_at is not None:
            if not self._told_who_runs and _is_over(self._released_at, PATIENCE_SECONDS, now):
                self._told_who_runs = True
                actions.append(Do.TELL_WHO_RUNS)
        elif not self._told_who_waits:
            actions.append(Ask.STALL)
        return actions


def _is_over(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now >= since + seconds


def caught_in(report: CellReport | None) -> RankError | None:
    """What the cell has caught and shown, out of a rank's report; None if nothing."""
    if report is None or "caught" not in report:
        return None
    caught = report["caught"]
    return RankError(caught["name"], caught["message"], "\n".join(caught["traceback"]), at=report["at"])
