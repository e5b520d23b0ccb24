"""Make calls on the main threads of ranks, where their cells run."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ddip.cluster.cluster_api import Cluster, Reply, Request
from ddip.cluster.processes import on_host
from ddip.errors import RANK_ENDED, CellError, RankError, RequestFailed, RequestInterrupted, ranks_text
from ddip.group import stopping
from ddip.group.members.members import Members
from ddip.group.members.watch import StopProgress
from ddip.output.area import notify, stop_name
from ddip.output.tables.tables import places_text, size_text
from ddip.protocol.on_rank import R, RemoteCall

log = logging.getLogger("ddip")

GRACE_SECONDS = 1.0
"""Time that the other ranks may take to answer after one has failed."""
REQUEST_GRACE_SECONDS = 0.4
"""Time that ranks may take to end by an interrupt alone, before waiting collectives are aborted."""
ASK_SECONDS = 30.0
"""Time that ranks may take for a request that runs only ddip's code; their snapshots stop after 20 s."""
STOP_SECONDS = 0.8
"""Time that ranks may take to end after collectives were aborted; a rank that takes longer is abandoned."""
BEHIND_SECONDS = 0.5
"""Time within which the agent of a host answers, unless the link to it is behind."""
LINK_SECONDS = 60.0
"""Most time to wait for slow links."""
Requests: TypeAlias = Mapping[int, Request]


@dataclass(frozen=True)
class AbandonedRequest:
    """A request that a rank did not end when it was interrupted."""

    request: Request
    doing: str
    """Description for messages."""
    size: int = 0
    """Bytes that the request and its answer carry, as far as is known."""


