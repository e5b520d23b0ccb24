"""Ask ranks to do something on their main threads, where their cells run."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ddip.cluster.cluster_api import Cluster, Reply, Request
from ddip.errors import CellError, RankError, RequestFailed, RequestInterrupted, ranks_text
from ddip.group import stopping
from ddip.group.members.members import Members
from ddip.group.members.watch import Ending
from ddip.output.tables.tables import places_text, way_out
from ddip.protocol.on_rank import R, RemoteCall

log = logging.getLogger("ddip")

GRACE_SECONDS = 1.0
"""How long the others may take to answer when one rank has failed."""
STOP_GRACE_SECONDS = 0.4
"""How long ranks may take to end by an interrupt alone, before those that wait in a collective are released."""
ASK_SECONDS = 30.0
"""How long ranks may take to answer what only ddip's own code should hold up; a walk is given up after 20 s."""
STOP_SECONDS = 0.8
"""How long they may take after that; a rank that has not stopped by then is named and left alone."""
Requests: TypeAlias = Mapping[int, Request]


@dataclass(frozen=True)
class Abandoned:
    """A request that a rank has not ended when it was told to."""

    request: Request
    doing: str
    """What it is, for people."""


class Ranks(Members):
    """The members of a group, and what they are asked."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.abandoned: dict[int, Abandoned] = {}
        """What ranks were asked to do, and may still do though nobody waits for it any more."""
        self._late: dict[int, Request] = {}
        """Questions to which the answer came too late."""

    def ask(
        self,
        ranks: Sequence[int],
        call: RemoteCall[R],
        *,
        release: Callable[[], object] | None = None,
        stoppable: bool = True,
    ) -> list[R]:
        """Make `call` on the main thread of each of `ranks`; returns the results in order."""
        return self.ask_each(dict.fromkeys(ranks, call), release=release, stoppable=stoppable)

    def ask_soon(self, calls: Mapping[int, RemoteCall[R]], *, release: Callable[[], object] | None = None) -> list[R]:
        """Do what `ask_each` does, within ASK_SECONDS: a finalizer that never ends must not hang the notebook."""
        try:
            return self.ask_each(calls, time.monotonic() + ASK_SECONDS, release=release)
        except RequestFailed as error:
            if error.by_rank or not error.late:
                raise
            doing = next(call.label for call in calls.values())
            what = f"{ranks_text(error.late)} did not finish {doing} within {ASK_SECONDS:g} s"
            raise RequestFailed(what, {}, error.late) from None

    def ask_each(
        self,
        calls: Mapping[int, RemoteCall[R]],
        deadline: float | None = None,
        *,
        release: Callable[[], object] | None = None,
        stoppable: bool = True,
        together: bool = True,
    ) -> list[R]:
        """The same with a call by rank, all of one function, until `deadline` on ``time.monotonic``.

        What ends it early (the stop button, the deadline, a rank that failed while others wait for it) ends it on the
        ranks, too: they are interrupted, and freed by `release` if they wait in a collective; those that do not stop
        are in `abandoned` from then on. What is not `stoppable` is left to end by itself. Of ranks that do not do it
        `together`, one that fails ends nothing for the others.

        Raises RequestFailed, RequestInterrupted, or GroupError if the controller ends.
        """
        doing = next((call.label for call in calls.values()), "")
        with stopping.button() as button:
            if button.pressed and stoppable:  # when nobody looked
                button.take()
                raise RequestInterrupted(f"{doing} was interrupted before it began")
            self._ensure_none_ended(calls, doing)
            requests = {rank: self._send(rank, call) for rank, call in calls.items()}
            button.watch(requests.values())
            self._await(requests, deadline, button, GRACE_SECONDS if together else None)
            unfinished = _unfinished(requests)  # before the problems: a rank may answer between the two
            problems = self._problems(requests)
            if unfinished and stoppable:
                self._stop(requests, unfinished, doing, button, release)
            elif unfinished:
                unfinished = self._let_end(requests, unfinished, doing, button)
                problems = self._problems(requests)
        if problems or unfinished:
            raise self._failure(doing, problems, unfinished, together)
        # taken out: a future is a cycle, and would keep what came with it until Python looks for cycles
        return [request.result().value.pop("ok") for request in requests.values()]

    def _failure(
        self, doing: str, problems: Mapping[int, RankError], unfinished: list[int], together: bool
    ) -> RequestFailed:
        """What to raise where some ranks have `problems`, or are `unfinished`."""
        if not problems:
            what = f"{ranks_text(unfinished)} did not finish {doing} in time"
            return RequestFailed(f"{what}; -t SECONDS waits longer", {}, unfinished)
        log.debug("%s", "\n".join(problem.traceback for problem in problems.values()))
        return RequestFailed(
            f"{doing} failed: {CellError(problems, self.repair_text)}", problems, [] if together else unfinished
        )

    def _ensure_none_ended(self, ranks: Collection[int], doing: str) -> None:
        """Before anything is sent: the others would wait for one that has ended."""
        ended = {rank: self.end_of(rank) for rank in self.ended if rank in ranks}
        if ended:
            raise RequestFailed(f"{doing} failed: {CellError(ended, self.repair_text)}", ended)

    def tell(self, ranks: Sequence[int], call: RemoteCall[object]) -> None:
        """Have each of `ranks` that lives do the same when it is free; nobody waits for it."""
        for rank in self.live:
            if rank in ranks:
                self._send(rank, call)

    def _send(self, rank: int, call: RemoteCall[object]) -> Request:
        return self.cluster.call(self.members[rank].engine, call)

    def _await(self, requests: Requests, deadline: float | None, button: stopping.Button, grace: float | None) -> None:
        """Wait until all `requests` are done; when a rank has failed, `grace` seconds for those that wait in vain."""
        failed_at: float | None = None
        while _unfinished(requests) and not button.pressed:
            now = time.monotonic()
            if failed_at is None and self._problems(requests):
                failed_at = now
            ends = [deadline] if deadline is not None else []
            ends += [failed_at + grace] if failed_at is not None and grace is not None else []
            if any(now >= end for end in ends):
                return
            self.cluster.ensure_controller()
            button.sleep(min([stopping.LOOK_SECONDS, *(end - now for end in ends)]))

    def _stop(
        self,
        requests: Requests,
        unfinished: Sequence[int],
        doing: str,
        button: stopping.Button,
        release: Callable[[], object] | None,
    ) -> None:
        """Have the `unfinished` ranks end what was asked of them, and wait for them, but not for long.

        Raises RequestInterrupted if the stop button was pressed.
        """
        pressed = button.pressed
        self._interrupt_again(requests, button)
        self._settle(requests, button, STOP_GRACE_SECONDS)
        if release is not None and _unfinished(requests):
            release()
        self._settle(requests, button, STOP_SECONDS)
        if not pressed:  # nobody waits for that button: a loaded machine gets the time that it needs
            self._settle_while_moving(requests, button)
        stuck = self._abandon(requests, doing)
        if pressed:
            button.take()
            raise RequestInterrupted(self._interrupted_text(doing, unfinished, stuck))

    def _let_end(self, requests: Requests, unfinished: Sequence[int], doing: str, button: stopping.Button) -> list[int]:
        """Wait a while for what must not be stopped; returns the ranks that are not done then.

        Raises RequestInterrupted if there are some, and the stop button was pressed; otherwise it stays pressed.
        """
        self._settle(requests, None, STOP_SECONDS)
        stuck = self._abandon(requests, doing)
        if stuck and button.pressed:
            button.take()
            raise RequestInterrupted(self._interrupted_text(doing, unfinished, stuck))
        return stuck

    def _abandon(self, requests: Requests, doing: str) -> list[int]:
        """Give up the `requests` that are not done; returns their ranks."""
        stuck = _unfinished(requests)
        self.abandoned.update({rank: Abandoned(requests[rank], doing) for rank in stuck})
        return stuck

    def _settle(self, requests: Requests, button: stopping.Button | None, seconds: float) -> None:
        """Wait until all `requests` are done, at most `seconds`; who presses again interrupts again."""
        end = time.monotonic() + seconds
        while _unfinished(requests) and time.monotonic() < end:
            concurrent.futures.wait([r for r in requests.values() if not r.done()], timeout=0.05)
            if button is not None and button.pressed:
                self._interrupt_again(requests, button)

    def _settle_while_moving(self, requests: Requests, button: stopping.Button) -> None:
        """Wait as long as ranks are on their way to the end of their `requests`."""
        if unfinished := _unfinished(requests):
            ending = Ending(self, unfinished)
            while ending.moving(unfinished):
                self._settle(requests, button, stopping.LOOK_SECONDS)
                unfinished = _unfinished(requests)

    def _interrupt_again(self, requests: Requests, button: stopping.Button) -> None:
        button.take()
        self.interrupt({rank: requests[rank].msg_id for rank in _unfinished(requests)})

    def _interrupted_text(self, doing: str, ranks: Sequence[int], stuck: Sequence[int]) -> str:
        lines = [f"{doing} was interrupted on {ranks_text(ranks)}"]
        if stuck:
            lines += [f"{ranks_text(stuck)} did not stop:", places_text(self.places(stuck)), way_out(stuck)]
        return "\n".join(lines)

    def _problems(self, requests: Requests) -> dict[int, RankError]:
        """What the ranks raised that have answered."""
        found = {}
        for rank, request in requests.items():
            reply = request.result() if request.done() else Reply()
            problem, told = self.error_of(rank, reply), reply.value or {}
            if problem is None and "error" in told:
                problem = RankError(told["error"], told["message"], told["traceback"])
            if problem is not None:
                found[rank] = problem
        return found

    def try_call(self, rank: int, call: RemoteCall[R], seconds: float) -> R | None:
        """Make `call` on the main thread of `rank`; None if that fails or takes longer."""
        self.end_late()
        request = self._send(rank, call)
        concurrent.futures.wait([request], seconds)
        if not request.done():
            self._late[rank] = request
            return None
        return (request.result().value or {}).get("ok")  # type: ignore[no-any-return]

    def end_late(self) -> None:
        """Interrupt what a rank was asked by `try_call` and still does: something else is wanted of it now."""
        if self._late:
            self.interrupt({rank: self._late[rank].msg_id for rank in _unfinished(self._late)})
            self._late.clear()

    @property
    def busy(self) -> dict[int, str]:
        """What ranks still do though it was given up, by rank."""
        ended = self.ended
        self.abandoned = {
            r: given for r, given in self.abandoned.items() if not given.request.done() and r not in ended
        }
        return {rank: given.doing for rank, given in sorted(self.abandoned.items())}


def _unfinished(requests: Requests) -> list[int]:
    """Ranks that have not answered."""
    return [rank for rank, request in requests.items() if not request.done()]
