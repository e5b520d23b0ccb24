"""What each rank does just now, and has done in the last seconds: asked beside its cell, with one call a rank.

    Sampler.look  --vitals.now-->  control thread of each rank       an answer that is late is taken at the next look
                  <--Vitals------  rates: what has changed since an earlier answer of the same cell

It may be called on any thread, and never waits for a rank that stands still; such a rank is not asked again before it
has answered.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from ddip.cluster.processes import on_host
from ddip.cluster.processes.host import HostLost
from ddip.group import stopping
from ddip.group.lifecycle import Lifecycle
from ddip.group.members.members import ANSWER_SECONDS
from ddip.group.members.ranks import Ranks
from ddip.output.tables.vitals_table import RankState, RankVitals
from ddip.protocol import on_rank
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import Vitals

log = logging.getLogger("ddip")

WINDOW_SECONDS = 10.0
"""Of what is called the last seconds."""
LATE_SECONDS = 3.0
"""For which what a rank has told stands in for an answer that is late."""
SAME_BEGIN = 0.1
"""Seconds by which two answers may differ on when the cell has begun."""
LEAST_SECONDS = 0.5
"""Of a cell, to tell a rate."""
PERIOD, PERIOD_OF_A_RANK, LONGEST_PERIOD = 1.0, 0.4, 10.0
"""Seconds from one look to the next, so that all processes together take less than a hundredth of a core: a question
costs them about a millisecond."""
LOOK_OF_A_RANK, LONGEST_LOOK = 0.05, 1.0
"""Seconds from one look of a rank whether it waits for others to the next, which all ranks do."""
IDLE_CORES = 0.1
"""What an idle rank uses is not worth a word below that."""


def period(size: int) -> float:
    """Seconds from one look at `size` ranks to the next."""
    return min(LONGEST_PERIOD, max(PERIOD, PERIOD_OF_A_RANK * size))


@dataclass(frozen=True)
class Rates:
    """What has changed between two answers of a rank, by second or as a share; None: too little time has passed."""

    steps: float | None = None
    collectives: float | None = None
    waited: float | None = None
    cores: float | None = None


def rates(answers: Sequence[Vitals]) -> Rates:
    """Of a rank in the last seconds before the newest of its `answers`, which come last; and no longer than its cell
    has run."""
    *former, now = answers
    recent = [one for one in former if one["at"] >= now["at"] - WINDOW_SECONDS] or former[-1:]
    cores = (now["cpu"] - recent[0]["cpu"]) / (now["at"] - recent[0]["at"]) if recent else None
    same = [one for one in recent if _begin(one) is not None and _is_same(one, now)]
    if not same or now["at"] - same[0]["at"] < LEAST_SECONDS:
        return Rates(cores=cores)
    first, seconds = same[0], now["at"] - same[0]["at"]
    looked = now["looked"] - first["looked"]
    waited = None
    if now["waited"] is not None and first["waited"] is not None and looked >= LEAST_SECONDS:
        waited = (now["waited"] - first["waited"]) / looked
    steps, begun = now["steps"] - first["steps"], now["collectives"] - first["collectives"]
    return Rates(steps / seconds, max(0, begun) / seconds, waited, cores)


def _begin(answer: Vitals) -> float | None:
    return None if answer["busy_for"] is None else answer["at"] - answer["busy_for"]


def _is_same(one: Vitals, other: Vitals) -> bool:
    """Are they of the same cell?"""
    begun, its = _begin(one), _begin(other)
    return begun is not None and its is not None and abs(begun - its) < SAME_BEGIN


class Sampler:
    """Looks at the ranks of a group again and again."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._ranks: Ranks | None = None
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        """Questions without an answer, by engine."""
        self._answers: dict[int, collections.deque[Vitals]] = {}
        self._heard: dict[int, float] = {}
        """When an engine has answered last."""

    def look(self) -> list[RankVitals]:
        """Each rank in order; waits ANSWER_SECONDS at most. Raises GroupError if the group has ended."""
        ranks, spec = self._lifecycle.parts.ranks, self._lifecycle.spec
        if not ranks.cluster.connected:  # it starts just now
            return []
        members, live = list(ranks.members), ranks.cluster.live
        there = [member.engine for member in members if member.engine in live]
        self._forget([] if ranks is not self._ranks else there)
        self._ranks = ranks
        self._take()
        self._ask(ranks, there, len(members))
        self._take()
        found = []
        for rank, member in enumerate(members):
            device = spec.device_name(rank) if rank < spec.size else ""  # the group changes just now
            known = RankVitals(rank, member.host, member.pid, device, "no answer")
            found.append(
                self._of(ranks, known, member.engine) if member.engine in there else replace(known, state="ended")
            )
        return found

    def _forget(self, there: Sequence[int]) -> None:
        """What is known of engines that are gone."""
        known: list[dict[int, Any]] = [self._asked, self._answers, self._heard]
        for table in known:
            for engine in table.keys() - set(there):
                del table[engine]

    def _ask(self, ranks: Ranks, engines: Sequence[int], size: int) -> None:
        call = on_rank.vitals(min(LONGEST_LOOK, LOOK_OF_A_RANK * size), 2 * period(size) + 1)
        new = []
        for engine in engines:
            if engine not in self._asked:
                with contextlib.suppress(KeyError):  # it has ended just now
                    self._asked[engine] = ranks.cluster.call_on_control_channel(engine, call)
                    new.append(self._asked[engine])
        concurrent.futures.wait(new, timeout=ANSWER_SECONDS)

    def _take(self) -> None:
        """The answers that have come."""
        for engine in [engine for engine, asked in self._asked.items() if asked.done()]:
            answer: Mapping[str, Any] = self._asked.pop(engine).result()
            self._heard[engine] = time.monotonic()
            if "ok" in answer:
                self._answers.setdefault(engine, collections.deque(maxlen=32)).append(answer["ok"])
            else:
                log.debug("engine %d could not tell what it does: %s", engine, answer.get("traceback", answer))
                self._answers.pop(engine, None)

    def _of(self, ranks: Ranks, rank: RankVitals, engine: int) -> RankVitals:
        """What is known of a `rank` that lives."""
        answers = self._answers.get(engine)
        is_late = engine in self._asked and time.monotonic() > self._heard.get(engine, 0.0) + LATE_SECONDS
        if answers and not is_late:
            lost = rank.rank in ranks.gpu_lost
            return told(rank, answers[-1], rates(list(answers)), "GPU lost" if lost else "idle")
        stopped = _stopped_text(ranks, rank) if is_late else ""
        return replace(rank, state="stopped", doing=stopped) if stopped else rank


