"""Follow a running cell: show its ranks' output until the last of them has finished.

Every cell ends. When a rank has failed, the others get `Limits.failure_grace` seconds to finish; then waiting
collectives are aborted (``process_group.py``), or at once if they wait in vain (``vain_waits.py``). The stop button and
``--timeout`` interrupt all ranks, abort their collectives, and abandon a rank that does not stop. ``cell_state.py``
decides all this; this module carries it out.

    ranks  --messages, reply and end of output-->  queue  <--stop button, end of the group
                                                     |
                    RunningCell: event  -->  CellState.step  -->  actions: interrupt, abort, report, ask
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ddip.cluster.cluster_api import Message, Recipient
from ddip.errors import (
    MOST_OUTPUTS,
    RANK_ENDED,
    CellError,
    CellInterrupted,
    CellTimeout,
    GroupError,
    RankError,
    ranks_text,
)
from ddip.group.cells.cell import Cell, Outcome, outcome_of
from ddip.group.cells.cell_state import (
    Action,
    CannotStop,
    CellStalled,
    CellState,
    Event,
    Limits,
    MovingRanks,
    OutputEnded,
    Question,
    RankAction,
    RankReplied,
    ShowEnded,
    StopPressed,
    TimePassed,
    WaitsInVain,
    caught_in,
)
from ddip.group.cells.cell_status import cell_bundle
from ddip.group.cells.vain_waits import VainWaits
from ddip.group.debugging.dialogue import Dialogue, can_prompt
from ddip.group.debugging.open_questions import OpenQuestion, OpenQuestions
from ddip.group.members.ranks import Ranks, Requests, unfinished_ranks
from ddip.group.members.watch import StopProgress, Watch
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.group.process_group.signatures import DIFFERENT, find_different_waits
from ddip.output.area import Notice, inform, notify, stop_name
from ddip.output.tables.tables import places_text, verb_of, where_text
from ddip.output.terminal_text import last_lines
from ddip.protocol import on_rank
from ddip.protocol.cell_messages import PAUSE, QUESTION, CellOptions
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import CellReport

Places = Mapping[int, StackLocation | None]
MEANING = {"rank": "the rank's number", "world_size": "the number of ranks"}
"""Meaning of each built-in variable that a cell may overwrite by mistake."""
THREAD = (
    "a thread is still training on {ranks}, so ddip has not reset models and gradients after {cell}; if that cell's "
    "own code also trained, clear its gradients"
)
HALF_STEP = (
    "{cell} ended inside an optimizer's step on {ranks}: parameters and the optimizer's state may be half updated; "
    "load them from a save (%dipload), or create model and optimizer again"
)
BACK = "import torch.distributed as dist; {name} = dist.get_{name}()"


class Notices:
    """The notices of one cell; `stop` is the command or button that stops it."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shown: list[tuple[Notice, str]] = []

    def report_running(self, ranks: Sequence[int], error: object, places: Places) -> None:
        """Print that `ranks` still run, at these `places`, although others have raised `error`."""
        headline = f"{error}; {ranks_text(ranks)} still {verb_of(ranks, 'run')}, outside of collectives"
        hint = f"{self._stop} ends the cell and keeps all variables"
        self._show(
            f"{headline}:\n{places_text(places)}\n{hint}", f"{ranks_text(ranks)} continued for a while after that"
        )

    def report_stall(self, seconds: float, places: Places, causes: Sequence[str]) -> None:
        """Print that no rank has made progress for `seconds`, where each is, and the known `causes`.

        Causes may be empty.
        """
        lines = [f"no rank has made progress for {seconds:g} s:", places_text(places), *filter(None, causes)]
        hint = f"{self._stop} ends the cell and keeps all variables, and so does %%dip --timeout SECONDS"
        text = "\n".join([*lines, f"the cell keeps waiting; {hint}"])
        self._show(text, f"no rank made progress for {seconds:g} s or more")

    def report_question(self, question: OpenQuestion, number: int) -> None:
        """Print that a rank of the background cell `number` asks the user `question`."""
        rank, asked = question.rank, question.asked
        at = f" at {asked['place']}" if asked["place"] else ""
        what = f"has stopped in the debugger{at}" if asked["is_command"] else f"asks: {asked['prompt']}"
        self._show(f"rank {rank} {what}; %dipdebug {number} opens the prompt", f"rank {rank} {what}")

    def _show(self, text: str, past_text: str) -> None:
        self._shown.append((Notice(text), past_text))

    def mark_resolved(self) -> None:
        """Replace each notice with its text in the past tense: all ranks have finished."""
        for notice, past_text in self._shown:
            notice.replace(past_text)