class Ranks(Members):
    """The members of a group, with calls on their main threads."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.abandoned: dict[int, AbandonedRequest] = {}
        """The abandoned requests by rank, some of which may still be running."""
        self._late: dict[int, Request] = {}
        """Requests of `try_call` that timed out, by rank."""

    def ask(
        self,
        ranks: Sequence[int],
        call: RemoteCall[R],
        *,
        release: Callable[[], object] | None = None,
        size: int = 0,
    ) -> list[R]:
        """Make `call` on the main thread of each of `ranks`, and return the results in order.

        Waits; see `ask_each`.
        """
        return self.ask_each(dict.fromkeys(ranks, call), release=release, size=size)

    def ask_soon(self, calls: Mapping[int, RemoteCall[R]], *, release: Callable[[], object] | None = None) -> list[R]:
        """Make calls as `ask_each` does, within ASK_SECONDS, so that no endless finalizer hangs the notebook.

        Raises RequestFailed, for example if a rank takes longer.
        """
        try:
            return self.ask_each(calls, time.monotonic() + ASK_SECONDS, release=release)
        except RequestFailed as error:
            if error.by_rank or not error.late:
                raise
            doing = next(call.label for call in calls.values())
            problem = f"{ranks_text(error.late)} did not finish {doing} within {ASK_SECONDS:g} s"
            raise RequestFailed(problem, {}, error.late) from None

    def ask_each(
        self,
        calls: Mapping[int, RemoteCall[R]],
        deadline: float | None = None,
        *,
        release: Callable[[], object] | None = None,
        together: bool = True,
        size: int = 0,
    ) -> list[R]:
        """Make one call per rank on the main threads, all of one function; return the results in order.

        Waits for all ranks. The stop button, the `deadline` (on ``time.monotonic``), or a failed rank that others wait
        for ends the requests early: ranks are interrupted, and `release` aborts the collectives of those that wait in
        one. Ranks that do not stop are in `abandoned` from then on. If they do not act `together`, a rank that fails
        ends nothing for the others. `size`: bytes that calls and answers carry, if that is many, for messages about
        slow links.

        Raises RequestFailed if a rank failed, has ended or was late, RequestInterrupted, or GroupError if the
        controller ends.
        """
        doing = next((call.label for call in calls.values()), "")
        with stopping.note_presses() as button:
            if button.pressed:  # pressed earlier, and not handled yet
                button.take()
                raise RequestInterrupted(f"{doing} was interrupted before it began")
            self._ensure_none_ended(calls, doing)
            requests = {rank: self._send(rank, call) for rank, call in calls.items()}
            button.watch(requests.values())
            self._wait_for_all(requests, deadline, button, GRACE_SECONDS if together else None)
            unfinished = unfinished_ranks(requests)  # read before the problems, as a rank may answer in between
            problems = self._errors_of(requests)
            if unfinished:
                self._stop_requests(requests, unfinished, doing, button, release, size)
        if problems or unfinished:
            raise self._make_failure(doing, problems, unfinished, together)
        # popped, since a future is a reference cycle and would keep the result until the garbage collector runs
        return [request.result().value.pop("ok") for request in requests.values()]

    def _make_failure(
        self, doing: str, problems: Mapping[int, RankError], unfinished: list[int], together: bool
    ) -> RequestFailed:
        """Return the error to raise if some ranks have `problems` with `doing`, or if some are `unfinished`.

        Its ``late`` names the `unfinished` ranks. If the ranks act `together` and one has a problem, it names none: the
        others waited for that one. If one has ended, the text names only ranks that have: the others lost a connection.
        """
        if not problems:
            problem = f"{ranks_text(unfinished)} did not finish {doing} in time"
            return RequestFailed(f"{problem}; -t SECONDS waits longer", {}, unfinished)
        log.debug("%s", "\n".join(problem.traceback for problem in problems.values()))
        ended = {rank: problem for rank, problem in problems.items() if together and problem.name == RANK_ENDED}
        text = f"{doing} failed: {CellError(ended or problems, self.repair_text)}"
        return RequestFailed(text, problems, [] if together else unfinished)

    def _ensure_none_ended(self, ranks: Collection[int], doing: str) -> None:
        """Raise RequestFailed before sending anything if a rank has ended, as the others would wait for it."""
        ended = {rank: self.describe_end(rank) for rank in self.ended if rank in ranks}
        if ended:
            raise RequestFailed(f"{doing} failed: {CellError(ended, self.repair_text)}", ended)

    def tell(self, ranks: Sequence[int], call: RemoteCall[object]) -> None:
        """Make `call` on each of `ranks` that is running, once it is free; return at once.

        Its outcome is ignored.
        """
        for rank in self.live:
            if rank in ranks:
                self._send(rank, call)

    def _send(self, rank: int, call: RemoteCall[object]) -> Request:
        return self.cluster.call(self.members[rank].engine, call)

    def _wait_for_all(
        self, requests: Requests, deadline: float | None, button: stopping.Button, grace: float | None
    ) -> None:
        """Wait until all `requests` are done, the `deadline` has passed, or `button` is pressed.

        Once a rank has failed, wait only `grace` seconds more; None: no limit. Raises GroupError if the controller
        ends.
        """
        failed_at: float | None = None
        while unfinished_ranks(requests) and not button.pressed:
            now = time.monotonic()
            if failed_at is None and self._errors_of(requests):
                failed_at = now
            ends = [deadline] if deadline is not None else []
            ends += [failed_at + grace] if failed_at is not None and grace is not None else []
            if any(now >= end for end in ends):
                return
            self.cluster.ensure_controller()
            button.sleep(min([stopping.LOOK_SECONDS, *(end - now for end in ends)]))

    def _stop_requests(
        self,
        requests: Requests,
        unfinished: Sequence[int],
        doing: str,
        button: stopping.Button,
        release: Callable[[], object] | None,
        size: int,
    ) -> None:
        """Interrupt `requests` and wait for them briefly; abandon those that do not end.

        `unfinished` are the ranks that the error names; `doing`, `size`: description of the requests, and bytes that
        they carry. `release` is called if requests still run after a first wait. Raises RequestInterrupted if the stop
        button was pressed.
        """
        pressed = button.pressed
        self._interrupt_again(requests, button)
        self._wait_after_stop(requests, button, REQUEST_GRACE_SECONDS)
        if release is not None and unfinished_ranks(requests):
            release()
        self._wait_after_stop(requests, button, STOP_SECONDS)
        slow_hosts = self.wait_for_links(requests, button, size)
        if not pressed:  # no user is waiting for a stop, so a loaded machine gets the time that it needs
            self._wait_while_moving(requests, button)
        stuck = unfinished_ranks(requests)
        self.abandoned.update({rank: AbandonedRequest(requests[rank], doing, size) for rank in stuck})
        if pressed:
            button.take()
            if stuck and slow_hosts:
                rest = f"{_rest_text(size)} for {', '.join(slow_hosts)}; the next cell waits for it"
                raise RequestInterrupted(
                    f"{doing} was interrupted on {ranks_text(unfinished)}; a slow link still carries {rest}"
                )
            interrupted = RequestInterrupted(self._interrupted_text(doing, unfinished, stuck))
            interrupted.has_succeeded = not stuck and not self._errors_of(requests)
            raise interrupted

    def _wait_after_stop(self, requests: Requests, button: stopping.Button, seconds: float) -> None:
        """Wait until all `requests` are done, at most `seconds`; a press of the stop button interrupts again."""
        end = time.monotonic() + seconds
        while unfinished_ranks(requests) and time.monotonic() < end:
            concurrent.futures.wait([r for r in requests.values() if not r.done()], timeout=0.05)
            if button.pressed:
                self._interrupt_again(requests, button)

    def wait_for_links(self, requests: Requests, button: stopping.Button, size: int = 0) -> list[str]:
        """Wait for data that delays the interrupt of `requests`, or the answers, on links to other hosts.

        A link is behind as long as the host's agent, which shares it, does not answer at once. The user is told once.
        The wait ends with a press of `button`, after LINK_SECONDS, and once the agents have sent nothing for a while.
        `size`: bytes that the requests carry, for the message. Returns the names of the hosts whose links are still
        behind; none if the requests are done or no link was the reason.
        """
        end, notified = time.monotonic() + LINK_SECONDS, False
        while unfinished := unfinished_ranks(requests):
            hosts = {host.name: host for rank in unfinished if (host := self.host(rank)).name and not host.lost}
            answers = {name: host.begin(on_host.count_cores) for name, host in hosts.items()}
            button.wait_for(answers.values(), BEHIND_SECONDS)
            behind = [name for name, answer in answers.items() if not answer.done() and not hosts[name].silent]
            if not behind:
                self._wait_after_stop(requests, button, STOP_SECONDS if notified else 0)
                return []
            if not notified:
                notify(
                    f"waiting until the slow link to {', '.join(behind)} has carried {_rest_text(size)}; "
                    f"{stop_name()} ends the wait"
                )
                notified = True
            while not (button.pressed or any(answers[name].done() for name in behind)):
                button.wait_for([answers[name] for name in behind], stopping.LOOK_SECONDS)
                behind = [name for name in behind if not hosts[name].silent]
                if not behind or time.monotonic() > end:
                    return behind
            if button.pressed:
                return behind
        return []

    def _wait_while_moving(self, requests: Requests, button: stopping.Button) -> None:
        """Wait as long as ranks make progress towards the end of their `requests`."""
        if unfinished := unfinished_ranks(requests):
            ending = StopProgress(self, unfinished)
            while ending.find_moving(unfinished):
                self._wait_after_stop(requests, button, stopping.LOOK_SECONDS)
                unfinished = unfinished_ranks(requests)

    def _interrupt_again(self, requests: Requests, button: stopping.Button) -> None:
        button.take()
        self.interrupt({rank: requests[rank].msg_id for rank in unfinished_ranks(requests)})

    def _interrupted_text(self, doing: str, ranks: Sequence[int], stuck: Sequence[int]) -> str:
        lines = [f"{doing} was interrupted on {ranks_text(ranks)}"]
        if stuck:
            lines += [
                f"{ranks_text(stuck)} did not stop:",
                places_text(self.stack_locations(stuck)),
                self.advise_on_stuck(stuck),
            ]
        return "\n".join(lines)

    def _errors_of(self, requests: Requests) -> dict[int, RankError]:
        """Return the errors of the ranks that have answered."""
        problems = {}
        for rank, request in requests.items():
            reply = request.result() if request.done() else Reply()
            problem, answer = self.error_of(rank, reply), reply.value or {}
            if problem is None and "error" in answer:
                problem = RankError(answer["error"], answer["message"], answer["traceback"])
            if problem is not None:
                problems[rank] = problem
        return problems

    def try_call(self, rank: int, call: RemoteCall[R], seconds: float) -> R | None:
        """Make `call` on the main thread of `rank`; return None if it fails or takes more than `seconds`.

        A late call continues to run, until the next `try_call` or `end_late` interrupts it.
        """
        self.end_late()
        request = self._send(rank, call)
        concurrent.futures.wait([request], seconds)
        if not request.done():
            self._late[rank] = request
            return None
        return (request.result().value or {}).get("ok")  # type: ignore[no-any-return]

    def end_late(self) -> None:
        """Interrupt requests of `try_call` that timed out and still run, as the ranks are needed now.

        Does not wait.
        """
        if self._late:
            self.interrupt({rank: self._late[rank].msg_id for rank in unfinished_ranks(self._late)})
            self._late.clear()

    @property
    def busy(self) -> dict[int, str]:
        """The descriptions of abandoned requests that still run, by rank."""
        ended = self.ended
        self.abandoned = {
            r: entry for r, entry in self.abandoned.items() if not entry.request.done() and r not in ended
        }
        return {rank: entry.doing for rank, entry in sorted(self.abandoned.items())}


def _rest_text(size: int) -> str:
    return f"the rest (up to {size_text(size)})" if size else "what is under way"


def unfinished_ranks(requests: Requests) -> list[int]:
    """Return the ranks that have not answered."""
    return [rank for rank, request in requests.items() if not request.done()]
