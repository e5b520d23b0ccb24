"""One cell and its record: code, ranks, state, outcome and errors, from submission to its end."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ddip.errors import (
    RANK_ENDED,
    CellError,
    CellInterrupted,
    CellTimeout,
    DipUsageError,
    GroupError,
    RankError,
    ranks_text,
)
from ddip.group import stopping
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.recording import Recording
from ddip.output.cells.router import CellOutput
from ddip.output.tables.tables import CellRow
from ddip.protocol.cell_messages import ScriptFile
from ddip.protocol.status_types import CellOutcome

State: TypeAlias = Literal["queued", "running", "ended"]
Outcome: TypeAlias = CellOutcome
"""Outcome of a cell.

``ok``: it succeeded on all its ranks. ``user_error``: a rank raised an exception. ``rank_died``: the process of a rank,
or the whole group, ended. ``stuck``: a rank did not stop on request, and still runs the cell. ``interrupted``: it was
stopped. ``timeout``: it exceeded its time limit. ``not_run``: it left the queue without running, because it was stopped
or because a cell that it waited for failed.
"""
ENDINGS = {"ok": "ended", "timeout": "timed out", "interrupted": "was stopped", "not_run": "did not run"}
WORDS = {
    "ok": "ok",
    "user_error": "failed",
    "rank_died": "a rank ended",
    "stuck": "did not stop",
    "interrupted": "stopped",
    "timeout": "timed out",
    "not_run": "not run",
}
"""Outcomes as lists show them."""
LINE = 60
"""Characters of a cell's first line that lists show."""
ADVICE = "%dipwait {number} waits for it, %dipstop {number} ends it"
DEBUG_ADVICE = "%dipdebug {number} opens the prompt, %dipstop {number} ends the cell"
QUEUE_ADVICE = "%%dip --queue runs a cell after it"


def do_nothing() -> None:
    """Do nothing: the stop action of a cell that is not running."""