def tell_unchecked(ending: str, reports: Mapping[int, CellReport | None]) -> None:
    """Print the ranks whose state could not be checked after a cell; nothing if all could.

    `ending`: ``good``, ``failed``, ``stopped`` or ``timed out``. `reports` by rank; None if the rank sent none.
    """
    failed: dict[str, list[int]] = {}
    threads = []
    for rank, report in sorted(reports.items()):
        if report is None:
            continue
        if "fault" in report:
            fault = report["fault"]
            notify(f"rank {rank} cannot check its process group ({fault}); the group is rebuilt before the next cell")
        if ending != "good" and report.get("iteration", {}).get("in_thread"):
            threads.append(rank)
        for error in report.get("unchecked", []):
            failed.setdefault(error, []).append(rank)
    for error, ranks in failed.items():
        notify(
            f"ddip could not check the state of {ranks_text(ranks)} after this cell ({error}); %dipcheck compares the "
            "ranks"
        )
    if threads:
        notify(THREAD.format(ranks=ranks_text(threads), cell=_cell_text(ending)))


def _cell_text(ending: str) -> str:
    return {"good": "this cell", "timed out": "the cell that timed out"}.get(ending, f"the {ending} cell")


def tell_half_steps(ending: str, reports: Mapping[int, CellReport | None]) -> None:
    """Print the ranks that a cell left within a step of an optimizer, even if the cell has caught the error."""
    within = [rank for rank, report in sorted(reports.items()) if report and report.get("iteration", {}).get("in_step")]
    if within:
        notify(HALF_STEP.format(cell=_cell_text(ending), ranks=ranks_text(within)))


def tell_settings(ending: str, reports: Mapping[int, CellReport | None]) -> None:
    """Print the process settings that a cell left changed on its ranks.

    A good cell may change any setting, as long as its ranks agree. `ending`: ``good``, ``stopped`` or the like.
    """
    found: dict[tuple[str, str, bool], list[int]] = {}
    for rank, report in sorted(reports.items()):
        for setting in [] if report is None else report.get("settings", []):
            key = setting["left"], setting["restore"], setting["differs_by_rank"]
            found.setdefault(key, []).append(rank)
    for (change, restore, differs_by_rank), ranks in found.items():
        others = [rank for rank in sorted(reports) if rank not in ranks]
        if ending != "good" or (others and not differs_by_rank):
            except_on = f", but not on {ranks_text(others)}" if others and not differs_by_rank else ""
            cell = _cell_text(ending)
            notify(
                f"{cell} left {change} on {ranks_text(ranks)}{except_on}; %%dip: {restore} restores the former value"
            )


def tell_replaced(reports: Mapping[int, CellReport | None]) -> None:
    """Warn if a cell overwrote ``rank`` or ``world_size``, as a loop variable may do unnoticed."""
    values: dict[str, dict[str, list[int]]] = {}
    for rank, report in sorted(reports.items()):
        for name, value in ({} if report is None else report.get("replaced", {})).items():
            values.setdefault(name, {}).setdefault(value, []).append(rank)
    for name, ranks in values.items():
        on_ranks = ranks_text([rank for found in ranks.values() for rank in found])
        change = f"now {next(iter(ranks))}" if len(ranks) == 1 else "now different"
        back = BACK.format(name=name)
        notify(f"this cell overwrote {name} ({change} on {on_ranks}), {MEANING[name]}; %%dip: {back} restores it")


