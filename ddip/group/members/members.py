"""The members of a group: which of them live, where they are, and what they answer beside a running cell."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ddip.cluster.cluster_api import Cluster, Reply
from ddip.cluster.processes import on_host
from ddip.cluster.processes.exit_diagnosis import HostMemory, cause_text, exit_text
from ddip.cluster.processes.host import ASK_SECONDS, Host, HostLost
from ddip.errors import NONE_LEFT, RANK_ENDED, REPAIR, GroupError, RankError, clauses
from ddip.group import stopping
from ddip.group.members.placement import DeviceBinding
from ddip.output.area import notify
from ddip.protocol import on_rank
from ddip.protocol.location import StackLocation
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import CellReport

V = TypeVar("V")
ANSWER_SECONDS = 0.4
"""How long a rank may take to answer beside its cell; one that is in C code may not answer at all."""
AT_ONCE_SECONDS, LOOKED_AT = 0.2, 4
"""How long it may take where a stop waits for the answer; and how many silent ranks are looked at from outside then."""
NOT_STOPPABLE = frozenset({"_tensorpipe_init_backend_handler"})
"""Functions that wait in C++ code and let no other thread run: torch makes RPC's agent there."""


@dataclass(frozen=True)
class Member:
    """One rank: the engine it lives in, and what that engine was started for."""

    engine: int
    pid: int
    host: str
    binding: DeviceBinding


