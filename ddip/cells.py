"""Run a cell on ranks, and show what they have to say until the last of them has finished.

Every cell ends. When a rank has failed, the others get `Limits.grace` seconds to end by themselves; then whatever waits
in a collective is released (``formation.py``). The stop button, and ``--timeout``, interrupt all ranks, release them,
and do not wait for one that does not stop.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import queue
import signal
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from IPython.core.getipython import get_ipython
from IPython.core.page import page as page_text

from ddip import ipp_private
from ddip.errors import RANK_ENDED, CellError, CellInterrupted, CellTimeout, GroupError, RankError, ranks_text
from ddip.formation import Formation
from ddip.outputs import CellOutput, Message
from ddip.page import cell_number, tell
from ddip.rank.place import Place
from ddip.ranks import Ranks
from ddip.tables import places_text, where_text
from ddip.watch import Watch

PATIENCE_SECONDS = 2.0
"""How long ranks may run on after another's error, before the user is told who they are."""
STOP_GRACE_SECONDS = 0.5
"""How long ranks may take to end by the interrupt alone, before those that wait in a collective are released."""
STOP_SECONDS = 2.2
"""How long an interrupted cell may take; a rank that has not stopped by then is named and left alone."""
LOOK_SECONDS = 0.25
"""How often the ranks are looked at while the cell runs; more often while it is being ended."""
DRAW_SECONDS = 0.1
"""How often what changes in place is looked at."""
LATE_CELLS = 20
"""Cells whose late output is still shown."""
PAGES = ("page", "set_next_input")
"""What a cell may ask of the notebook, besides output."""
REPLY, OUTPUT_END, MESSAGE, STOP = "reply", "output end", "message", "stop"
Futures: TypeAlias = Mapping[int, concurrent.futures.Future[Any]]
Events: TypeAlias = "queue.SimpleQueue[tuple[str, int, Any]]"
"""What happened, to which rank, and with what."""


@dataclass(frozen=True)
class Limits:
    """How long a cell may do what; seconds."""

    grace: float = 1.0
    """From the first failure until the other ranks are released."""
    patience: float = 10.0
    """Without progress, until the user is told who waits where."""
    timeout: float | None = None
    """For the cell as a whole; None: for ever."""


class Cells:
    """The cells of a group, one after the other."""

    def __init__(self, ranks: Ranks, formation: Formation) -> None:
        self._ranks = ranks
        self._formation = formation
        self._given_up: Futures = {}
        self._count = 0
        self._listening: collections.deque[list[str]] = collections.deque()

    @property
    def stuck(self) -> list[int]:
        """Ranks that still run a cell that was given up."""
        ended = self._ranks.ended
        return [rank for rank in _unfinished(self._given_up) if rank not in ended]

    def forget(self, ranks: Collection[int]) -> None:
        """These ranks have new processes."""
        self._given_up = {rank: future for rank, future in self._given_up.items() if rank not in ranks}

    def require_idle(self) -> None:
        """Raise GroupError if a cell that the user gave up still runs: the next one would wait for it unseen."""
        if self.stuck:
            self._formation.release()
            concurrent.futures.wait(self._given_up.values(), timeout=1)
        stuck = self.stuck
        if stuck:
            places = places_text(self._ranks.places(stuck))
            what = f"{ranks_text(stuck)} still {_verb(stuck, 'run')} the cell that you gave up"
            raise GroupError(f"{what}:\n{places}\n{_way_out(stuck)}")

    def run(self, code: str, ranks: Sequence[int], show: CellOutput, limits: Limits) -> None:
        """Run `code` on `ranks` to its end.

        Raises CellError, CellTimeout, CellInterrupted, or GroupError if the controller ends.
        """
        self._count += 1
        cell = _Cell(self._ranks, self._formation, show, limits)
        with _stop_button(cell.events):
            try:
                cell.send(code, ranks, cell_number() or self._count)
                cell.follow()
            finally:
                self._given_up = {rank: f for rank, f in cell.replies.items() if not f.done()}
                if self._given_up:
                    self._formation.sound = False
                cell.finish()
                self._listen_on(cell)
        error = cell.error()
        if not self._given_up:
            self._formation.judge(cell.reports, bool(cell.errors))
        if error is not None:
            raise error
        _turn_pages(cell)

    def _listen_on(self, cell: _Cell) -> None:
        """What comes late is shown for the last cells only."""
        listeners = self._ranks.cluster.client.listeners
        self._listening.append([future.msg_id for future in cell.replies.values()])  # type: ignore[attr-defined]
        if len(self._listening) > LATE_CELLS:
            for message in self._listening.popleft():
                listeners.pop(message, None)