def tell_aborted(reports: Mapping[int, CellReport | None]) -> None:
    """Print which tensors of aborted collectives the ranks have restored, and which hold partial results."""
    ranks_of: dict[tuple[str, bool], list[int]] = {}
    for rank, report in sorted(reports.items()):
        for tensor in [] if report is None else report.get("aborted", []):
            place = StackLocation(**tensor["place"])
            source = f"`{place.source}` ({place.line_text})"
            ranks_of.setdefault((source, tensor["restored"]), []).append(rank)
    for (source, restored), ranks in ranks_of.items():
        if restored:
            inform(f"{ranks_text(ranks)}: restored the tensor of the aborted collective {source}")
        else:
            warning = "may hold partial results of the aborted collective"
            notify(f"{ranks_text(ranks)}: the tensor of {source} {warning}; set it before you use it again")


OUTPUT_LINES = 10
"""Number of the last lines of a rank's output that its error shows."""
STILL_SECONDS = 2.0
"""Time that ranks must make no progress before their collectives are aborted because a rank caught its own error."""
DRAW_SECONDS, PAUSE_SECONDS = 0.1, 0.03
"""Interval of redrawing output that changes in place, and time to collect output before the next redraw: each redraw
sends a message to the page."""


@dataclass(frozen=True)
class ReplyArrived:
    """The reply of `rank` has arrived; the `CellState` gets it as `RankReplied`."""

    rank: int


@dataclass(frozen=True)
class MessagesArrived:
    """The first message since the page was last redrawn has arrived."""


@dataclass(frozen=True)
class RankAsks:
    """A rank asks the user a question."""

    question: OpenQuestion


@dataclass(frozen=True)
class RankPaused:
    """A rank has stopped in an IDE, or continues."""

    rank: int
    is_paused: bool


@dataclass(frozen=True)
class OtherCellEnded:
    """A cell that this one waits for has ended."""


@dataclass(frozen=True)
class GroupEnded:
    """The group ends, because of `why`."""

    why: str


Arrived: TypeAlias = (
    ReplyArrived | OutputEnded | MessagesArrived | StopPressed | RankAsks | RankPaused | OtherCellEnded | GroupEnded
)
"""Events from other threads to the thread that follows a cell; two of them go to the `CellState` unchanged."""


