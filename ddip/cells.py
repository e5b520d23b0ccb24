"""Run a cell on ranks, and show what they have to say until the last of them has finished."""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddip import ipp_private, outputs
from ddip.errors import CellError, CellInterrupted, GroupError, ranks_text
from ddip.ranks import Ranks

PATIENCE_SECONDS = 2.0
"""How long an interrupted cell may take to end before the user is told what else can be done."""

Futures = Mapping[int, concurrent.futures.Future[Any]]


class Cells:
    """The cells of a group, one after the other."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._given_up: Futures = {}

    def require_idle(self) -> None:
        """Raise GroupError if a cell that the user gave up still runs: the next one would wait for it unseen."""
        busy = _unfinished(self._given_up)
        if busy:
            who = "still runs" if len(busy) == 1 else "still run"
            what = f"{ranks_text(busy)} {who} the cell that you gave up"
            raise GroupError(f"{what}; %makedip -i shows them, %makedip -r starts afresh")

    def run(self, code: str, ranks: Sequence[int], show: outputs.CellOutput) -> None:
        """Run `code` on `ranks` to its end; raises CellError or CellInterrupted."""
        events: queue.SimpleQueue[tuple[int, outputs.Message] | None] = queue.SimpleQueue()
        replies = {rank: self._send(rank, code, events) for rank in ranks}
        interrupted = self._follow(replies, events, show)
        show.finish()
        errors = {rank: self._ranks.error_of(rank, future.result()) for rank, future in replies.items()}
        failed = {rank: error for rank, error in errors.items() if error is not None}
        if interrupted:
            raise CellInterrupted(f"the cell was interrupted on {ranks_text(list(failed) or list(replies))}")
        if failed:
            raise CellError(failed)

    def _send(
        self, rank: int, code: str, events: queue.SimpleQueue[tuple[int, outputs.Message] | None]
    ) -> concurrent.futures.Future[Any]:
        """Send a cell to `rank`: `events` gets its messages, and None whenever it is worth a look whether it ended."""

        def on_message(message: outputs.Message) -> None:
            events.put((rank, message))

        def on_end(_: concurrent.futures.Future[Any]) -> None:
            events.put(None)

        engine = self._ranks.members[rank].engine
        future = ipp_private.execute(self._ranks.cluster.client, engine, code, False, on_message)
        future.add_done_callback(on_end)
        future.output.add_done_callback(on_end)
        return future  # type: ignore[no-any-return]

    def _follow(
        self,
        replies: Futures,
        events: queue.SimpleQueue[tuple[int, outputs.Message] | None],
        show: outputs.CellOutput,
    ) -> bool:
        """Show messages until every rank has answered and fallen silent; returns whether the user interrupted."""
        interrupted_at: float | None = None
        told = False
        while _unfinished(replies) or not events.empty():
            try:
                if events.empty():
                    outputs.flush()
                event = events.get(timeout=0.5)
                if event is not None:
                    show.receive(*event)
            except queue.Empty:
                if interrupted_at is not None and not told and time.monotonic() > interrupted_at + PATIENCE_SECONDS:
                    told = True
                    waiting = ranks_text(_unfinished(replies))
                    outputs.tell(f"{waiting} did not stop yet; a second interrupt gives up waiting")
            except KeyboardInterrupt:
                waiting = ranks_text(_unfinished(replies))
                if interrupted_at is not None:
                    self._given_up = replies
                    raise CellInterrupted(
                        f"{waiting} did not stop; %makedip -i shows them, %makedip -r starts afresh"
                    ) from None
                interrupted_at = time.monotonic()
                self._ranks.interrupt(_unfinished(replies))
        return interrupted_at is not None


def _unfinished(replies: Futures) -> list[int]:
    """Ranks that have not answered, or whose last message has not arrived."""
    return [rank for rank, future in replies.items() if not (future.done() and future.output.done())]  # type: ignore[attr-defined]