@dataclass(eq=False)
class Cell:
    """A cell that `Group.run` or `Group.start` has created.

    Other threads update the attributes until the cell has ended.
    """

    number: int
    """Number of the cell in the notebook, or a running count in a script."""
    ranks: tuple[int, ...]
    """Ranks that run the cell."""
    code: str
    """Source of the cell."""
    output: CellOutput | None
    """The place where its output is shown; None once ddip no longer listens for its output."""
    background: bool = False
    """True for a cell that `Group.start` has created."""
    state: State = "queued"
    """Current state; a queued cell waits for earlier cells of its ranks to end."""
    submitted: float = field(default_factory=time.time)
    """Unix time of submission, in seconds; `began` and `ended` use the same clock."""
    began: float | None = None
    ended: float | None = None
    outcome: Outcome | None = None
    """Outcome of the cell; None until it has ended."""
    error: BaseException | None = None
    """The error of a background cell, which `wait` raises; None if the cell succeeded."""
    message: str = ""
    """The message of its error."""
    error_text: str = ""
    """Text of the error as the user sees it, with tracebacks; empty if there is no error."""
    errors: dict[int, RankError] = field(default_factory=dict)
    """Error of each rank that raised one, by rank."""
    replied: dict[int, bool] = field(default_factory=dict)
    """The ranks that have finished the cell, and whether each failed."""
    seconds_by_rank: dict[int, float] = field(default_factory=dict)
    """Duration on each rank that reported one."""
    paused: float = 0.0
    """Seconds for which it waited for the user's answers, which do not count as its duration."""
    summary: str = ""
    """Its ranks and duration, in words."""
    is_outcome_known: bool = False
    """True once a caller that waited for the cell knows its outcome."""
    script: ScriptFile | None = None
    """The script of a ``%diprun`` cell."""
    explained: bool = False
    """True if its error already includes advice."""
    noted: bool = False
    """True once the user was told, before a later cell, that it failed."""
    done: Future[None] = field(default_factory=Future)
    """Set once the cell has ended and the group's state has been updated."""
    press_stop: Callable[[], object] = do_nothing
    """The action of the stop button; may be called at any time, on any thread."""
    find_asking_ranks: Callable[[], list[int]] = list
    """Return the ranks that wait for an answer of the user, such as those that have stopped in the debugger."""

    def __post_init__(self) -> None:
        assert self.output is not None
        self.show_ranks: tuple[int, ...] = tuple(sorted(self.output.show_ranks))
        self.display: DisplayOptions = self.output.display
        self.recording: Recording = self.output.recording

    @property
    def first_line(self) -> str:
        """First non-empty line of the code, cut to 60 characters."""
        line = next((line.strip() for line in self.code.splitlines() if line.strip()), "")
        return line if len(line) <= LINE else f"{line[: LINE - 1]}…"

    @property
    def seconds(self) -> float:
        """Duration of the cell so far, or in total once it has ended, in seconds; 0 while it is queued."""
        return 0.0 if self.began is None else max(0.0, (self.ended or time.time()) - self.began - self.paused)

    @property
    def text(self) -> str:
        """The cell's name for messages."""
        return f"cell {self.number}"

    def busy_text(self, ranks: Sequence[int]) -> str:
        """Return the message for a request that needs `ranks` while this cell runs on them or waits for them."""
        asking = self.find_asking_ranks()
        if asking:
            return (
                f"{self.text} waits for your answer on {ranks_text(asking)}: {DEBUG_ADVICE.format(number=self.number)}"
            )
        verb = "runs on" if self.state == "running" else "waits for"
        activity = f"{self.text} {verb} {ranks_text(ranks)}" + (
            f" for {self.seconds:.0f} s" if self.seconds >= 1 else ""
        )
        return f"{activity} ({self.first_line}): {ADVICE.format(number=self.number)}, {QUEUE_ADVICE}"

    @property
    def outcome_text(self) -> str:
        """The cell's outcome as a verb phrase."""
        return "ended with its group" if self._ended_with_group else ENDINGS.get(self.outcome or "", "failed")

    @property
    def _ended_with_group(self) -> bool:
        """True if the cell ended because the whole group did, and not because of a rank of its own."""
        return self.outcome == "rank_died" and all(error.name != RANK_ENDED for error in self.errors.values())

    def row(self) -> CellRow:
        """Return the cell's row in ``%dipcells``."""
        state = self.state if self.state != "ended" else WORDS[self.outcome or "ok"]
        state = "the group ended" if self._ended_with_group else state
        return CellRow(self.number, self.ranks, state, self.seconds, self.background, self.first_line)

    def begin(self) -> None:
        """Mark the cell as running from now on."""
        self.state, self.began = "running", time.time()

    def end(self, error: BaseException | None, stuck: bool = False) -> None:
        """Record that the cell has ended with `error`; `stuck`: ranks still run it."""
        self.ended = time.time()
        self.began = self.began or self.ended
        self.error, self.outcome = error, outcome_of(error, stuck)
        self.message, self.error_text = ("", "") if error is None else (str(error), text_of(error))
        self.errors = dict(getattr(error, "by_rank", {}))
        self.press_stop = do_nothing
        self.state = "ended"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the cell has ended, and raise its error if it failed.

        Parameters
        ----------
        seconds
            Longest time to wait; None: no limit.

        Returns
        -------
        bool
            True if the cell has ended, False if it still runs after `seconds`.

        Raises
        ------
        CellError, CellTimeout, CellInterrupted, GroupError
            If the cell failed, timed out, was stopped, or did not run.
        RequestInterrupted
            If the user pressed the stop button; the cell continues to run.
        """
        ended = self.wait_for_end(seconds)
        if ended and self.error is not None:
            raise self.error.with_traceback(None)  # else each wait would add its frames
        return ended

    def wait_for_end(self, seconds: float | None = None) -> bool:
        """Wait as `wait` does, but do not raise the cell's error; return False if it still runs.

        Raises RequestInterrupted if the user presses the stop button first; the cell continues then.
        """
        text = f"waiting was interrupted; {self.text} continues: {ADVICE.format(number=self.number)}"
        with stopping.note_presses(text) as button:
            button.wait_for([self.done], math.inf if seconds is None else seconds)
            if self.done.done():
                button.take()
        self.is_outcome_known = self.is_outcome_known or self.done.done()
        return self.done.done()

    def stop(self) -> None:
        """Stop the cell as the stop button does, and wait until it has ended.

        If the user presses the stop button during the wait, ddip stops the cell again.

        Raises
        ------
        GroupError
            If a rank does not stop.
        """
        with stopping.note_presses() as button:
            self.press_stop()
            while not self.done.done():
                button.wait_for([self.done], math.inf)
                if button.pressed:
                    button.take()
                    self.press_stop()
        self.is_outcome_known = True
        if self.outcome == "stuck":
            raise GroupError(self.message)


def text_of(error: BaseException) -> str:
    """Return the text that IPython would print for `error`, with its traceback."""
    if isinstance(error, (DipUsageError, CellError, CellInterrupted)):
        return "\n".join(error._render_traceback_())
    return "".join(traceback.format_exception(error)).rstrip("\n")


def outcome_of(error: BaseException | None, stuck: bool) -> Outcome:
    """Return the outcome of a cell that ended with `error`; "ok" for None.

    `stuck`: ranks still run the cell. Errors other than CellError, CellTimeout and CellInterrupted mean that the
    controller or the whole group has ended.
    """
    if error is None:
        return "ok"
    if stuck:
        return "stuck"
    if isinstance(error, CellTimeout):
        return "timeout"
    if isinstance(error, CellInterrupted):
        return "interrupted"
    if isinstance(error, CellError):
        died = any(problem.name == RANK_ENDED for problem in error.by_rank.values())
        return "rank_died" if died else "user_error"
    return "rank_died"  # the controller, or the whole group, has ended