class RunningCell:
    """One running cell: passes events to its `CellState`, and carries out the actions that it returns.

    Call `send`, then `follow` until the cell has ended, then `finish`; `error` then returns its error.
    """

    def __init__(
        self,
        ranks: Ranks,
        release: Callable[[], object],
        is_alone: Callable[[], bool],
        manager: ProcessGroupManager,
        cell: Cell,
        limits: Limits,
    ) -> None:
        """Prepare to run `cell` within `limits`; send nothing.

        `release` aborts the collectives that wait for it. `is_alone` returns True if no other cell can begin their
        missing parts. `manager` knows the operations that ranks had begun before the cell.
        """
        self.cell = cell
        self.events: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self.replies: Requests = {}
        self.reports: dict[int, CellReport | None] = {}
        self.questions = OpenQuestions()
        """The questions of ranks that wait for an answer; meanwhile, the cell's clock stands still."""
        self.can_ask = can_prompt()
        """True if the user can answer questions of the ranks."""
        self._dialogue = Dialogue(self)
        cell.find_asking_ranks = lambda: list(self.questions.by_rank)
        self.name = uuid.uuid4().hex
        """Unique name of this run, the same on all its ranks."""
        self._state = CellState([], limits, time.monotonic())
        self._ranks = ranks
        self._release = release
        self._is_alone = is_alone
        self._manager = manager
        assert cell.output is not None
        self.output = self._show = cell.output
        self._watch = Watch(ranks, limits.stall_timeout)
        self._after_caught = Watch(ranks, max(limits.failure_grace, STILL_SECONDS))
        self._vain_waits = VainWaits(ranks, manager.known_operations, time.monotonic())
        self.different = ""
        """Description of different collectives in which the ranks waited for each other; empty if they did not."""
        self._ending: StopProgress | None = None
        """Progress of the ranks after an interrupt; None before it."""
        self.asked: CellOptions = {}
        """Options of the cell for its ranks."""
        self.unmatched = False
        """True if it may begin collectives on some ranks only."""
        self.after: Callable[[Sequence[int]], object] = lambda stuck: None
        """Called when the cell has ended and before its ranks are free, with the ranks that are stuck in it."""
        self._places: dict[int, StackLocation | None] = {}
        """Locations of the ranks at the cell's timeout."""
        self._messages: deque[tuple[int, Message]] = deque()
        """Messages that have arrived and are not shown yet."""
        self._drawn = 0.0
        """Time of the last redraw of the page, on ``time.monotonic``."""
        self._undrawn = False
        """True if messages have arrived since; a redraw is then due, and further messages need not wake this thread."""
        stop = f"%dipstop {cell.number}" if cell.background else stop_name()
        self._notices = Notices(stop)
        self._lock = threading.Lock()
        self._is_late = False
        """True once the end of the cell has been shown; later messages are shown by the thread that receives them."""
        self._in_tabs: Collection[int] = ()

    # -- beginning and end

    def send(self) -> None:
        """Send the cell to its ranks, without waiting.

        `follow` then shows its output.
        """
        ranks = list(self.cell.ranks)
        self._state.begin(ranks, self.questions.now())  # a queued cell has waited before
        self._watch.note_progress()
        for rank in self._show.show_ranks.difference(ranks):
            self._perform(ShowEnded(rank, False))
        common: CellOptions = {
            "number": self.cell.number,
            "name": self.name,
            "ranks": ranks,
            "rich": self._show.rich,
            "stdin": self.can_ask,
        }
        recipients = [self._make_recipient(rank) for rank in ranks]
        requests = self._ranks.cluster.execute(self.cell.code, recipients, {**common, **self.asked})
        self.replies = dict(zip(ranks, requests, strict=True))
        for rank, request in self.replies.items():
            request.add_done_callback(self._sender_of(ReplyArrived(rank)))
            request.output.add_done_callback(self._sender_of(OutputEnded(rank)))

    def _sender_of(self, event: Arrived) -> Callable[[object], None]:
        return lambda _: self.events.put(event)

    def press_stop(self) -> None:
        """Interrupt the cell as the stop button does, without waiting.

        Callable from any thread or a signal handler.
        """
        self.events.put(StopPressed())

    def end_with_group(self, why: str) -> None:
        """End the cell because its group ends, with the message `why`, without waiting.

        Callable from any thread.
        """
        self.events.put(GroupEnded(why))

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not replied."""
        return unfinished_ranks(self.replies)

    @property
    def ending(self) -> str:
        """The way that the cell has ended: ``good``, ``failed``, ``stopped`` or ``timed out``."""
        return self._state.ending()

    def _make_recipient(self, rank: int) -> Recipient:
        def on_message(message: Message) -> None:
            if message["header"]["msg_type"] == QUESTION:
                self.events.put(RankAsks(OpenQuestion(rank, message["content"])))
                return
            if message["header"]["msg_type"] == PAUSE:
                self.events.put(RankPaused(rank, message["content"]["is_paused"]))
                return
            with self._lock:  # never render while holding it: all ranks' messages and replies arrive on this thread
                if self._is_late:
                    self._show.show_late(rank, message)
                    return
                self._messages.append((rank, message))
                if not self._undrawn:
                    self._undrawn = True
                    self.events.put(MessagesArrived())

        limit = self._show.display.max_output_chars if rank in self._show.show_ranks else 0
        return Recipient(self._ranks.members[rank].engine, on_message, limit)

    def finish(self, over: bool = False) -> None:
        """Show the rest of the output and the end; later messages count as late.

        `over`: the controller or the group has ended.
        """
        self.questions.drop()
        self.cell.paused = self.questions.paused_seconds
        try:
            self._show_end("rank_died" if over else self._find_outcome())
        finally:
            with self._lock:
                self._is_late = True
                for rank, message in self._messages:
                    self._show.show_late(rank, message)
                self._messages.clear()

    def _show_end(self, outcome: Outcome) -> None:
        if not self.unfinished:
            self._notices.mark_resolved()
        self._show_messages()
        reports = [(rank, report) for rank, report in sorted(self.reports.items()) if report is not None]
        seconds = {rank: report["seconds"] for rank, report in reports if "seconds" in report}  # else it never began
        show_seconds = bool(seconds) and max(seconds.values()) >= self._show.display.report_after
        self.cell.summary = where_text(seconds, name_slowest=outcome == "ok")
        self.cell.seconds_by_rank, self.cell.errors = seconds, self.errors
        note = self.cell.summary if show_seconds else ""
        self._in_tabs = self._show.finish(self.errors, note, lambda: cell_bundle(self.cell, self._show.rich, outcome))

    def _find_outcome(self) -> Outcome:
        """Return how the cell has ended, as far as that is known before its end is shown."""
        match self._state.ending():
            case _ if self.unfinished:
                return "stuck"
            case "timed out":
                return "timeout"
            case "stopped":
                return "interrupted"
            case "failed":
                return outcome_of(CellError(self.errors), stuck=False)
        return "ok"

    def error(self) -> CellError | CellInterrupted | None:
        """Return the error to show for a cell that has ended; None if it succeeded."""
        error = self._make_error()
        if error is not None:
            if self.different:
                error.args = (f"{error}; {DIFFERENT.format(lines=self.different)}",)
            error.in_tabs = self._in_tabs
        return error

    @property
    def errors(self) -> dict[int, RankError]:
        """The errors to report to the user, by rank."""
        return self._state.reportable_errors()

    def _make_error(self) -> CellError | CellInterrupted | None:
        stuck, errors = self.unfinished, self.errors
        match self._state.ending():
            case "timed out":
                headline = f"the cell took longer than {self._state.limits.timeout:g} s and was stopped"
                return CellTimeout(self._with_places(headline, stuck), errors)
            case "stopped":
                headline = f"the cell was interrupted on {ranks_text(sorted(errors) or stuck or list(self.replies))}"
                return CellInterrupted(self._with_places(headline, stuck) if stuck else headline, errors)
            case "failed":
                error = CellError(errors, self._ranks.repair_text)
                finished = sorted(self._vain_waits.missing or (self.replies.keys() - errors.keys() - {*stuck}))
                if stuck:  # happens if collectives cannot be aborted
                    error.args = (self._with_places(str(error), stuck),)
                elif self.different:
                    pass  # `error` adds them
                elif finished and all(each.waited for each in errors.values()):
                    error.args = (f"{error}; {ranks_text(finished)} finished the cell without it",)
                elif not self._manager.healthy and (partition := self._manager.describe_partition()):
                    error.args = (f"{error}; {partition}",)
                return error
            case "good" if self._is_stop_queued():
                return CellInterrupted("the cell had already ended when it was interrupted", {})
        return None

    def _is_stop_queued(self) -> bool:
        """Return whether an unread press of the stop button is queued; empties the queue up to it."""
        while not self.events.empty():
            if isinstance(self.events.get(), StopPressed):
                return True
        return False

    def _with_places(self, headline: str, stuck: Sequence[int]) -> str:
        lines = [headline]
        if self._places:
            lines[0] += "; the ranks were here:"
            lines.append(places_text(self._places))
        if stuck:
            lines.append(f"{ranks_text(stuck)} did not stop:")
            lines.append(places_text(self._ranks.stack_locations(stuck)))
            lines += self._logged_output(stuck)
            lines.append(self._ranks.advise_on_stuck(stuck))
        return "\n".join(lines)

    def _logged_output(self, stuck: Sequence[int]) -> list[str]:
        """Return the last output of hidden ranks among those that are `stuck`, from their logs.

        Such a rank may not answer a request for it.
        """
        lines = []
        for rank in [rank for rank in stuck if rank not in self.cell.show_ranks][:MOST_OUTPUTS]:
            log = "\n".join(self._ranks.cluster.log_tail(self._ranks.members[rank].engine))
            if text := last_lines(log, OUTPUT_LINES):
                lines += [f"[rank {rank}] last output:", text]
        return lines

    @property
    def end_text(self) -> str:
        """One line that says how the cell has ended, where it ran and how long it took."""
        text = f"{self.cell.text} {self.cell.outcome_text}"
        return f"{text} · {self.cell.summary}" if self.cell.summary else text

    # -- while the cell runs

    def wait_for(self, others: Sequence[Cell]) -> bool:
        """Wait until `others` have ended, before this cell begins; return False if stopped or the group ends.

        Returns True even if one of `others` failed.
        """
        for other in others:
            other.done.add_done_callback(self._sender_of(OtherCellEnded()))
        while not all(other.done.done() for other in others):
            if not isinstance(self.events.get(), OtherCellEnded):
                return False
        return True

    def follow(self) -> None:
        """Show messages until every rank has replied and its output has ended, or the cell is abandoned."""
        while not self._state.is_over:
            if time.monotonic() > self._drawn + (DRAW_SECONDS if self._messages else PAUSE_SECONDS):
                self._redraw()
            self._process(self._next_event())
            if self._asks_at_once and self._dialogue.is_due:
                self._dialogue.ask_next(self.follow_once)

    def follow_once(self) -> None:
        """Process the next event, and show what is due; called while the user thinks at a prompt."""
        if time.monotonic() > self._drawn + (DRAW_SECONDS if self._messages else PAUSE_SECONDS):
            self._redraw()
        if not self._state.is_over:
            self._process(self._next_event())
        else:
            self.questions.drop()

    # -- questions of ranks to the user

    @property
    def _asks_at_once(self) -> bool:
        """True if the thread that follows the cell asks the user; a background cell waits for ``%dipdebug``."""
        return self.can_ask and not self.cell.background

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return len(self._ranks.members)

    def wake_up(self) -> None:
        """Wake the thread that follows the cell from its wait for an event."""
        self.events.put(MessagesArrived())

    def describe_places(self) -> str:
        """Return the position of each rank, one line per position."""
        finished: dict[int, StackLocation | None] = dict.fromkeys(self.replies, StackLocation(state="finished"))
        return places_text({**finished, **self._ranks.stack_locations(self.unfinished)})

    def answer(self, question: OpenQuestion, text: str | None) -> None:
        """Send the answer to a question of a rank; None raises EOFError there."""
        if self.questions.take(question):
            self._ranks.call_on_control_channel([question.rank], on_rank.give_answer(question.asked["number"], text))
            self._watch.note_progress()
            self._after_caught.note_progress()
            self.cell.paused = self.questions.paused_seconds

    def converse(self, rank: int | None) -> None:
        """Ask for the answers that a background cell waits for, beginning with `rank` (None: any)."""
        self._dialogue.converse(self.cell.done.done, rank)

    def _note_question(self, question: OpenQuestion) -> None:
        if self._can_pause(question.rank):
            self.questions.add(question)
            if self.cell.background:
                self._notices.report_question(question, self.cell.number)

    def _can_pause(self, rank: int) -> bool:
        """Return False if `rank` no longer waits, since its cell is being stopped or has ended there."""
        return self._state.stopped_at is None and rank in self._state.running

    def _redraw(self) -> None:
        with self._lock:
            self._undrawn = bool(self._messages)
        self._show.draw()
        self._drawn = time.monotonic()

    def _show_messages(self) -> None:
        """Show the queued messages, but none that arrive meanwhile: an endless flow must not delay a stop."""
        for _ in range(len(self._messages)):
            self._show.receive(*self._messages.popleft())
            self._watch.note_progress()

    def _next_event(self) -> Event:
        """Wait for the next event and return it, after showing the messages that came before it."""
        pause = max(0.0, self._drawn + PAUSE_SECONDS - time.monotonic())
        try:
            arrived = self.events.get(timeout=pause if self._undrawn else self._state.interval)
        except queue.Empty:
            self._show_messages()
            return TimePassed()
        self._watch.note_progress()
        self._show_messages()
        match arrived:
            case ReplyArrived(rank):
                return self._take_reply(rank)
            case StopPressed():
                self.questions.drop()
                return arrived
            case OutputEnded():
                return arrived
            case RankAsks(question):
                self._note_question(question)
            case RankPaused(rank, is_paused):
                self.questions.set_paused(rank, is_paused and self._can_pause(rank))
                self.cell.paused = self.questions.paused_seconds
            case GroupEnded(why):
                raise GroupError(why)
        return TimePassed()

    def _take_reply(self, rank: int) -> RankReplied:
        reply = self.replies[rank].result()
        report = self.reports[rank] = reply.report
        self.questions.drop([rank])
        if report is not None and "seconds" in report:
            report["seconds"] = max(0.0, report["seconds"] - self.questions.paused_seconds)
        caught = caught_in(report)
        if caught is not None:
            self._after_caught.note_progress()
        hidden = "" if report is None else report.get("hidden", "")
        if caught is not None:
            before, shown, _ = hidden.partition(caught.traceback)  # which the cell has printed itself
            caught = replace(caught, output=last_lines(before if shown else "", OUTPUT_LINES))
        error = self._ranks.error_of(rank, reply)
        if error is not None:
            error = replace(error, output=last_lines(hidden, OUTPUT_LINES))
        return RankReplied(rank, error, caught)

    def _process(self, event: Event) -> None:
        """Process `event`: carry out the actions that follow, and process the events that these produce."""
        for action in self._state.step(event, self.questions.now()):
            answer = self._perform(action)
            if answer is not None:
                self._process(answer)
                if self._state.is_abandoned:  # by this answer, which makes the remaining actions pointless
                    return

    def _describe_absent(self) -> str:
        """Return a line about ranks that do not run the cell; empty if all do."""
        absent = sorted(set(range(self.world_size)).difference(self.cell.ranks))
        return f"{ranks_text(absent)} {'does' if len(absent) == 1 else 'do'} not run this cell" if absent else ""

    def _wait_in_vain(self, running: Sequence[int]) -> bool:
        """Return True if the `running` ranks wait for collectives that can never complete."""
        if self._state.ending() == "good" and not self._is_alone():
            return False
        ended = [rank for rank, error in self._state.errors.items() if error.name == RANK_ENDED]
        is_stopped = self._state.stopped_at is not None
        return self._vain_waits.are_proved(running, self.reports, ended, time.monotonic(), is_stopped)

    def _wait_in_different(self, running: Sequence[int]) -> bool:
        """Return True if the `running` ranks wait for each other in different collectives; set `different`."""
        if self._state.limits.can_unblock and not self.different:  # else they have been aborted, and are ending
            self.different = find_different_waits(self._ranks, running, list(self.replies))
            return bool(self.different)
        return False

    def _perform(self, action: Action) -> Event | None:
        """Carry out `action`; if it is a question, return the answer as an event."""
        running = self._state.running
        match action:
            case ShowEnded(rank, failed):
                self.cell.replied[rank] = failed
                self.cell.errors = self.errors
                self._show.ended(rank, failed)
            case RankAction.INTERRUPT:
                self._ranks.interrupt({rank: self.replies[rank].msg_id for rank in running})
                self._ending = self._ending or StopProgress(self._ranks, running)
            case RankAction.ABORT:
                self._release()
            case RankAction.RECORD_PLACES:
                self._places = self._ranks.stack_locations(running)
            case RankAction.CHECK:
                self._ranks.cluster.ensure_controller()
                self._ranks.watch_memory(running)
            case RankAction.REPORT_RUNNING:
                self._notices.report_running(running, CellError(self.errors), self._ranks.stack_locations(running))
            case RankAction.REPORT_STALL:
                finished: dict[int, StackLocation | None] = dict.fromkeys(self.replies, StackLocation(state="finished"))
                where = {**finished, **self._ranks.stack_locations(running, with_collectives=True)}
                causes = [self._ranks.cluster.stopped(), self._manager.describe_partition(), self._describe_absent()]
                self._notices.report_stall(self._state.limits.stall_timeout, where, causes)
            case Question.WHO_MOVES:
                assert self._ending is not None
                return MovingRanks(self._ending.find_moving(running))
            case Question.WAITS_IN_VAIN if not self.questions.is_paused and self._wait_in_vain(running):
                return WaitsInVain()
            case Question.WHO_CANNOT_STOP:
                cannot = self._ranks.find_unstoppable(running)
                return CannotStop(cannot) if cannot else None
            case Question.STALL if not self.questions.is_paused:
                has_stalled = self._watch.has_stalled(running, time.monotonic())
                if self._watch.is_still and self._wait_in_different(running):
                    return WaitsInVain()
                if has_stalled:
                    return CellStalled()
            case Question.STALL_AFTER_CAUGHT if not self.questions.is_paused and self._after_caught.has_stalled(
                running, time.monotonic()
            ):
                return CellStalled(after_caught=True)
        return None
