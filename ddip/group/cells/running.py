"""A cell under way on ranks: shows what they have to say until the last of them has finished.

Every cell ends. When a rank has failed, the others get `Limits.failure_grace` seconds to end by themselves; then
whatever waits in a collective is released (``process_group.py``). The stop button, and ``--timeout``, interrupt all
ranks, release them, and do not wait for one that does not stop. ``cell_state.py`` decides that; here it is done.

    ranks  --messages, two ends each-->  queue  <--stop button, the group's end
                                           |
                   RunningCell: event  -->  CellState.step  -->  actions: interrupt, release, tell, ask
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ddip.cluster.cluster_api import Message, Recipient, Request
from ddip.errors import CellError, CellInterrupted, CellTimeout, GroupError, RankError, ranks_text
from ddip.group.cells.cell import Cell, Outcome, outcome_of
from ddip.group.cells.cell_state import (
    Action,
    Ask,
    CannotStop,
    CellState,
    Do,
    Event,
    Limits,
    Moving,
    OutputEnded,
    Replied,
    ShowEnded,
    StandStill,
    StopPressed,
    TimePassed,
    caught_in,
)
from ddip.group.cells.cell_status import beside
from ddip.group.members.ranks import Ranks
from ddip.group.members.watch import Ending, Watch
from ddip.output.area import Notice, notify, stop_name
from ddip.output.tables.tables import places_text, verb_of, way_out, where_text
from ddip.protocol.cell_messages import Asked
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import CellReport

Places = Mapping[int, StackLocation | None]
MEANING = {"rank": "the rank's number", "world_size": "the number of ranks"}
"""What the variables of each rank that a cell may replace by mistake stand for."""
THREAD = (
    "a thread still trains on {ranks}, so ddip has changed no model and no gradient after {cell}; if its own code "
    "trained as well, clear its gradients"
)
BACK = "import torch.distributed as dist; {name} = dist.get_{name}()"


class Notices:
    """Those of one cell; `stop` is what ends it."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shown: list[tuple[Notice, str]] = []

    def run_on(self, ranks: Sequence[int], error: object, places: Places) -> None:
        """`ranks` run on after the `error` of others, at these `places`."""
        what = f"{error}; {ranks_text(ranks)} still {verb_of(ranks, 'run')}, outside of collectives"
        hint = f"{self._stop} ends the cell and keeps all variables"
        self._show(f"{what}:\n{places_text(places)}\n{hint}", f"{ranks_text(ranks)} ran on for a while after that")

    def nobody_moves(self, seconds: float, places: Places, stopped: str) -> None:
        """No rank has made progress for `seconds`; `stopped` says which processes a signal has stopped, if any."""
        lines = [f"no rank has made progress for {seconds:g} s:", places_text(places), *filter(None, [stopped])]
        hint = f"{self._stop} ends the cell and keeps all variables, and so does %%dip --timeout SECONDS"
        text = "\n".join([*lines, f"the cell keeps waiting; {hint}"])
        self._show(text, f"no rank made progress for {seconds:g} s or more")

    def _show(self, text: str, afterwards: str) -> None:
        self._shown.append((Notice(text), afterwards))

    def take_back(self) -> None:
        """All ranks have ended: nothing of it is true any more."""
        for notice, afterwards in self._shown:
            notice.replace(afterwards)


def tell_unchecked(ending: str, reports: Mapping[int, CellReport | None]) -> None:
    """Print where ddip could not find out what a cell has left. `ending`: ``good``, ``stopped`` or the like."""
    failed: dict[str, list[int]] = {}
    threads = []
    for rank, report in sorted(reports.items()):
        if report is None:
            continue
        if "fault" in report:
            told = report["fault"]
            notify(f"rank {rank} cannot tell how its group is, which is formed again before the next cell: {told}")
        if ending != "good" and report.get("iteration", {}).get("in_thread"):
            threads.append(rank)
        for error in report.get("unchecked", []):
            failed.setdefault(error, []).append(rank)
    for error, ranks in failed.items():
        notify(f"ddip could not check what this cell has left on {ranks_text(ranks)} ({error}); %dipcheck compares")
    if threads:
        notify(THREAD.format(ranks=ranks_text(threads), cell=_cell_text(ending)))


def _cell_text(ending: str) -> str:
    return {"good": "this cell", "timed out": "the cell that timed out"}.get(ending, f"the {ending} cell")


