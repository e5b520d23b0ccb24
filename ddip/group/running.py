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
from typing import Any, TypeAlias

from ddip.cluster.seam import Message, Recipient, Request
from ddip.errors import CellError, CellInterrupted, CellTimeout, GroupError, RankError, ranks_text
from ddip.group.cell import Cell, Outcome, outcome_of
from ddip.group.cell_state import (
    Action,
    Ask,
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
from ddip.group.cell_status import beside
from ddip.group.notices import Notices
from ddip.group.ranks import Ranks
from ddip.group.watch import Ending, Watch
from ddip.output.area import stop_name
from ddip.output.tables import places_text, way_out, where_text
from ddip.protocol.cell_messages import Asked
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import CellReport

STILL_SECONDS = 2.0
"""How long ranks must have stood still before they are released for an error that the cell itself has caught."""
DRAW_SECONDS, PAUSE_SECONDS = 0.1, 0.03
"""How often what changes in place is looked at, and how long what was shown waits for more: each is a message more."""
Requests: TypeAlias = Mapping[int, Request]
Events: TypeAlias = "queue.SimpleQueue[tuple[str, int, Any]]"
"""What happened (a reply, the output's end, messages, a stop, the group's end), to which rank, and with what."""


class RunningCell:
    """One cell under way: what happens goes to its `CellState`, and what that decides is done."""

    def __init__(self, ranks: Ranks, release: Callable[[], object], cell: Cell, limits: Limits) -> None:
        """`release` has what waits in a collective fail."""
        self.cell = cell
        self.events: Events = queue.SimpleQueue()
        self.replies: Requests = {}
        self.reports: dict[int, CellReport | None] = {}
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
        self._shown = False
        self._in_tabs: Collection[int] = ()

    # -- beginning and end

    def send(self, asked: Asked) -> None:
        """Send it to its ranks, which are told what is `asked` besides; their messages, and their two ends, will arrive
        in `events`."""
        ranks = list(self.cell.ranks)
        self._state.ranks = ranks
        for rank in self._show.show_ranks.difference(ranks):
            self._do(ShowEnded(rank, False))
        told: Asked = {"number": self.cell.number, "name": uuid.uuid4().hex, "ranks": ranks, "rich": self._show.rich}
        to = [self._recipient(rank) for rank in ranks]
        requests = self._ranks.cluster.execute(self.cell.code, to, {**told, **asked})
        self.replies = dict(zip(ranks, requests, strict=True))
        for rank, request in self.replies.items():
            request.add_done_callback(self._event("reply", rank))
            request.output.add_done_callback(self._event("output end", rank))

    def _event(self, what: str, rank: int) -> Callable[[object], None]:
        return lambda _: self.events.put((what, rank, None))

    def press_stop(self) -> None:
        """The stop button; from any thread, or a signal's handler."""
        self.events.put(("stop", -1, None))

    def end_with_group(self, why: str) -> None:
        """The group ends: nobody waits for it any more; from any thread."""
        self.events.put(("over", -1, why))

    @property
    def unfinished(self) -> list[int]:
        """Ranks that have not answered."""
        return unfinished(self.replies)

    def _recipient(self, rank: int) -> Recipient:
        def on_message(message: Message) -> None:
            with self._lock:
                if not self._shown:
                    self._messages.append((rank, message))
                    if not self._undrawn:
                        self._undrawn = True
                        self.events.put(("messages", -1, None))
                    return
            self._show.late(rank, message)

        limit = self._show.display.max_output_chars if rank in self._show.show_ranks else 0
        return Recipient(self._ranks.members[rank].engine, on_message, limit)

    def finish(self, over: bool = False) -> None:
        """Show what is left; what comes from here on comes late. `over`: its controller, or group, has ended."""
        with self._lock:  # what comes now waits until all before it has been shown
            self._finish("rank_died" if over else self._outcome())

    def _finish(self, outcome: Outcome) -> None:
        if not self.unfinished:
            self._notices.take_back()
        self._shown = True
        self._show_messages()
        seconds = {rank: report["seconds"] for rank, report in sorted(self.reports.items()) if report is not None}
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
                what = f"the cell was interrupted on {ranks_text(sorted(errors) or list(self.replies))}"
                return CellInterrupted(self._with_places(what, stuck) if stuck else what, errors)
            case "failed":
                return CellError(errors, self._ranks.repair_text)
            case "good" if self._is_stop_waiting():
                return CellInterrupted("the cell had ended when it was interrupted", {})
        return None

    def _is_stop_waiting(self) -> bool:
        """Has the stop button been pressed when nobody looked any more?"""
        while not self.events.empty():
            if self.events.get()[0] == "stop":
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
            other.done.add_done_callback(lambda _: self.events.put(("other", -1, None)))
        while not all(other.done.done() for other in others):
            kind, _, _ = self.events.get()
            if kind != "other":
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
            kind, rank, payload = self.events.get(timeout=pause if self._undrawn else self._state.interval)
        except queue.Empty:
            self._show_messages()
            return TimePassed()
        self._watch.moved()
        self._show_messages()
        match kind:
            case "reply":
                return self._take_reply(rank)
            case "output end":
                return OutputEnded(rank)
            case "stop":
                return StopPressed()
            case "over":
                raise GroupError(payload)
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
            case Ask.STALL if self._watch.stands_still(running, time.monotonic()):
                return StandStill()
            case Ask.STALL_AFTER_CAUGHT if self._after_caught.stands_still(running, time.monotonic()):
                return StandStill(after_caught=True)
        return None


def unfinished(replies: Requests) -> list[int]:
    """Ranks that have not answered."""
    return [rank for rank, future in replies.items() if not future.done()]