class _Cell:
    """One cell under way."""

    def __init__(self, ranks: Ranks, formation: Formation, show: CellOutput, limits: Limits) -> None:
        self.events: Events = queue.SimpleQueue()
        self.replies: Futures = {}
        self.errors: dict[int, RankError] = {}
        self.reports: dict[int, dict[str, Any] | None] = {}
        self._ranks = ranks
        self._formation = formation
        self._show = show
        self._limits = limits
        self._began = time.monotonic()
        self._next_look = self._began + LOOK_SECONDS
        self._watch = Watch(ranks, limits.patience)
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._released_at: float | None = None
        self._before_release: list[int] = []
        """Ranks that failed before anybody was released."""
        self._timed_out = False
        self._told_who_runs = self._told_who_waits = False
        self._places: dict[int, Place | None] = {}
        """Where the ranks were when their time was over."""
        self._next_draw = 0.0
        self._lock = threading.Lock()
        self._shown = False
        self._in_tabs: Collection[int] = ()

    # -- beginning and end

    def send(self, code: str, ranks: Sequence[int], number: int) -> None:
        """Send it to `ranks` as cell `number`; their messages, and their two ends, will arrive in `events`."""
        name = uuid.uuid4().hex
        told = {"number": number, "name": name, "ranks": list(ranks), "rich": self._show.rich}
        self.replies = {rank: self._send(rank, code, told) for rank in ranks}

    def _send(self, rank: int, code: str, told: dict[str, Any]) -> concurrent.futures.Future[Any]:
        def on_message(message: Message) -> None:
            with self._lock:
                if not self._shown:
                    self.events.put((MESSAGE, rank, message))
                    return
            self._show.late(rank, message)

        engine = self._ranks.members[rank].engine
        asked = {**told, "limit": self._show.look.limit if rank in self._show.see else 0}
        future = ipp_private.execute(self._ranks.cluster.client, engine, code, on_message, asked)
        future.add_done_callback(lambda _: self.events.put((REPLY, rank, None)))
        future.output.add_done_callback(lambda _: self.events.put((OUTPUT_END, rank, None)))
        return future  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Show what is left; what comes from here on comes late."""
        with self._lock:  # what comes now waits until all before it has been shown
            self._finish()

    def _finish(self) -> None:
        self._shown = True
        others = []
        while not self.events.empty():
            kind, rank, payload = event = self.events.get()
            if kind == MESSAGE:
                self._show.receive(rank, payload)
            else:
                others.append(event)
        for event in others:
            self.events.put(event)
        seconds = {rank: report["seconds"] for rank, report in sorted(self.reports.items()) if report is not None}
        tell_it = bool(seconds) and max(seconds.values()) >= self._show.look.tell_after
        self._in_tabs = self._show.finish(self.errors, where_text(seconds) if tell_it else "")

    def error(self) -> CellError | CellInterrupted | None:
        """What the user shall see of a cell that has ended; None if it went well."""
        error = self._error()
        if error is not None:
            error.in_tabs = self._in_tabs
        return error

    def _error(self) -> CellError | CellInterrupted | None:
        if not any(error.name == RANK_ENDED for error in self.errors.values()):
            for rank in self._before_release:  # nobody had cut its connections: that they broke is news
                self.errors[rank] = replace(self.errors[rank], waited="")
        stuck = _unfinished(self.replies)
        if self._timed_out:
            what = f"the cell took longer than {self._limits.timeout:g} s and was stopped"
            return CellTimeout(self._with_places(what, stuck), self.errors)
        if self._stopped_at is not None:
            what = f"the cell was interrupted on {ranks_text(sorted(self.errors) or list(self.replies))}"
            return CellInterrupted(self._with_places(what, stuck) if stuck else what, self.errors)
        if self.errors:
            return CellError(self.errors)
        if self._is_stop_waiting():
            return CellInterrupted("the cell had ended when it was interrupted", {})
        return None

    def _is_stop_waiting(self) -> bool:
        """Has the stop button been pressed when nobody looked any more?"""
        while not self.events.empty():
            if self.events.get()[0] == STOP:
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
            lines.append(_way_out(stuck))
        return "\n".join(lines)

    # -- while it runs

    def follow(self) -> None:
        """Show messages until every rank has answered and fallen silent, or has been given up."""
        open_ends = 2 * len(self.replies)
        ended: set[int] = set()
        while open_ends:
            if self.events.empty() or time.monotonic() > self._next_draw:
                self._show.draw()
                self._next_draw = time.monotonic() + DRAW_SECONDS
            ending = self._failed_at is not None or self._stopped_at is not None
            with contextlib.suppress(queue.Empty):
                kind, rank, payload = self.events.get(timeout=0.05 if ending else DRAW_SECONDS)
                self._watch.moved()
                if kind == MESSAGE:
                    self._show.receive(rank, payload)
                elif kind == STOP:
                    self._stop()
                else:
                    open_ends -= 1
                    if kind == REPLY:
                        self._take_reply(rank)
                    if rank in ended:
                        error = self.errors.get(rank)
                        self._show.ended(rank, error is not None and not error.waited)
                    ended.add(rank)
            if self._act_on_time(time.monotonic()):
                return

    def _take_reply(self, rank: int) -> None:
        reply = self.replies[rank].result()
        self.reports[rank] = ipp_private.report(reply)
        error = self._ranks.error_of(rank, reply)
        if error is not None:
            self.errors[rank] = error
            if self._released_at is None:
                self._before_release.append(rank)
            self._failed_at = self._failed_at or time.monotonic()

    def _stop(self) -> None:
        """The stop button: interrupt now; soon after, or when it is pressed again, release."""
        running = _unfinished(self.replies)
        self._ranks.interrupt({rank: self.replies[rank].msg_id for rank in running})  # type: ignore[attr-defined]
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        elif running:
            self._release()

    def _release(self) -> None:
        self._released_at = time.monotonic()
        self._formation.release()

    def _act_on_time(self, now: float) -> bool:
        """Do what the time asks for; True when nobody shall wait for the ranks any longer."""
        running = _unfinished(self.replies)
        if not running:  # only messages are missing
            return _is_over(self._stopped_at, STOP_SECONDS, now)
        timeout = self._limits.timeout
        if timeout is not None and now >= self._began + timeout and self._stopped_at is None:
            self._timed_out = True
            self._places = self._ranks.places(running)
            self._stop()
        if self._released_at is None and (
            _is_over(self._failed_at, self._limits.grace, now) or _is_over(self._stopped_at, STOP_GRACE_SECONDS, now)
        ):
            self._release()
        if _is_over(self._stopped_at, STOP_SECONDS, now):
            return True
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look(running, now)
        return False

    def _look(self, running: Sequence[int], now: float) -> None:
        self._ranks.cluster.require_controller()
        self._ranks.watch_memory(running)
        if self._stopped_at is not None:
            return
        if self._failed_at is not None:
            if not self._told_who_runs and _is_over(self._released_at, PATIENCE_SECONDS, now):
                self._told_who_runs = True
                places = places_text(self._ranks.places(running))
                what = f"{CellError(self.errors)}; {ranks_text(running)} still {_verb(running, 'run')}"
                tell(f"{what}, outside of collectives:\n{places}\n{STOP_HINT}")
        elif not self._told_who_waits and self._watch.stands_still(running, now):
            self._told_who_waits = True
            finished: dict[int, Place | None] = dict.fromkeys(self.replies, Place(state="finished"))
            where = {**finished, **self._ranks.places(running)}
            what = f"no rank has made progress for {self._limits.patience:g} s:\n{places_text(where)}"
            tell(f"{what}\nit goes on waiting; {STOP_HINT}, and so does %%dip --timeout SECONDS")


STOP_HINT = "the stop button ends the cell and keeps all variables"


def _way_out(stuck: Sequence[int]) -> str:
    those = "that rank" if len(stuck) == 1 else "those ranks"
    return (
        f"wait until {'it returns' if len(stuck) == 1 else 'they return'} from there, or type %makedip --repair: "
        f"it puts new processes in place of {those}, and the others keep their variables"
    )


@contextlib.contextmanager
def _stop_button(events: Events) -> Iterator[None]:
    """An interrupt becomes an event: a KeyboardInterrupt that comes between two steps would be lost, or tear one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda number, frame: events.put((STOP, -1, None)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _turn_pages(cell: _Cell) -> None:
    """Show what ``model?`` has asked of the ranks, as the notebook shows its own help."""
    shell = get_ipython()
    for _, reply in sorted(cell.replies.items()):
        pages = [page for page in ipp_private.payload(reply.result()) if page.get("source") in PAGES]
        if pages and shell is not None:
            for page in pages:
                if getattr(shell, "kernel", None) is not None:
                    shell.payload_manager.write_payload(page)  # type: ignore[union-attr]
                elif page["source"] == PAGES[0]:
                    page_text(page["data"])
            return


def _is_over(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now >= since + seconds


def _unfinished(replies: Futures) -> list[int]:
    """Ranks that have not answered."""
    return [rank for rank, future in replies.items() if not future.done()]


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
