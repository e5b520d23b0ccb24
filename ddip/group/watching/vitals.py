"""Sample the activity of each rank, and its rates over the last seconds, while its cell runs.

    Sampler.look  --on_rank.current_vitals-->  control thread of each rank    a late answer is read at the next sample
                  <-----Vitals-------  rates: changes since an earlier answer in the same cell

Callable on any thread. It never waits for a rank that stands still; such a rank is not asked again before it has
answered.
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
"""Length of the window for rates."""
LATE_SECONDS = 3.0
"""Time for which a rank's last answer stands in for a late one."""
SAME_BEGIN = 0.1
"""Maximum difference, in seconds, between the start times that two answers in the same cell report."""
LEAST_SECONDS = 0.5
"""Minimum time, in seconds, that a cell must have run for a rate to be computed."""
PERIOD, PERIOD_OF_A_RANK, LONGEST_PERIOD = 1.0, 0.4, 10.0
"""Seconds between samples: at least, per rank of the group, and at most. A sample costs each process about a
millisecond, so all processes together take less than a hundredth of a core."""
LOOK_OF_A_RANK, LONGEST_LOOK = 0.05, 1.0
"""Seconds between a rank's checks whether it waits for others: per rank of the group, and at most."""
IDLE_CORES = 0.1
"""CPU use of an idle rank, in cores, below which it is not shown."""


def sample_period(size: int) -> float:
    """Return the seconds between two samples of a group of `size` ranks: longer for larger groups."""
    return min(LONGEST_PERIOD, max(PERIOD, PERIOD_OF_A_RANK * size))


@dataclass(frozen=True)
class Rates:
    """Rates between two answers of a rank, per second or as a share; None: too little time between them."""

    steps: float | None = None
    collectives: float | None = None
    waited: float | None = None
    cores: float | None = None


def compute_rates(answers: Sequence[Vitals]) -> Rates:
    """Compute a rank's rates up to the last of its `answers`: over the window, or since its cell began."""
    *former, now = answers
    recent = [answer for answer in former if answer["at"] >= now["at"] - WINDOW_SECONDS] or former[-1:]
    cores = (now["cpu"] - recent[0]["cpu"]) / (now["at"] - recent[0]["at"]) if recent else None
    same_cell = [answer for answer in recent if _cell_began(answer) is not None and _is_same_cell(answer, now)]
    if not same_cell or now["at"] - same_cell[0]["at"] < LEAST_SECONDS:
        return Rates(cores=cores)
    first, seconds = same_cell[0], now["at"] - same_cell[0]["at"]
    looked = now["looked"] - first["looked"]
    waited = None
    if now["waited"] is not None and first["waited"] is not None and looked >= LEAST_SECONDS:
        waited = (now["waited"] - first["waited"]) / looked
    steps, begun = now["steps"] - first["steps"], now["collectives"] - first["collectives"]
    return Rates(steps / seconds, max(0, begun) / seconds, waited, cores)


def _cell_began(answer: Vitals) -> float | None:
    return None if answer["busy_for"] is None else answer["at"] - answer["busy_for"]


def _is_same_cell(answer: Vitals, other: Vitals) -> bool:
    """Return whether two answers were given during the same cell."""
    begun, other_begun = _cell_began(answer), _cell_began(other)
    return begun is not None and other_begun is not None and abs(begun - other_begun) < SAME_BEGIN