def tell_settings(ending: str, reports: Mapping[int, CellReport | None]) -> None:
    """Print the settings of the process that a cell has left changed on its ranks.

    A good cell may change what it likes, as long as its ranks agree. `ending`: ``good``, ``stopped`` or the like.
    """
    found: dict[tuple[str, str, bool], list[int]] = {}
    for rank, report in sorted(reports.items()):
        for setting in [] if report is None else report.get("settings", []):
            key = setting["left"], setting["restore"], setting["differs_by_rank"]
            found.setdefault(key, []).append(rank)
    for (left, restore, differs_by_rank), ranks in found.items():
        others = [rank for rank in sorted(reports) if rank not in ranks]
        if ending != "good" or (others and not differs_by_rank):
            but = f", but not on {ranks_text(others)}" if others and not differs_by_rank else ""
            cell = _cell_text(ending)
            notify(f"{cell} left {left} on {ranks_text(ranks)}{but}; %%dip: {restore} restores the former value")


def tell_replaced(reports: Mapping[int, CellReport | None]) -> None:
    """Say so if a cell has given ``rank`` or ``world_size`` another value, which it keeps: a loop may have, unseen."""
    values: dict[str, dict[str, list[int]]] = {}
    for rank, report in sorted(reports.items()):
        for name, value in ({} if report is None else report.get("replaced", {})).items():
            values.setdefault(name, {}).setdefault(value, []).append(rank)
    for name, ranks in values.items():
        where = ranks_text([rank for found in ranks.values() for rank in found])
        what = f"is {next(iter(ranks))}" if len(ranks) == 1 else "has other values"
        back = BACK.format(name=name)
        notify(f"{name} {what} on {where} from here on, and not {MEANING[name]}; %%dip: {back} brings that back")


def tell_aborted(reports: Mapping[int, CellReport | None]) -> None:
    """Print which tensors of aborted collectives the ranks have restored, and which hold partial results."""
    ranks_of: dict[tuple[str, bool], list[int]] = {}
    for rank, report in sorted(reports.items()):
        for one in [] if report is None else report.get("aborted", []):
            place = StackLocation(**one["place"])
            where = f"`{place.source}` (cell [{place.cell}] line {place.line})"
            ranks_of.setdefault((where, one["restored"]), []).append(rank)
    for (where, restored), ranks in ranks_of.items():
        if restored:
            notify(f"{ranks_text(ranks)}: ddip restored the tensor of the aborted collective {where}")
        else:
            what = "may hold partial results of the aborted collective"
            notify(f"{ranks_text(ranks)}: the tensor of {where} {what}; set it before you use it again")


STILL_SECONDS = 2.0
"""How long ranks must have stood still before they are released for an error that the cell itself has caught."""
DRAW_SECONDS, PAUSE_SECONDS = 0.1, 0.03
"""How often what changes in place is looked at, and how long what was shown waits for more: each is a message more."""
Requests: TypeAlias = Mapping[int, Request]


@dataclass(frozen=True)
class ReplyArrived:
    """The answer of `rank` is there: for the `CellState`, `Replied`."""

    rank: int


@dataclass(frozen=True)
class MessagesArrived:
    """The first messages since the page was brought up to date are there."""


@dataclass(frozen=True)
class OtherCellEnded:
    """One of the cells has ended that this one waits for."""


@dataclass(frozen=True)
class GroupEnded:
    """The group ends, because of `why`."""

    why: str


Arrived: TypeAlias = ReplyArrived | OutputEnded | MessagesArrived | StopPressed | OtherCellEnded | GroupEnded
"""What other threads tell the one that follows a cell; the `CellState` knows two of these as they are."""


