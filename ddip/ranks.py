"""Ask ranks to do something: calls of functions in ``ddip.rank``, on a rank's main thread or beside a running cell."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ipyparallel.error import EngineError, RemoteError, TaskAborted

from ddip import ipp_private
from ddip.cluster import Cluster
from ddip.errors import CellError, GroupError, RankError, exit_text, ranks_text
from ddip.placement import Berth
from ddip.rank import call

log = logging.getLogger("ddip")

WORDS = {
    "process_group.join": "forming the group",
    "process_group.leave": "leaving the group",
    "housekeeping.set_collect": "setting the collection",
    "transfer.stage": "pushing",
    "transfer.commit": "pushing",
    "transfer.drop": "pushing",
    "transfer.pack": "pulling",
    "apps.prepare": "preparing the app",
    "apps.release": "releasing the app",
    "apps.command": "the app's command",
}
"""What is asked of a rank, for people."""
GRACE_SECONDS = 1.0
"""How long the others may take to answer when one rank has failed."""


@dataclass(frozen=True)
class Member:
    """One rank: the engine it lives in, and what that engine was started for."""

    engine: int
    pid: int
    host: str
    berth: Berth


class Ranks:
    """The members of a group, in rank order, on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.members: list[Member] = []

    @property
    def ended(self) -> list[int]:
        """The ranks whose process is gone."""
        return [rank for rank, member in enumerate(self.members) if member.engine in self.cluster.exits]

    def ended_text(self, ranks: Sequence[int]) -> str:
        """``rank 1 ended (SIGKILL)``."""
        codes = [self.cluster.exits.get(self.members[rank].engine) for rank in ranks]
        return f"{ranks_text(ranks)} ended ({', '.join(exit_text(code) for code in codes)})"

    def ask(self, ranks: Sequence[int], target: str, *args: Any) -> list[Any]:
        """Call ``ddip.rank.<target>(*args)`` on the main thread of each of `ranks`; returns the results in order."""
        return self.ask_each(dict.fromkeys(ranks, args), target)

    def ask_each(
        self, arguments: Mapping[int, tuple[Any, ...]], target: str, deadline: float | None = None
    ) -> list[Any]:
        """The same with arguments by rank, until `deadline` on ``time.monotonic``; raises GroupError."""
        client = self.cluster.client
        answers = {
            rank: client.direct_view(self.members[rank].engine).apply_async(call, target, *args)
            for rank, args in arguments.items()
        }
        self._await(answers, deadline)
        problems: dict[int, RankError] = {}
        for rank, answer in answers.items():
            reply = answer.get(return_exceptions=True) if answer.done() else {}
            problem = self.error_of(rank, reply)
            if problem is None and "error" in reply:
                problem = RankError(reply["error"], reply["message"], reply["traceback"])
            if problem is not None:
                problems[rank] = problem
        if problems:
            log.debug("%s", "\n".join(problem.traceback for problem in problems.values()))
            raise GroupError(f"{WORDS[target]} failed: {CellError(problems)}")
        late = [rank for rank, answer in answers.items() if not answer.done()]
        if late:
            raise GroupError(f"{ranks_text(late)} did not finish {WORDS[target]} in time; -t SECONDS waits longer")
        return [answer.get()["ok"] for answer in answers.values()]

    def _await(self, answers: Mapping[int, Any], deadline: float | None) -> None:
        """Wait until all `answers` are there; not for those that wait in vain, since another rank failed or ended."""
        failed_at: float | None = None
        pending = list(answers.values())
        while pending:
            now = time.monotonic()
            if (deadline is not None and now > deadline) or (failed_at is not None and now > failed_at + GRACE_SECONDS):
                return
            pending[0].wait(0.05)
            pending = [answer for answer in answers.values() if not answer.done()]
            done = [answer.get(return_exceptions=True) for answer in answers.values() if answer.done()]
            if failed_at is None and any(isinstance(reply, BaseException) or "error" in reply for reply in done):
                failed_at = now

    def ask_beside(self, engines: Sequence[int], target: str, deadline: float) -> list[Any]:
        """Call ``ddip.rank.<target>()`` on the control threads of `engines`, which answer while a cell runs.

        Returns None for an engine that has not answered at `deadline` on ``time.monotonic``.
        """
        client = self.cluster.client
        request = {"target": target, "args": []}
        futures = [ipp_private.control(client, engine, "ddip_request", request) for engine in engines]
        concurrent.futures.wait(futures, timeout=max(0.0, deadline - time.monotonic()))
        return [future.result()["content"].get("ok") if future.done() else None for future in futures]

    def interrupt(self, ranks: Sequence[int], cells: Sequence[str] = ()) -> None:
        """Send SIGINT to `ranks`; one that has not yet begun with one of `cells` (message ids) will not begin it."""
        engines = [self.members[rank].engine for rank in ranks if rank not in self.ended]
        if engines:
            client = self.cluster.client
            if cells:  # an idle engine ignores the signal, and would then run for ever what is still on its way
                client.abort(list(cells), engines, block=False)
            client.send_signal("SIGINT", engines, block=False)

    def error_of(self, rank: int, reply: Any) -> RankError | None:
        """What `rank` raised, out of ipyparallel's reply to a request; None if it raised nothing."""
        if not isinstance(reply, BaseException):
            return None
        if isinstance(reply, TaskAborted):
            return RankError(KeyboardInterrupt.__name__, "before the cell began", "")
        if not isinstance(reply, RemoteError):
            return RankError(type(reply).__name__, str(reply), "")
        if reply.ename == EngineError.__name__:
            return RankError("RankEnded", f"{self.ended_text([rank])}; %makedip -r starts the group afresh", "")
        return RankError(reply.ename, reply.evalue, reply.traceback)
