"""The members of a group: which of them are running, where they are, and requests answered while a cell runs."""

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
from ddip.cluster.processes.host import ASK_SECONDS, Host, HostLost, LocalHost
from ddip.errors import NONE_LEFT, RANK_ENDED, REPAIR, GroupError, RankError, error_clauses
from ddip.group import stopping
from ddip.group.members.placement import DeviceBinding
from ddip.output.area import notify
from ddip.output.tables import tables
from ddip.protocol import on_rank
from ddip.protocol.location import StackLocation
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import CellReport

V = TypeVar("V")
ANSWER_SECONDS = 0.4
"""Time that a rank may take to answer while its cell runs; one that is in C code may not answer at all."""
AT_ONCE_SECONDS, MOST_INSPECTED = 0.2, 4
"""Time that a rank may take to answer during a stop, and the number of silent ranks that are then inspected from
outside."""
NOT_STOPPABLE = frozenset({"_tensorpipe_init_backend_handler"})
"""Functions that wait in C++ while holding the GIL: torch creates the RPC agent there."""


@dataclass(frozen=True)
class Member:
    """One rank: the engine that it runs in, and the devices that this engine was started for."""

    engine: int
    pid: int
    host: str
    binding: DeviceBinding


class Members:
    """The ranks of a group in order, each in an engine of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.members: list[Member] = []
        self._memory = HostMemory.now()
        self._memory_of_engine: dict[int, int] = {}
        """Memory of each engine's process when it was last recorded, in bytes."""
        self._asked: dict[int, Future[Any]] = {}
        """The latest request to each host for the memory of its ranks."""
        self.can_unblock = True
        """False if ranks that wait in a collective cannot be unblocked."""
        self.gpu_lost: dict[int, str] = {}
        """Ranks whose process runs but can no longer use its GPU, each with the error that reported this."""

    @property
    def ended(self) -> list[int]:
        """The ranks whose process has ended, or that the controller has unregistered."""
        live_engines = self.cluster.live
        return [rank for rank, member in enumerate(self.members) if member.engine not in live_engines]

    @property
    def live(self) -> list[int]:
        """The ranks whose process is running, as far as the controller knows."""
        ended = self.ended
        return [rank for rank in range(len(self.members)) if rank not in ended]

    @property
    def repair_text(self) -> str:
        """The advice to give after the end of a rank; ``%makedip --repair`` cannot help without a controller."""
        if self.live:
            return REPAIR
        try:
            self.cluster.ensure_controller()
        except GroupError as error:
            return str(error)
        return NONE_LEFT

    def with_repair(self, why: str) -> str:
        """Return `why` with the advice of `repair_text` appended, unless it is included already."""
        return why if self.repair_text in why else f"{why}; {self.repair_text}"

    def watch_memory(self, ranks: Sequence[int]) -> None:
        """Request the memory use of `ranks` from their hosts and record it, as it is gone once a rank ends.

        Does not wait for the answers, and sends no request to hosts that have yet to answer the last one.
        """
        for host, on_this_host in self.by_host(ranks).items():
            if host not in self._asked or self._asked[host].done():
                members = [self.members[rank] for rank in on_this_host]
                self._asked[host] = self.cluster.hosts[host].begin(
                    on_host.resident_memory, [member.pid for member in members]
                )
                self._asked[host].add_done_callback(functools.partial(self._record_memory, members))

    def _record_memory(self, members: Sequence[Member], answer: Future[Sequence[int | None]]) -> None:
        if answer.exception() is None:
            sizes = zip(members, answer.result(), strict=True)
            self._memory_of_engine.update({member.engine: size for member, size in sizes if size is not None})

    def cpu_uses(self, ranks: Sequence[int]) -> dict[int, tuple[float, bool]]:
        """Return by rank the CPU seconds that its processes have used, and whether one of them is runnable.

        Asks the hosts, at most ANSWER_SECONDS. Ranks that have ended, or whose host does not answer, are left out.
        """
        return {rank: use for rank, use in self._ask_hosts(on_host.cpu_usage, ranks).items() if use is not None}

    def _ask_hosts(
        self, function: Callable[[Sequence[int]], Sequence[V]], ranks: Sequence[int], seconds: float = ANSWER_SECONDS
    ) -> dict[int, V]:
        """Call `function` on the hosts for the processes of `ranks`; return the results by rank.

        Ranks on a host that does not answer within `seconds` are missing.
        """
        by_host = self.by_host(ranks)
        requests = {
            host: self.cluster.hosts[host].begin(function, [self.members[rank].pid for rank in on_this_host])
            for host, on_this_host in by_host.items()
        }
        results: dict[int, V] = {}
        for host, on_this_host in by_host.items():
            with contextlib.suppress(HostLost, concurrent.futures.TimeoutError):
                results |= dict(zip(on_this_host, requests[host].result(seconds), strict=True))
        return results

    def by_host(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Return `ranks` by the number of their host."""
        by_host: dict[int, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.members[rank].binding.host, []).append(rank)
        return by_host

    def host(self, rank: int) -> Host:
        """Return the host on which the process of `rank` is, or was."""
        return self.cluster.host_of(self.members[rank].engine)

    def is_beside(self, rank: int) -> bool:
        """Return whether `rank` is on the notebook's host, so that they can share memory and files."""
        return isinstance(self.host(rank), LocalHost)

    def describe_end(self, rank: int) -> RankError:
        """Describe the end of `rank` as an error: its PID, how and why it ended, and the end of its log."""
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
        why = cause_text(code, self._memory_of_engine.get(member.engine), self._memory, now)
        log = self.cluster.log_tail(member.engine)
        text = f"pid {member.pid} ended ({exit_text(code)}): {why}"
        traceback = "\n".join(["end of its log:", *log]) if log else ""
        return RankError(RANK_ENDED, text, traceback, at=time.time(), pid=member.pid)

    def ensure_all(self) -> None:
        """Raise GroupError, with how each rank ended, unless the process of every rank is running."""
        ended = self.ended
        if ended:
            texts = error_clauses({rank: self.describe_end(rank) for rank in ended}, named=False)
            raise GroupError(f"{'; '.join(texts)}; {self.repair_text}")

    def note_lost_gpus(self, reports: Mapping[int, CellReport | None]) -> None:
        """Record the ranks whose `reports` say that their GPU is lost, and tell the user."""
        self.add_lost_gpus({r: report["gpu_lost"] for r, report in reports.items() if report and "gpu_lost" in report})

    def add_lost_gpus(self, lost: Mapping[int, str]) -> None:
        """Record the ranks that have lost their GPU, with the errors, and tell the user."""
        if lost:
            self.gpu_lost.update(lost)
            notify(self._lost_gpus_text())

    def _lost_gpus_text(self) -> str:
        texts = [f"rank {rank} has lost its GPU ({why})" for rank, why in sorted(self.gpu_lost.items())]
        return f"{'; '.join(texts)}; %dipull can still copy its CPU variables, and {REPAIR}"

    def ensure_no_gpu_lost(self) -> None:
        """Raise GroupError if a rank has lost its GPU."""
        if self.gpu_lost:
            raise GroupError(self._lost_gpus_text())

    def call_on_control_channel(
        self,
        ranks: Sequence[int],
        call: RemoteCall[R],
        seconds: float = ANSWER_SECONDS,
        button: stopping.Button | None = None,
    ) -> dict[int, R | None]:
        """Make `call` on the control threads of `ranks`, which answer even while a cell runs.

        Waits for the answers. For parameters and result, see `call_each_on_control_channel`.
        """
        return self.call_each_on_control_channel(dict.fromkeys(ranks, call), seconds, button)

    def call_each_on_control_channel(
        self,
        calls: Mapping[int, RemoteCall[R]],
        seconds: float = ANSWER_SECONDS,
        button: stopping.Button | None = None,
    ) -> dict[int, R | None]:
        """Make one call per rank, all of the same function, on the control threads.

        Returns the answers by rank. The answer is None for a rank that has ended or raised an error, and for one that
        has not answered after `seconds` or when `button` is pressed: C code on its main thread may be holding the GIL.
        """
        futures = {}
        for rank in self.live:
            if rank in calls:
                with contextlib.suppress(KeyError):  # it has just ended
                    futures[rank] = self.cluster.call_on_control_channel(self.members[rank].engine, calls[rank])
        if button is None:
            concurrent.futures.wait(futures.values(), timeout=seconds)
        else:
            button.wait_for(futures.values(), seconds)
        answers = {rank: future.result() for rank, future in futures.items() if future.done()}
        return {rank: answers[rank].get("ok") if rank in answers else None for rank in calls}

    def connections(self, ranks: Sequence[int]) -> dict[int, list[tuple[Any, ...]]]:
        """Return the TCP connections of each of `ranks`: own address and port, then the other's.

        Silent ranks are looked up by their hosts; the list is empty if these do not answer either.
        """
        answers = self.call_on_control_channel(ranks, on_rank.tcp_connections())
        missing = [rank for rank, answer in answers.items() if answer is None]
        outside = self._ask_hosts(on_host.list_connections, missing, ASK_SECONDS) if missing else {}
        tables = {rank: outside.get(rank, []) if answer is None else answer for rank, answer in answers.items()}
        return {rank: [tuple(ends) for ends in table] for rank, table in tables.items()}

    def stack_locations(
        self, ranks: Sequence[int], seconds: float = ANSWER_SECONDS, *, with_collectives: bool = False
    ) -> dict[int, StackLocation | None]:
        """Return the stack location of the main thread of each of `ranks`, by rank.

        Waits at most `seconds` for the ranks. For ranks that do not answer, see `stack_locations_from_outside`.
        `with_collectives`: the locations describe the collectives of the ranks.
        """
        request = on_rank.waiting_location() if with_collectives else on_rank.main_thread_location()
        answers = self.call_on_control_channel(ranks, request, seconds=seconds)
        outside = self.stack_locations_from_outside([rank for rank, answer in answers.items() if answer is None])
        return {rank: outside[rank] if answer is None else StackLocation(**answer) for rank, answer in answers.items()}

    def advise_on_stuck(self, stuck: Sequence[int]) -> str:
        """Return advice for the user about `stuck` ranks, or about stopped processes that delay their answers."""
        return self.cluster.stopped() or tables.advise_on_stuck(stuck)

    def find_unstoppable(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` that cannot be stopped, as they wait in C++ code that holds the GIL.

        At most MOST_INSPECTED of the ranks that do not answer at once are inspected from outside; the result may lack
        others.
        """
        answers = self.call_on_control_channel(ranks, on_rank.main_thread_location(), seconds=AT_ONCE_SECONDS)
        silent = [rank for rank, answer in answers.items() if answer is None][:MOST_INSPECTED]
        places = self.stack_locations_from_outside(silent)
        return [rank for rank, place in places.items() if place is not None and place.function in NOT_STOPPABLE]

    def stack_locations_from_outside(self, ranks: Sequence[int]) -> dict[int, StackLocation | None]:
        """Return the stack locations of ranks that cannot answer, as their hosts report them.

        The location is None for a rank that does not even handle a signal, and on a silent host.
        """
        ended, answers, end = self.ended, {}, time.monotonic() + ASK_SECONDS
        for rank in ranks:
            host = self.host(rank)
            if rank not in ended and not host.silent:
                answers[rank] = host.begin(on_host.stack_location, self.members[rank].pid, str(host.run_folder))
        places: dict[int, StackLocation | None] = dict.fromkeys(ranks)
        for rank, answer in answers.items():
            with contextlib.suppress(HostLost, concurrent.futures.TimeoutError):
                place = answer.result(max(0.0, end - time.monotonic()))
                places[rank] = None if place is None else StackLocation(**place)
        return places

    def stopped_text(self, rank: int) -> str:
        """Describe a rank that a signal or a debugger has stopped; empty if it is running or has ended.

        Waits for the rank's host no longer than for a rank.
        """
        with contextlib.suppress(HostLost, concurrent.futures.TimeoutError):
            return self.host(rank).begin(on_host.stopped_text, self.members[rank].pid).result(ANSWER_SECONDS)
        return ""

    def carry_on(self) -> None:
        """Continue all ranks, and processes between them and the notebook, that a signal has stopped."""
        self.cluster.carry_on()
        for number, host in enumerate(self.cluster.hosts):
            live = [self.members[rank] for rank in self.live]
            with contextlib.suppress(HostLost):
                host.ask(on_host.carry_on, [member.pid for member in live if member.binding.host == number])

    def interrupt(self, cells: Mapping[int, str]) -> None:
        """Interrupt on each rank the request with the given message id, even if it has yet to arrive.

        Does not wait.
        """
        self._interrupt(cells)

    def interrupt_what_runs(self, ranks: Sequence[int]) -> None:
        """Interrupt the cells that `ranks` are running now, but not the next ones.

        Waits briefly until the ranks know.
        """
        concurrent.futures.wait(self._interrupt(dict.fromkeys(ranks)), timeout=ANSWER_SECONDS)

    def _interrupt(self, cells: Mapping[int, str | None]) -> list[concurrent.futures.Future[Any]]:
        live, answers = self.live, []
        for rank, cell in cells.items():
            if rank in live:
                with contextlib.suppress(KeyError):  # it has just ended
                    answers.append(self.cluster.interrupt(self.members[rank].engine, cell))
        return answers

    def error_of(self, rank: int, reply: Reply) -> RankError | None:
        """Return the error in the reply of `rank` to a request; None if there is none."""
        if reply.ended:
            return self.describe_end(rank)
        if reply.raised is None:
            return None
        raised, report = reply.raised, reply.report
        waited, at = (report.get("waited", ""), report.get("at", 0.0)) if report else ("", raised.at)
        return RankError(raised.name, raised.message, raised.traceback, waited, at)
