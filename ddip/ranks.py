"""Ask ranks to do something: calls of functions in ``ddip.rank``, on a rank's main thread or beside a running cell."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from ipyparallel.error import EngineError, RemoteError, TaskAborted

from ddip import ipp_private
from ddip.cluster import Cluster
from ddip.deaths import HostMemory, cause_text, exit_text
from ddip.errors import RANK_ENDED, REPAIR, CellError, GroupError, RankError, ranks_text
from ddip.placement import Berth
from ddip.rank import call, dump
from ddip.rank.place import Place

log = logging.getLogger("ddip")

WORDS = {
    "process_group.join": "forming the group",
    "process_group.leave": "leaving the group",
    "transfer.stage": "pushing",
    "transfer.add": "pushing",
    "transfer.commit": "pushing",
    "transfer.drop": "pushing",
    "transfer.pack": "pulling",
    "transfer.part": "pulling",
    "apps.prepare": "preparing the app",
    "apps.release": "releasing the app",
    "apps.command": "the app's command",
}
"""What is asked of a rank, for people."""
ANSWER_SECONDS = 0.4
"""How long a rank may take to answer beside its cell; one that is in C code may not answer at all."""
SIGNAL_SECONDS = 0.3
"""How long a rank that does not answer may take to write down where it is."""
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
        self._memory = HostMemory.now()
        self._held: dict[int, int] = {}

    @property
    def ended(self) -> list[int]:
        """The ranks whose process is gone, or which the controller has given up."""
        there = set(self.cluster.client.ids) - self.cluster.exits.keys()
        return [rank for rank, member in enumerate(self.members) if member.engine not in there]

    @property
    def live(self) -> list[int]:
        """The others."""
        ended = self.ended
        return [rank for rank in range(len(self.members)) if rank not in ended]

    def watch_memory(self, ranks: Sequence[int]) -> None:
        """Remember how much memory `ranks` hold: when one of them has ended it is too late to ask."""
        for rank in ranks:
            member = self.members[rank]
            with contextlib.suppress(psutil.Error):
                self._held[member.engine] = psutil.Process(member.pid).memory_info().rss

    def end_of(self, rank: int) -> RankError:
        """What is known of the end of `rank`: its pid, how and why it ended, and the last lines of its log."""
        member = self.members[rank]
        if member.engine not in self.cluster.exits:
            text = f"pid {member.pid} has not answered for so long that the controller has given it up"
            return RankError(RANK_ENDED, text, "", at=time.time())
        code = self.cluster.exits[member.engine]
        why = cause_text(code, self._held.get(member.engine), self._memory, HostMemory.now())
        log = self.cluster.log_tail(member.engine)
        text = f"pid {member.pid} ended ({exit_text(code)}): {why}"
        return RankError(RANK_ENDED, text, "\n".join(["end of its log:", *log]) if log else "", at=time.time())

    def require_all(self) -> None:
        """Raise GroupError unless every rank has its process."""
        ended = self.ended
        if ended:
            texts = [f"rank {rank}: {self.end_of(rank).message}" for rank in ended]
            raise GroupError(f"{'; '.join(texts)}; {REPAIR}")

    def ask(self, ranks: Sequence[int], target: str, *args: Any) -> list[Any]:
        """Call ``ddip.rank.<target>(*args)`` on the main thread of each of `ranks`; returns the results in order."""
        return self.ask_each(dict.fromkeys(ranks, args), target)

    def ask_each(
        self, arguments: Mapping[int, tuple[Any, ...]], target: str, deadline: float | None = None
    ) -> list[Any]:
        """The same with arguments by rank, until `deadline` on ``time.monotonic``; raises GroupError."""
        client = self.cluster.client
        try:  # before anything is sent: the others would wait for the one that has ended
            views = {rank: client.direct_view(self.members[rank].engine) for rank in arguments}
        except IndexError:
            gone = {rank: self.end_of(rank) for rank in self.ended}
            raise GroupError(f"{WORDS[target]} failed: {CellError(gone)}") from None
        answers = {rank: views[rank].apply_async(call, target, *args) for rank, args in arguments.items()}
        self._await(answers, deadline)
        replies = {rank: answer.get(return_exceptions=True) for rank, answer in answers.items() if answer.done()}
        problems: dict[int, RankError] = {}
        for rank, reply in replies.items():
            problem = self.error_of(rank, reply)
            if problem is None and "error" in reply:
                problem = RankError(reply["error"], reply["message"], reply["traceback"])
            if problem is not None:
                problems[rank] = problem
        if problems:
            log.debug("%s", "\n".join(problem.traceback for problem in problems.values()))
            raise GroupError(f"{WORDS[target]} failed: {CellError(problems)}")
        late = [rank for rank in answers if rank not in replies]
        if late:
            raise GroupError(f"{ranks_text(late)} did not finish {WORDS[target]} in time; -t SECONDS waits longer")
        return [replies[rank]["ok"] for rank in answers]

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

    def ask_beside(
        self, ranks: Sequence[int], target: str, *args: Any, seconds: float = ANSWER_SECONDS
    ) -> dict[int, Any]:
        """Call ``ddip.rank.<target>(*args)`` on the control threads of `ranks`, which answer while a cell runs.

        The answers by rank; None for a rank that has ended, and for one that has not answered after `seconds`: perhaps
        C code on its main thread does not let go of the interpreter.
        """
        client = self.cluster.client
        request = {"target": target, "args": list(args)}
        futures = {}
        for rank in self.live:
            if rank in ranks:
                with contextlib.suppress(KeyError):  # it has ended just now
                    futures[rank] = ipp_private.control(client, self.members[rank].engine, "ddip_request", request)
        concurrent.futures.wait(futures.values(), timeout=seconds)
        answers = {rank: future.result() for rank, future in futures.items() if future.done()}
        return {rank: answers[rank]["content"].get("ok") if rank in answers else None for rank in ranks}

    def ask_soon(self, rank: int, target: str, *args: Any, seconds: float) -> Any:
        """Call ``ddip.rank.<target>(*args)`` on the main thread of `rank`; None if that fails or takes longer."""
        try:
            answer = self.cluster.client.direct_view(self.members[rank].engine).apply_async(call, target, *args)
        except IndexError:  # it has ended
            return None
        answer.wait(seconds)
        reply = answer.get(return_exceptions=True) if answer.done() else None
        return reply.get("ok") if isinstance(reply, dict) else None

    def connections(self, ranks: Sequence[int]) -> dict[int, list[tuple[Any, ...]]]:
        """Both ends of each TCP connection of `ranks`; those of one that does not answer are read from outside."""
        answers = self.ask_beside(ranks, "sockets.connections")
        found = {}
        for rank, answer in answers.items():
            if answer is None:
                with contextlib.suppress(psutil.Error):
                    answer = [
                        (*c.laddr, *c.raddr)
                        for c in psutil.Process(self.members[rank].pid).net_connections("tcp")
                        if c.raddr
                    ]
            found[rank] = [tuple(ends) for ends in answer or ()]
        return found

    def places(self, ranks: Sequence[int], seconds: float = ANSWER_SECONDS) -> dict[int, Place | None]:
        """Where the main threads of `ranks` are."""
        answers = self.ask_beside(ranks, "stacks.here", seconds=seconds)
        return {
            rank: self.place_from_outside(rank) if answer is None else Place(**answer)
            for rank, answer in answers.items()
        }

    def place_from_outside(self, rank: int) -> Place | None:
        """Where `rank` is, though it cannot answer; None if it does not even take a signal."""
        if rank in self.ended or dump.SIGNAL is None:
            return None
        pid = self.members[rank].pid
        path = dump.file_of(self.cluster.run_folder, pid)
        try:
            before = path.stat().st_size
            os.kill(pid, dump.SIGNAL)
            deadline = time.monotonic() + SIGNAL_SECONDS
            text = ""
            while time.monotonic() < deadline:
                time.sleep(0.02)
                former, text = text, path.read_text()[before:]
                if text and text == former:  # it is written piece by piece
                    return dump.place_in(text)
        except OSError:
            pass  # it has ended just now, or is on a system without such a signal
        return None

    def signal(self, ranks: Sequence[int]) -> None:
        """Send SIGINT to `ranks`: whatever cell they run then is interrupted."""
        live = self.live
        for rank in ranks:
            if rank in live:
                with contextlib.suppress(IndexError):  # it has ended just now
                    self.cluster.client.send_signal("SIGINT", self.members[rank].engine, block=False)

    def interrupt(self, cells: Mapping[int, str]) -> None:
        """Interrupt one cell on each rank, by its message id, whether it runs or is still on its way; and no other."""
        live = self.live
        for rank, cell in cells.items():
            if rank in live:
                with contextlib.suppress(KeyError):  # it has ended just now
                    ipp_private.control(
                        self.cluster.client, self.members[rank].engine, "ddip_interrupt", {"cell": cell}
                    )

    def error_of(self, rank: int, reply: Any) -> RankError | None:
        """What `rank` raised, out of ipyparallel's reply to a request; None if it raised nothing."""
        if not isinstance(reply, BaseException):
            return None
        if isinstance(reply, TaskAborted):
            return RankError(KeyboardInterrupt.__name__, "before the cell began", "", at=time.time())
        if not isinstance(reply, RemoteError):
            return RankError(type(reply).__name__, str(reply), "", at=time.time())
        if reply.ename == EngineError.__name__:
            return self.end_of(rank)
        report = ipp_private.report(reply) or {}
        waited, at = report.get("waited", ""), report.get("at", 0.0)
        return RankError(reply.ename, reply.evalue, reply.traceback, waited, at)