class Sampler:
    """Samples the ranks of a group repeatedly."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._ranks: Ranks | None = None
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        """Requests without an answer, by engine."""
        self._answers: dict[int, collections.deque[Vitals]] = {}
        self._answered_at: dict[int, float] = {}
        """Time of the last answer of each engine, on ``time.monotonic``."""

    def look(self) -> list[RankVitals]:
        """Ask all ranks, and return their vitals in rank order; none while the group is starting.

        Takes up to ANSWER_SECONDS, and as long again per late rank. Rates need an earlier call. Raises GroupError if
        the group has ended.
        """
        ranks, spec = self._lifecycle.parts.ranks, self._lifecycle.spec
        if not ranks.cluster.connected:  # it is still starting
            return []
        members, live = list(ranks.members), ranks.cluster.live
        engines = [member.engine for member in members if member.engine in live]
        self._drop_others([] if ranks is not self._ranks else engines)
        self._ranks = ranks
        self._collect_answers()
        self._send_requests(ranks, engines, len(members))
        self._collect_answers()
        found = []
        for rank, member in enumerate(members):
            device = spec.device_name(rank) if rank < spec.size else ""  # the group is changing
            known = RankVitals(rank, member.host, member.pid, device, "no answer")
            found.append(
                self._vitals_of(ranks, known, member.engine)
                if member.engine in engines
                else replace(known, state="ended")
            )
        return found

    def _drop_others(self, engines: Sequence[int]) -> None:
        """Drop all records of engines other than these."""
        known: list[dict[int, Any]] = [self._asked, self._answers, self._answered_at]
        for table in known:
            for engine in table.keys() - set(engines):
                del table[engine]

    def _send_requests(self, ranks: Ranks, engines: Sequence[int], size: int) -> None:
        call = on_rank.current_vitals(min(LONGEST_LOOK, LOOK_OF_A_RANK * size), 2 * sample_period(size) + 1)
        new = []
        for engine in engines:
            if engine not in self._asked:
                with contextlib.suppress(KeyError):  # it has just ended
                    self._asked[engine] = ranks.cluster.call_on_control_channel(engine, call)
                    new.append(self._asked[engine])
        concurrent.futures.wait(new, timeout=ANSWER_SECONDS)

    def _collect_answers(self) -> None:
        """Store the answers that have arrived."""
        for engine in [engine for engine, asked in self._asked.items() if asked.done()]:
            answer: Mapping[str, Any] = self._asked.pop(engine).result()
            self._answered_at[engine] = time.monotonic()
            if "ok" in answer:
                self._answers.setdefault(engine, collections.deque(maxlen=32)).append(answer["ok"])
            else:
                log.debug("engine %d could not tell what it does: %s", engine, answer.get("traceback", answer))
                self._answers.pop(engine, None)

    def _vitals_of(self, ranks: Ranks, rank: RankVitals, engine: int) -> RankVitals:
        """Return the vitals of a running `rank` from its answers, unless the last one is too old."""
        answers = self._answers.get(engine)
        is_late = engine in self._asked and time.monotonic() > self._answered_at.get(engine, 0.0) + LATE_SECONDS
        if answers and not is_late:
            lost = rank.rank in ranks.gpu_lost
            return with_answer(rank, answers[-1], compute_rates(list(answers)), "GPU lost" if lost else "idle")
        stopped = ranks.stopped_text(rank.rank) if is_late else ""
        return replace(rank, state="stopped", doing=stopped) if stopped else rank


def with_answer(rank: RankVitals, now: Vitals, measured: Rates, idle_state: RankState) -> RankVitals:
    """Return `rank` with its answer and its rates; `idle_state` is its state if it is not busy."""
    device = now["device"]
    rank = replace(
        rank,
        state="busy" if now["busy"] else idle_state,
        doing=now["doing"],
        cell=now["cell"],
        seconds=now["busy_for"] if now["busy"] else now["seconds"],
        steps=now["steps"],
        collectives=now["collectives"],
        cores=measured.cores if now["busy"] or (measured.cores or 0.0) >= IDLE_CORES else None,
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
        waited=measured.waited,
        steps_per_second=measured.steps,
        collectives_per_second=measured.collectives,
    )


def sample_ranks(lifecycle: Lifecycle, seconds: float) -> list[RankVitals]:
    """Return the vitals of all ranks. If a rank is busy, sample twice, `seconds` apart, to measure its rates.

    If `seconds` is 0, sample once, without rates. Raises RequestInterrupted, and GroupError if the group has ended.
    """
    sampler = Sampler(lifecycle)
    with stopping.note_presses("polling the ranks was interrupted") as button:
        found = sampler.look()
        if seconds > 0 and any(rank.state == "busy" for rank in found):
            button.wait_for([Future()], seconds)
            found = sampler.look()
    return found