class Members:
    """The ranks of a group in rank order, each in an engine of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.members: list[Member] = []
        self._memory = HostMemory.now()
        self._held: dict[int, int] = {}
        """Bytes, by engine."""
        self._asked: dict[int, Future[Any]] = {}
        """What each host was asked last of the memory of its ranks."""
        self.can_unblock = True
        """Can ranks that wait for another in vain be unblocked?"""
        self.gpu_lost: dict[int, str] = {}
        """Ranks whose process lives, but whose GPU computes nothing for it any more, and what it said."""

    @property
    def ended(self) -> list[int]:
        """The ranks whose process is gone, or which the controller has given up."""
        there = self.cluster.live
        return [rank for rank, member in enumerate(self.members) if member.engine not in there]

    @property
    def live(self) -> list[int]:
        """The ranks whose process runs, as far as the controller knows."""
        ended = self.ended
        return [rank for rank in range(len(self.members)) if rank not in ended]

    @property
    def repair_text(self) -> str:
        """What to say of ``%makedip --repair`` where a rank has ended; with the controller gone it cannot help."""
        if self.live:
            return REPAIR
        try:
            self.cluster.ensure_controller()
        except GroupError as error:
            return str(error)
        return NONE_LEFT

    def with_repair(self, why: str) -> str:
        """`why`, and what to say of ``%makedip --repair``, once."""
        return why if self.repair_text in why else f"{why}; {self.repair_text}"

    def watch_memory(self, ranks: Sequence[int]) -> None:
        """Remember how much memory `ranks` hold, when their hosts say it: when one has ended it is too late to ask."""
        for host, its in self._by_host(ranks).items():
            if host not in self._asked or self._asked[host].done():
                members = [self.members[rank] for rank in its]
                self._asked[host] = self.cluster.hosts[host].begin(on_host.memory, [member.pid for member in members])
                self._asked[host].add_done_callback(functools.partial(self._hold, members))

    def _hold(self, members: Sequence[Member], answer: Future[Sequence[int | None]]) -> None:
        if answer.exception() is None:
            held = zip(members, answer.result(), strict=True)
            self._held.update({member.engine: size for member, size in held if size is not None})

    def uses(self, ranks: Sequence[int]) -> dict[int, tuple[float, bool]]:
        """Seconds of CPU that the processes of `ranks` have used, and whether one runs; without those that ended."""
        return {rank: use for rank, use in self._ask_hosts(on_host.uses, ranks).items() if use is not None}

    def _ask_hosts(
        self, function: Callable[[Sequence[int]], Sequence[V]], ranks: Sequence[int], seconds: float = ANSWER_SECONDS
    ) -> dict[int, V]:
        """What `function` of the hosts says of the processes of `ranks`; a host that does not answer says nothing."""
        by_host = self._by_host(ranks)
        asked = {
            host: self.cluster.hosts[host].begin(function, [self.members[rank].pid for rank in its])
            for host, its in by_host.items()
        }
        found: dict[int, V] = {}
        for host, its in by_host.items():
            with contextlib.suppress(HostLost, concurrent.futures.TimeoutError):
                found |= dict(zip(its, asked[host].result(seconds), strict=True))
        return found

    def _by_host(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        by_host: dict[int, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.members[rank].binding.host, []).append(rank)
        return by_host

    def host(self, rank: int) -> Host:
        """Where the process of `rank` is, or was."""
        return self.cluster.host_of(self.members[rank].engine)

    def end_of(self, rank: int) -> RankError:
        """What is known of the end of `rank`: its pid, how and why it ended, and the last lines of its log."""
        member, host = self.members[rank], self.host(rank)
        if member.engine not in self.cluster.exits:
            text = f"pid {member.pid} lost its heartbeat, and the controller has unregistered it"
            return RankError(RANK_ENDED, text, "", at=time.time(), pid=member.pid)
        code = self.cluster.exits[member.engine]
        if code is None and host.lost:
            return RankError(RANK_ENDED, f"pid {member.pid} is lost with {host.name}: {host.lost}", "", at=time.time())
        now = self._memory
        with contextlib.suppress(HostLost):
            now = HostMemory(*host.ask(on_host.host_memory))
        why = cause_text(code, self._held.get(member.engine), self._memory, now)
        log = self.cluster.log_tail(member.engine)
        text = f"pid {member.pid} ended ({exit_text(code)}): {why}"
        traceback = "\n".join(["end of its log:", *log]) if log else ""
        return RankError(RANK_ENDED, text, traceback, at=time.time(), pid=member.pid)

    def ensure_all(self) -> None:
        """Raise GroupError unless every rank has its process."""
        ended = self.ended
        if ended:
            texts = clauses({rank: self.end_of(rank) for rank in ended}, named=False)
            raise GroupError(f"{'; '.join(texts)}; {self.repair_text}")

    def note_lost_gpus(self, reports: Mapping[int, CellReport | None]) -> None:
        """Remember the ranks whose GPU computes nothing any more, by what they `report`, and tell the user."""
        lost = {rank: report["gpu_lost"] for rank, report in reports.items() if report and "gpu_lost" in report}
        if lost:
            self.gpu_lost.update(lost)
            notify(self._lost_gpus())

    def _lost_gpus(self) -> str:
        texts = [f"rank {rank} has lost its GPU ({why})" for rank, why in sorted(self.gpu_lost.items())]
        return f"{'; '.join(texts)}; %dipull still gets what it has on the CPU, and {REPAIR}"

    def ensure_no_gpu_lost(self) -> None:
        """Raise GroupError if a rank can compute nothing any more on its GPU."""
        if self.gpu_lost:
            raise GroupError(self._lost_gpus())

    def call_on_control_channel(
        self,
        ranks: Sequence[int],
        call: RemoteCall[R],
        seconds: float = ANSWER_SECONDS,
        button: stopping.Button | None = None,
    ) -> dict[int, R | None]:
        """Make `call` on the control threads of `ranks`, which answer while a cell runs.

        The rest is as `call_each_on_control_channel` says.
        """
        return self.call_each_on_control_channel(dict.fromkeys(ranks, call), seconds, button)

    def call_each_on_control_channel(
        self,
        calls: Mapping[int, RemoteCall[R]],
        seconds: float = ANSWER_SECONDS,
        button: stopping.Button | None = None,
    ) -> dict[int, R | None]:
        """The same with a call by rank, all of one function.

        The answers by rank; None for a rank that has ended, and for one that has not answered after `seconds`, or when
        `button` is pressed: perhaps C code on its main thread does not let go of the interpreter.
        """
        futures = {}
        for rank in self.live:
            if rank in calls:
                with contextlib.suppress(KeyError):  # it has ended just now
                    futures[rank] = self.cluster.call_on_control_channel(self.members[rank].engine, calls[rank])
        if button is None:
            concurrent.futures.wait(futures.values(), timeout=seconds)
        else:
            button.wait_for(futures.values(), seconds)
        answers = {rank: future.result() for rank, future in futures.items() if future.done()}
        return {rank: answers[rank].get("ok") if rank in answers else None for rank in calls}

    def connections(self, ranks: Sequence[int]) -> dict[int, list[tuple[Any, ...]]]:
        """Both ends of each TCP connection of `ranks`; those of one that does not answer are read from outside."""
        answers = self.call_on_control_channel(ranks, on_rank.connections())
        missing = [rank for rank, answer in answers.items() if answer is None]
        outside = self._ask_hosts(on_host.connections, missing, ASK_SECONDS) if missing else {}
        told = {rank: outside.get(rank, []) if answer is None else answer for rank, answer in answers.items()}
        return {rank: [tuple(ends) for ends in its] for rank, its in told.items()}

    def places(self, ranks: Sequence[int], seconds: float = ANSWER_SECONDS) -> dict[int, StackLocation | None]:
        """Where the main threads of `ranks` are."""
        answers = self.call_on_control_channel(ranks, on_rank.here(), seconds=seconds)
        return {
            rank: self.place_from_outside(rank) if answer is None else StackLocation(**answer)
            for rank, answer in answers.items()
        }

    def without_a_stop(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` that wait in C++ code which lets no thread of theirs run, so that nothing ends it.

        Each that does not answer at once is looked at from outside, for a moment: a few at most, who are enough.
        """
        answers = self.call_on_control_channel(ranks, on_rank.here(), seconds=AT_ONCE_SECONDS)
        silent = [rank for rank, answer in answers.items() if answer is None][:LOOKED_AT]
        places = {rank: self.place_from_outside(rank) for rank in silent}
        return [rank for rank, place in places.items() if place is not None and place.function in NOT_STOPPABLE]

    def place_from_outside(self, rank: int) -> StackLocation | None:
        """Where `rank` is, though it cannot answer; None if it does not even take a signal."""
        if rank in self.ended:
            return None
        host = self.host(rank)
        with contextlib.suppress(HostLost):
            place = host.ask(on_host.place, self.members[rank].pid, str(host.run_folder))
            return None if place is None else StackLocation(**place)
        return None

    def stopped_text(self, rank: int) -> str:
        """What to say of a rank that a signal or a debugger has stopped; empty for one that runs, or has ended."""
        with contextlib.suppress(HostLost):
            return self.host(rank).ask(on_host.stopped_text, self.members[rank].pid)
        return ""

    def carry_on(self) -> None:
        """Continue the ranks that a signal has stopped."""
        for number, host in enumerate(self.cluster.hosts):
            live = [self.members[rank] for rank in self.live]
            with contextlib.suppress(HostLost):
                host.ask(on_host.carry_on, [member.pid for member in live if member.binding.host == number])

    def interrupt(self, cells: Mapping[int, str]) -> None:
        """Interrupt one cell on each rank, by its message id, whether it runs or is still on its way; and no other."""
        self._interrupt(cells)

    def interrupt_what_runs(self, ranks: Sequence[int]) -> None:
        """Interrupt the cells that `ranks` run now; those that come next are not meant."""
        concurrent.futures.wait(self._interrupt(dict.fromkeys(ranks)), timeout=ANSWER_SECONDS)

    def _interrupt(self, cells: Mapping[int, str | None]) -> list[concurrent.futures.Future[Any]]:
        live, answers = self.live, []
        for rank, cell in cells.items():
            if rank in live:
                with contextlib.suppress(KeyError):  # it has ended just now
                    answers.append(self.cluster.interrupt(self.members[rank].engine, cell))
        return answers

    def error_of(self, rank: int, reply: Reply) -> RankError | None:
        """What `rank` raised, out of its reply to a request; None if it raised nothing."""
        if reply.ended:
            return self.end_of(rank)
        if reply.raised is None:
            return None
        raised, report = reply.raised, reply.report
        waited, at = (report.get("waited", ""), report.get("at", 0.0)) if report else ("", raised.at)
        return RankError(raised.name, raised.message, raised.traceback, waited, at)