def _stopped_text(ranks: Ranks, rank: RankVitals) -> str:
    """Has a signal or a debugger stopped it? Its host is not waited for longer than a rank."""
    with contextlib.suppress(HostLost, concurrent.futures.TimeoutError):
        return ranks.host(rank.rank).begin(on_host.stopped_text, rank.pid).result(ANSWER_SECONDS)
    return ""


def told(rank: RankVitals, now: Vitals, its: Rates, otherwise: RankState) -> RankVitals:
    """`rank`, with its answer and its rates; the state `otherwise` if it is not busy."""
    device = now["device"]
    rank = replace(
        rank,
        state="busy" if now["busy"] else otherwise,
        doing=now["doing"],
        cell=now["cell"],
        seconds=now["busy_for"] if now["busy"] else now["seconds"],
        steps=now["steps"],
        collectives=now["collectives"],
        cores=its.cores if now["busy"] or (its.cores or 0.0) >= IDLE_CORES else None,
        memory=now["memory"],
        gpu_use=device and device["use"],
        gpu_memory=device and device["memory"],
        gpu_memory_total=device and device["total"],
        gpu_temperature=device and device["temperature"],
    )
    if not now["busy"]:
        return rank
    return replace(
        rank,
        place=StackLocation(**now["place"]),
        bars=tuple((done, total) for done, total in now["bars"]),
        waited=its.waited,
        steps_per_second=its.steps,
        collectives_per_second=its.collectives,
    )


def look(lifecycle: Lifecycle, seconds: float) -> list[RankVitals]:
    """Do what ``Group.vitals`` says."""
    sampler = Sampler(lifecycle)
    with stopping.button("looking at the ranks was interrupted") as button:
        found = sampler.look()
        if seconds > 0 and any(rank.state == "busy" for rank in found):
            button.wait_for([Future()], seconds)
            found = sampler.look()
    return found