class RunningCell:
    """One cell under way: what happens goes to its `CellState`, and what that decides is done."""

    def __init__(self, ranks: Ranks, release: Callable[[], object], cell: Cell, limits: Limits) -> None:
        """`release` has what waits in a collective fail."""
        self.cell = cell
        self.events: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self.replies: Requests = {}
        self.reports: dict[int, CellReport | None] = {}
        self.name = uuid.uuid4().hex
        """The same on all its ranks."""
        self._state = CellState([], limits, time.monotonic())
        self._ranks = ranks
        self._release = release
        assert cell.output is not None
        self.output = self._show = cell.output
        self._watch = Watch(ranks, limits.stall_timeout)
        self._after_caught = Watch(ranks, max(limits.failure_grace, STILL_SECONDS))
        self._ending: Ending | None = None
        """From the stop on."""
        self.after: Callable[[Sequence[int]], object] = lambda stuck: None
        """Done when the cell has ended, and before its ranks are free; some may be `stuck` in it."""
        self._places: dict[int, StackLocation | None] = {}
        """Where the ranks were when their time was over."""
        self._messages: deque[tuple[int, Message]] = deque()
        """Have come, and are not shown yet."""
        self._drawn = 0.0
        """When the page was last brought up to date, on ``time.monotonic``."""
        self._undrawn = False
        """Has something come since? The page is then about to be drawn, and more messages need not wake this thread."""
        stop = f"%dipstop {cell.number}" if cell.background else stop_name()
        self._notices = Notices(stop)
        self._lock = threading.Lock()
        self._is_late = False
        """Has the cell ended, and been shown? What comes now is shown by a thread of its own."""
        self._in_tabs: Collection[int] = ()

    # -- beginning and end

    def send(self, asked: Asked) -> None:
        """Send it to its ranks, which are told what is `asked` besides; their messages, and their two ends, will arrive
        in `events`."""
        ranks = list(self.cell.ranks)
        self._state.ranks = ranks
        for rank in self._show.show_ranks.difference(ranks):
            self._do(ShowEnded(rank, False))
        told: Asked = {"number": self.cell.number, "name": self.name, "ranks": ranks, "rich": self._show.rich}
        to = [self._recipient(rank) for rank in ranks]
        requests = self._ranks.cluster.execute(self.cell.code, to, {**told, **asked})
        self.replies = dict(zip(ranks, requests, strict=True))
        for rank, request in self.replies.items():
            request.add_done_callback(self._tells(ReplyArrived(rank)))
            request.output.add_done_callback(self._tells(OutputEnded(rank)))

    def _tells(self, event: Arrived) -> Callable[[object], None]:
        return lambda _: self.events.put(event)

    def press_stop(self) -> None:
        """The stop button; from any thread, or a signal's handler."""
        self.events.put(StopPressed())

    def end_with_group(self, why: str) -> None:
        """The group ends: nobody waits for it any more; from any thread."""
        self.events.put(GroupEnded(why))

    @property
    def unfinished(self) -> list[int]:
        """Ranks that have not answered."""
        return unfinished(self.replies)

    @property
    def ending(self) -> str:
        """Return how the cell has ended: ``good``, ``failed``, ``stopped``, or ``timed out``."""
        return self._state.ending()

    def _recipient(self, rank: int) -> Recipient:
        def on_message(message: Message) -> None:
            with self._lock:  # nothing is shown while it is held: all ranks' messages and replies come on this thread
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
        """Show what is left; what comes from here on comes late. `over`: its controller, or group, has ended."""
        try:
            self._finish("rank_died" if over else self._outcome())
        finally:
            with self._lock:
                self._is_late = True
                for rank, message in self._messages:
                    self._show.show_late(rank, message)
                self._messages.clear()

    def _finish(self, outcome: Outcome) -> None:
        if not self.unfinished:
            self._notices.take_back()
        self._show_messages()
        reports = [(rank, report) for rank, report in sorted(self.reports.items()) if report is not None]
        seconds = {rank: report["seconds"] for rank, report in reports if "seconds" in report}  # else it never began
        tell_it = bool(seconds) and max(seconds.values()) >= self._show.display.report_after
        self.cell.summary = where_text(seconds)
        self.cell.seconds_by_rank, self.cell.errors = seconds, self.errors
        note = self.cell.summary if tell_it else ""
        self._in_tabs = self._show.finish(self.errors, note, lambda: beside(self.cell, self._show.rich, outcome))

    def _outcome(self) -> Outcome:
        """How it has ended, as far as that is known before it has been shown."""
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
        """What the user is shown of a cell that has ended; None if it went well."""
        error = self._error()
        if error is not None:
            error.in_tabs = self._in_tabs
        return error

    @property
    def errors(self) -> dict[int, RankError]:
        """What the user is told, by rank."""
        return self._state.news()

    def _error(self) -> CellError | CellInterrupted | None:
        stuck, errors = self.unfinished, self.errors
        match self._state.ending():
            case "timed out":
                what = f"the cell took longer than {self._state.limits.timeout:g} s and was stopped"
                return CellTimeout(self._with_places(what, stuck), errors)
            case "stopped":
                what = f"the cell was interrupted on {ranks_text(sorted(errors) or stuck or list(self.replies))}"
                return CellInterrupted(self._with_places(what, stuck) if stuck else what, errors)
            case "failed":
                error = CellError(errors, self._ranks.repair_text)
                if stuck:  # where ranks cannot be unblocked
                    error.args = (self._with_places(str(error), stuck),)
                return error
            case "good" if self._is_stop_waiting():
                return CellInterrupted("the cell had ended when it was interrupted", {})
        return None

    def _is_stop_waiting(self) -> bool:
        """Has the stop button been pressed when nobody looked any more?"""
        while not self.events.empty():
            if isinstance(self.events.get(), StopPressed):
                return True
        return False

    def _with_places(self, what: str, stuck: Sequence[int]) -> str:
        lines = [what]
        if self._places:
            lines[0] += "; the ranks were here:"
            lines.append(places_text(self._places))
        if stuck:
            lines.append(f"{ranks_text(stuck)} did not stop:")
            lines.append(places_text(self._ranks.places(stuck)))
            lines.append(way_out(stuck))
        return "\n".join(lines)

    @property
    def end_text(self) -> str:
        """How it has ended, in a line."""
        text = f"{self.cell.text} {self.cell.outcome_text}"
        return f"{text} · {self.cell.summary}" if self.cell.summary else text

    # -- while it runs

    def wait_for(self, others: Sequence[Cell]) -> bool:
        """Before it begins: wait until `others` have ended; returns False if it is stopped, or its group ends."""
        for other in others:
            other.done.add_done_callback(self._tells(OtherCellEnded()))
        while not all(other.done.done() for other in others):
            if not isinstance(self.events.get(), OtherCellEnded):
                return False
        return True

    def follow(self) -> None:
        """Show messages until every rank has answered and fallen silent, or has been given up."""
        while not self._state.is_over:
            if time.monotonic() > self._drawn + (DRAW_SECONDS if self._messages else PAUSE_SECONDS):
                self._draw()
            self._step(self._next_event())

    def _draw(self) -> None:
        with self._lock:
            self._undrawn = bool(self._messages)
        self._show.draw()
        self._drawn = time.monotonic()

    def _show_messages(self) -> None:
        """Those that are there: what comes meanwhile, without an end perhaps, must not hold up a stop."""
        for _ in range(len(self._messages)):
            self._show.receive(*self._messages.popleft())
            self._watch.moved()

    def _next_event(self) -> Event:
        """What happens next; the messages until then are shown."""
        pause = max(0.0, self._drawn + PAUSE_SECONDS - time.monotonic())
        try:
            arrived = self.events.get(timeout=pause if self._undrawn else self._state.interval)
        except queue.Empty:
            self._show_messages()
            return TimePassed()
        self._watch.moved()
        self._show_messages()
        match arrived:
            case ReplyArrived(rank):
                return self._take_reply(rank)
            case OutputEnded() | StopPressed():
                return arrived
            case GroupEnded(why):
                raise GroupError(why)
        return TimePassed()

    def _take_reply(self, rank: int) -> Replied:
        reply = self.replies[rank].result()
        report = self.reports[rank] = reply.report
        caught = caught_in(report)
        if caught is not None:
            self._after_caught.moved()
        return Replied(rank, self._ranks.error_of(rank, reply), caught)

    def _step(self, event: Event) -> None:
        """Do what `event` asks for, and what comes of that."""
        for action in self._state.step(event, time.monotonic()):
            answer = self._do(action)
            if answer is not None:
                self._step(answer)
                if self._state.is_abandoned:  # by what was answered: the rest is not wanted any more
                    return

    def _do(self, action: Action) -> Event | None:
        """Returns the answer to a question."""
        running = self._state.running
        match action:
            case ShowEnded(rank, failed):
                self.cell.replied[rank] = failed
                self.cell.errors = self.errors
                self._show.ended(rank, failed)
            case Do.INTERRUPT:
                self._ranks.interrupt({rank: self.replies[rank].msg_id for rank in running})
                self._ending = self._ending or Ending(self._ranks, running)
            case Do.RELEASE:
                self._release()
            case Do.KEEP_PLACES:
                self._places = self._ranks.places(running)
            case Do.LOOK:
                self._ranks.cluster.ensure_controller()
                self._ranks.watch_memory(running)
            case Do.TELL_WHO_RUNS:
                self._notices.run_on(running, CellError(self.errors), self._ranks.places(running))
            case Do.TELL_WHO_WAITS:
                finished: dict[int, StackLocation | None] = dict.fromkeys(self.replies, StackLocation(state="finished"))
                where = {**finished, **self._ranks.places(running)}
                self._notices.nobody_moves(self._state.limits.stall_timeout, where, self._ranks.cluster.stopped())
            case Ask.WHO_MOVES:
                assert self._ending is not None
                return Moving(self._ending.moving(running))
            case Ask.WHO_CANNOT_STOP:
                cannot = self._ranks.without_a_stop(running)
                return CannotStop(cannot) if cannot else None
            case Ask.STALL if self._watch.stands_still(running, time.monotonic()):
                return StandStill()
            case Ask.STALL_AFTER_CAUGHT if self._after_caught.stands_still(running, time.monotonic()):
                return StandStill(after_caught=True)
        return None


def unfinished(replies: Requests) -> list[int]:
    """Ranks that have not answered."""
    return [rank for rank, future in replies.items() if not future.done()]
