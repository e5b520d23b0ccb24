"""One cell that was given to the ranks: what is known of it, while it waits, runs, and when it has ended."""

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
from ddip.protocol.status_types import CellOutcome

State: TypeAlias = Literal["queued", "running", "ended"]
Outcome: TypeAlias = CellOutcome
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
"""For lists."""
LINE = 60
"""Characters of its first line that are shown."""
WAY = "%dipwait {number} waits for it, %dipstop {number} ends it"
QUEUE = "%%dip --queue runs a cell after it"


def nothing() -> None:
    """What the stop button does with a cell that does not run."""


@dataclass(eq=False)
class Cell:
    """One cell; made by ``Group.run`` and ``Group.start``.

    Another thread may change it at any time, until it is `done`.
    """

    number: int
    """The notebook's; in a script they are counted."""
    ranks: tuple[int, ...]
    code: str
    output: CellOutput | None
    """Where it is shown; None when nothing of it is listened to any more."""
    background: bool = False
    state: State = "queued"
    submitted: float = field(default_factory=time.time)
    """On ``time.time``, as the next two."""
    began: float | None = None
    ended: float | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None
    """Of a cell in the background: what `wait` raises; None if it went well."""
    message: str = ""
    """Of its error."""
    error_text: str = ""
    """What the user is told of it, with tracebacks."""
    errors: dict[int, RankError] = field(default_factory=dict)
    """What ranks raised, by rank."""
    replied: dict[int, bool] = field(default_factory=dict)
    """Ranks that have ended it, and whether they failed."""
    seconds_by_rank: dict[int, float] = field(default_factory=dict)
    """That it took, where that is known."""
    summary: str = ""
    """Where it has run, and how long it took."""
    told: bool = False
    """Has somebody who waited for it been told how it has ended?"""
    explained: bool = False
    """Does its error say what may be done about it?"""
    noted: bool = False
    """Has the user been told before another cell that it has failed?"""
    done: Future[None] = field(default_factory=Future)
    """It has ended, and all that comes of that has been done."""
    press_stop: Callable[[], object] = nothing
    """What the stop button does; may be called at any time, on any thread."""

    def __post_init__(self) -> None:
        assert self.output is not None
        self.show_ranks: tuple[int, ...] = tuple(sorted(self.output.show_ranks))
        self.display: DisplayOptions = self.output.display
        self.recording: Recording = self.output.recording

    @property
    def first_line(self) -> str:
        """Of its code, for lists."""
        line = next((line.strip() for line in self.code.splitlines() if line.strip()), "")
        return line if len(line) <= LINE else f"{line[: LINE - 1]}…"

    @property
    def seconds(self) -> float:
        """That it has run so far, or took."""
        return 0.0 if self.began is None else (self.ended or time.time()) - self.began

    @property
    def text(self) -> str:
        """What it is, in a few words."""
        return f"cell {self.number}"

    def busy_text(self, ranks: Sequence[int]) -> str:
        """What to say to who wants something else of `ranks` that it has."""
        verb = "runs on" if self.state == "running" else "waits for"
        what = f"{self.text} {verb} {ranks_text(ranks)}" + (f" for {self.seconds:.0f} s" if self.seconds >= 1 else "")
        return f"{what} ({self.first_line}): {WAY.format(number=self.number)}, {QUEUE}"

    @property
    def outcome_text(self) -> str:
        """How it has ended, as a verb."""
        return ENDINGS.get(self.outcome or "", "failed")

    def row(self) -> CellRow:
        """For ``%dipcells``."""
        state = self.state if self.state != "ended" else WORDS[self.outcome or "ok"]
        return CellRow(self.number, self.ranks, state, self.seconds, self.background, self.first_line)

    def begin(self) -> None:
        """It runs from now on."""
        self.state, self.began = "running", time.time()

    def end(self, error: BaseException | None, stuck: bool = False) -> None:
        """It has ended; `stuck`: ranks run on."""
        self.ended = time.time()
        self.began = self.began or self.ended
        self.error, self.outcome = error, outcome_of(error, stuck)
        self.message, self.error_text = ("", "") if error is None else (str(error), text_of(error))
        self.errors = dict(getattr(error, "by_rank", {}))
        self.press_stop = nothing
        self.state = "ended"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, at most `seconds`; returns whether it has. Raises what it has raised.

        The stop button ends the wait, with RequestInterrupted, and not the cell.
        """
        ended = self.wait_for_end(seconds)
        if ended and self.error is not None:
            raise self.error.with_traceback(None)  # the frames of the last wait are of no use
        return ended

    def wait_for_end(self, seconds: float | None = None) -> bool:
        """The same, whatever it has raised."""
        text = f"waiting was interrupted; {self.text} goes on: {WAY.format(number=self.number)}"
        with stopping.button(text) as button:
            button.wait_for([self.done], math.inf if seconds is None else seconds)
            if self.done.done():
                button.take()
        self.told = self.told or self.done.done()
        return self.done.done()

    def stop(self) -> None:
        """End it, as the stop button does, and wait until it has ended; the stop button then presses once more.

        Raises GroupError if ranks did not stop.
        """
        with stopping.button() as button:
            self.press_stop()
            while not self.done.done():
                button.wait_for([self.done], math.inf)
                if button.pressed:
                    button.take()
                    self.press_stop()
        self.told = True
        if self.outcome == "stuck":
            raise GroupError(self.message)


def text_of(error: BaseException) -> str:
    """What IPython would show of it."""
    if isinstance(error, (DipUsageError, CellError, CellInterrupted)):
        return "\n".join(error._render_traceback_())
    return "".join(traceback.format_exception(error)).rstrip("\n")


def outcome_of(error: BaseException | None, stuck: bool) -> Outcome:
    """How a cell has ended, by the `error` that it has raised; `stuck`: ranks run on."""
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
