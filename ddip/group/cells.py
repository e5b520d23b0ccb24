"""Run a cell on ranks, and show what they have to say until the last of them has finished.

Every cell ends. When a rank has failed, the others get `Limits.failure_grace` seconds to end by themselves; then
whatever waits in a collective is released (``process_group.py``). The stop button, and ``--timeout``, interrupt all
ranks, release them, and do not wait for one that does not stop. ``cell_state.py`` decides that; here it is done.

    ranks  --messages, two ends each-->  queue  <--stop button
                                           |
                     _Cell: event  -->  CellState.step  -->  actions: interrupt, release, tell, ask
"""

from __future__ import annotations

import collections
import concurrent.futures
import queue
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from ddip.cluster.seam import Message, Request
from ddip.errors import CellError, CellInterrupted, CellTimeout, GroupError, RankError, ranks_text
from ddip.group import stopping
from ddip.group.cell_state import (
    LOOK_SECONDS,
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
from ddip.group.notices import Notices, tell_replaced
from ddip.group.process_group import ProcessGroupManager
from ddip.group.ranks import Ranks
from ddip.group.watch import Ending, Watch
from ddip.output import pages
from ddip.output.area import cell_number
from ddip.output.router import CellOutput
from ddip.output.tables import places_text, still_text, way_out, where_text
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import CellReport

STILL_SECONDS = 2.0
"""How long ranks must have stood still before they are released for an error that the cell itself has caught."""
ASLEEP_SECONDS = 6.0
"""How long the next cell waits for a rank that sleeps in what comes after the code of a former one: torch waits 5 s for
each worker of a data loader that the collector takes apart."""
DRAW_SECONDS = 0.1
"""How often what changes in place is looked at."""
LATE_CELLS = 20
"""Cells whose late output is still shown."""
Requests: TypeAlias = Mapping[int, Request]
Events: TypeAlias = "queue.SimpleQueue[tuple[str, int, Any]]"
"""What happened (a reply, the output's end, a message, a stop), to which rank, and with what."""


class Cells:
    """The cells of a group, one after the other."""

    def __init__(self, ranks: Ranks, manager: ProcessGroupManager) -> None:
        self._ranks = ranks
        self._manager = manager
        self._abandoned: Requests = {}
        self._count = 0
        self._listening: collections.deque[list[str]] = collections.deque()

    @property
    def stuck(self) -> list[int]:
        """Ranks that still run a cell that was given up, or do something else that was."""
        ended = self._ranks.ended
        cells = [rank for rank in _unfinished(self._abandoned) if rank not in ended]
        return sorted({*cells, *self._ranks.busy})

    def forget(self, ranks: Collection[int]) -> None:
        """These ranks have new processes."""
        self._abandoned = {rank: future for rank, future in self._abandoned.items() if rank not in ranks}
        for rank in ranks:
            self._ranks.abandoned.pop(rank, None)
            self._ranks.gpu_lost.pop(rank, None)

    def ensure_idle(self) -> None:
        """Raise GroupError if a cell that the user gave up still runs: the next one would wait for it unseen."""
        stuck = self.settle()
        if stuck:
            places = places_text(self._ranks.places(stuck))
            what = still_text(stuck, self._ranks.busy)
            raise GroupError(f"{what}:\n{places}\n{way_out(stuck)}")

    def settle(self) -> list[int]:
        """Stop the ranks that are `stuck` once more, and wait while they make progress; returns those that do not."""
        if self.stuck:
            if _unfinished(self._abandoned):
                self._manager.release()
            under_way: dict[int, Any] = {rank: given.request for rank, given in self._ranks.abandoned.items()}
            under_way |= {rank: self._abandoned[rank] for rank in _unfinished(self._abandoned)}
            self._ranks.interrupt({rank: under_way[rank].msg_id for rank in self.stuck})
            ending = Ending(self._ranks, self.stuck, asleep=ASLEEP_SECONDS)
            while True:
                concurrent.futures.wait([under_way[rank] for rank in self.stuck], timeout=LOOK_SECONDS)
                if not ending.moving(self.stuck):
                    break
        return self.stuck

    def run(self, code: str, ranks: Sequence[int], show: CellOutput, limits: Limits, unmatched: bool = False) -> None:
        """Run `code` on `ranks` to its end. `unmatched`: it may begin collectives on some ranks only.

        Raises CellError, CellTimeout, CellInterrupted, or GroupError if the controller ends.
        """
        self._count += 1
        cell = _Cell(self._ranks, self._manager, show, limits)
        for rank in show.show_ranks.difference(ranks):
            show.ended(rank, False)
        with stopping.calling(lambda: cell.events.put(("stop", -1, None))):
            try:
                cell.send(code, ranks, cell_number() or self._count)
                cell.follow()
            finally:
                self._abandoned = {rank: f for rank, f in cell.replies.items() if not f.done()}
                if self._abandoned:
                    self._manager.healthy = False
                cell.finish()
                self._listen_on(cell)
        error = cell.error()
        self._ranks.note_lost_gpus(cell.reports)
        if not self._abandoned:
            self._manager.update_health(cell.reports, bool(cell.errors), unmatched)
            if self._manager.healthy:  # else the ranks get their numbers anew
                tell_replaced(cell.reports)
        if error is not None:
            raise error
        for _, reply in sorted(cell.replies.items()):
            if pages.show(reply.result().payload):
                break  # the first rank's

    def _listen_on(self, cell: _Cell) -> None:
        """What comes late is shown for the last cells only."""
        self._listening.append([request.msg_id for request in cell.replies.values()])
        if len(self._listening) > LATE_CELLS:
            for msg_id in self._listening.popleft():
                self._ranks.cluster.stop_listening(msg_id)


class _Cell:
    """One cell under way: what happens goes to its `CellState`, and what that decides is done."""

    def __init__(self, ranks: Ranks, manager: ProcessGroupManager, show: CellOutput, limits: Limits) -> None:
        self.events: Events = queue.SimpleQueue()
        self.replies: Requests = {}
        self.reports: dict[int, CellReport | None] = {}
        self._state = CellState([], limits, time.monotonic())
        self._ranks = ranks
        self._manager = manager
        self._show = show
        self._watch = Watch(ranks, limits.stall_timeout)
        self._after_caught = Watch(ranks, max(limits.failure_grace, STILL_SECONDS))
        self._ending: Ending | None = None
        """From the stop on."""
        self._places: dict[int, StackLocation | None] = {}
        """Where the ranks were when their time was over."""
        self._next_draw = 0.0
        self._notices = Notices()
        self._lock = threading.Lock()
        self._shown = False
        self._in_tabs: Collection[int] = ()

    # -- beginning and end

    def send(self, code: str, ranks: Sequence[int], number: int) -> None:
        """Send it to `ranks` as cell `number`; their messages, and their two ends, will arrive in `events`."""
        self._state.ranks = list(ranks)
        name = uuid.uuid4().hex
        told = {"number": number, "name": name, "ranks": list(ranks), "rich": self._show.rich}
        self.replies = {rank: self._send(rank, code, told) for rank in ranks}

    def _send(self, rank: int, code: str, told: dict[str, Any]) -> Request:
        def on_message(message: Message) -> None:
            with self._lock:
                if not self._shown:
                    self.events.put(("message", rank, message))
                    return
            self._show.late(rank, message)

        engine = self._ranks.members[rank].engine
        asked = {**told, "limit": self._show.display.max_output_chars if rank in self._show.show_ranks else 0}
        request = self._ranks.cluster.execute(engine, code, on_message, asked)
        request.add_done_callback(lambda _: self.events.put(("reply", rank, None)))
        request.output.add_done_callback(lambda _: self.events.put(("output end", rank, None)))
        return request

    def finish(self) -> None:
        """Show what is left; what comes from here on comes late."""
        with self._lock:  # what comes now waits until all before it has been shown
            self._finish()

    def _finish(self) -> None:
        if not _unfinished(self.replies):
            self._notices.take_back()
        self._shown = True
        others = []
        while not self.events.empty():
            kind, rank, payload = event = self.events.get()
            if kind == "message":
                self._show.receive(rank, payload)
            else:
                others.append(event)
        for event in others:
            self.events.put(event)
        seconds = {rank: report["seconds"] for rank, report in sorted(self.reports.items()) if report is not None}
        tell_it = bool(seconds) and max(seconds.values()) >= self._show.display.report_after
        self._in_tabs = self._show.finish(self.errors, where_text(seconds) if tell_it else "")

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
        stuck, errors = _unfinished(self.replies), self.errors
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

    # -- while it runs

    def follow(self) -> None:
        """Show messages until every rank has answered and fallen silent, or has been given up."""
        while not self._state.is_over:
            if self.events.empty() or time.monotonic() > self._next_draw:
                self._show.draw()
                self._next_draw = time.monotonic() + DRAW_SECONDS
            self._step(self._next_event())

    def _next_event(self) -> Event:
        """What happens next; a message is shown."""
        try:
            kind, rank, payload = self.events.get(timeout=self._state.interval)
        except queue.Empty:
            return TimePassed()
        self._watch.moved()
        match kind:
            case "reply":
                return self._take_reply(rank)
            case "output end":
                return OutputEnded(rank)
            case "stop":
                return StopPressed()
        self._show.receive(rank, payload)
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
                self._show.ended(rank, failed)
            case Do.INTERRUPT:
                self._ranks.interrupt({rank: self.replies[rank].msg_id for rank in running})
                self._ending = self._ending or Ending(self._ranks, running)
            case Do.RELEASE:
                self._manager.release()
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


def _unfinished(replies: Requests) -> list[int]:
    """Ranks that have not answered."""
    return [rank for rank, future in replies.items() if not future.done()]
