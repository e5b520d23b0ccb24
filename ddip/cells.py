"""Run a cell on ranks, and show what they have to say until the last of them has finished."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ddip import ipp_private, outputs
from ddip.errors import CellError, CellInterrupted, GroupError, RankError, ranks_text
from ddip.ranks import Ranks

PATIENCE_SECONDS = 2.0
"""How long ranks may run on after an interrupt, or after another's error, before the user is told who they are."""

LOOK_SECONDS = 0.5
"""How often the ranks are looked at while the cell runs."""
END, STOP = "end", "stop"
Futures: TypeAlias = Mapping[int, concurrent.futures.Future[Any]]
Events: TypeAlias = "queue.SimpleQueue[tuple[int, outputs.Message] | str]"
"""A rank's message; END for each rank's answer, and for its last message; STOP for the stop button."""


class Cells:
    """The cells of a group, one after the other."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._given_up: Futures = {}

    def require_idle(self) -> None:
        """Raise GroupError if a cell that the user gave up still runs: the next one would wait for it unseen."""
        busy = _unfinished(self._given_up)
        if busy:
            what = f"{_still_run(busy)} the cell that you gave up"
            raise GroupError(f"{what}; %makedip -i shows them, %makedip -r starts afresh")

    def run(self, code: str, ranks: Sequence[int], show: outputs.CellOutput) -> None:
        """Run `code` on `ranks` to its end; raises CellError, CellInterrupted, or GroupError if the controller ends."""
        events: Events = queue.SimpleQueue()
        with _stop_button(events):
            replies = {rank: self._send(rank, code, events) for rank in ranks}
            try:
                interrupted = self._follow(replies, events, show)
            finally:
                show.finish()
        failed = self._failed(replies)
        if interrupted:
            raise CellInterrupted(f"the cell was interrupted on {ranks_text(list(failed) or list(replies))}", failed)
        if failed:
            raise CellError(failed)

    def _send(self, rank: int, code: str, events: Events) -> concurrent.futures.Future[Any]:
        """Send a cell to `rank`, whose messages and two ends will arrive in `events`."""

        def on_message(message: outputs.Message) -> None:
            events.put((rank, message))

        def on_end(_: concurrent.futures.Future[Any]) -> None:
            events.put(END)

        engine = self._ranks.members[rank].engine
        future = ipp_private.execute(self._ranks.cluster.client, engine, code, False, on_message)
        future.add_done_callback(on_end)
        future.output.add_done_callback(on_end)
        return future  # type: ignore[no-any-return]

    def _failed(self, replies: Futures) -> dict[int, RankError]:
        """What the ranks that have finished raised, by rank."""
        errors = {rank: self._ranks.error_of(rank, f.result()) for rank, f in replies.items() if f.done()}
        return {rank: error for rank, error in errors.items() if error is not None}

    def _follow(self, replies: Futures, events: Events, show: outputs.CellOutput) -> bool:
        """Show messages until every rank has answered and fallen silent; returns whether the user interrupted."""
        open_ends = 2 * len(replies)
        interrupted = False
        unease = _Unease()
        while open_ends:
            if events.empty():
                outputs.flush()
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=LOOK_SECONDS)
                if event == END:
                    open_ends -= 1
                elif event == STOP and interrupted:
                    raise self._give_up(replies)
                elif event == STOP:
                    interrupted, unease = True, _Unease()
                    self._interrupt(replies)
                else:
                    show.receive(*event)  # type: ignore[misc]
            if unease.is_time_to_look():
                self._ranks.cluster.require_controller()
                unease.look(_unfinished(replies), self._failed(replies), interrupted)
        return interrupted

    def _give_up(self, replies: Futures) -> CellInterrupted:
        """What to raise when the user waits no longer."""
        self._given_up = replies
        self._interrupt(replies)
        waiting = ranks_text(_unfinished(replies))
        text = f"{waiting} did not stop; %makedip -i shows them, %makedip -r starts afresh"
        return CellInterrupted(text, self._failed(replies))

    def _interrupt(self, replies: Futures) -> None:
        ranks = _unfinished(replies)
        self._ranks.interrupt(ranks, [replies[rank].msg_id for rank in ranks])  # type: ignore[attr-defined]


@contextlib.contextmanager
def _stop_button(events: Events) -> Iterator[None]:
    """An interrupt becomes an event: a KeyboardInterrupt that comes between two steps would be lost, or tear one.

    A third interrupt is one again, for whoever waits in vain for what happens with the events.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = 0

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 2:
            raise KeyboardInterrupt
        events.put(STOP)

    handler = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _unfinished(replies: Futures) -> list[int]:
    """Ranks that have not answered."""
    return [rank for rank, future in replies.items() if not future.done()]


def _still_run(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} still run{'s' if len(ranks) == 1 else ''}"


class _Unease:
    """Tells the user once who still runs, when others have failed, or all should have stopped, for a while."""

    def __init__(self) -> None:
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._since: float | None = None
        self._told = False

    def is_time_to_look(self) -> bool:
        """From time to time, also while messages pour in."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return True

    def look(self, running: Sequence[int], failed: Mapping[int, RankError], interrupted: bool) -> None:
        """Say why nothing happens, if that has been so for long enough."""
        if self._told or not running or not (interrupted or failed):
            return
        self._since = self._since or time.monotonic()
        if time.monotonic() < self._since + PATIENCE_SECONDS:
            return
        self._told = True
        if interrupted:
            outputs.tell(f"{ranks_text(running)} did not stop yet; a second interrupt gives up waiting")
        else:
            what = f"{CellError(failed)}; {_still_run(running)}, perhaps waiting for it"
            outputs.tell(f"{what}; an interrupt asks them to stop")
