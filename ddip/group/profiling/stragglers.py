"""Find which rank kept which others waiting: pure functions on the ranks' reports of a profiled cell.

A rank waits in a collective from when it has begun it until the last rank of its group has, unless it does other work
meanwhile. Of collectives begun in a row without waiting for their results (DDP's buckets), a moment counts only for the
first.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ddip.output.tables.profile_report import Collective, RankProfile
from ddip.protocol.collective import group_text
from ddip.protocol.reports import CollectiveRow, ProfileReport

Key: TypeAlias = "tuple[str, int, int]"
"""Name of the group, number in it, and count of earlier collectives with both, as a cell may rebuild its group."""


@dataclass(frozen=True)
class _Arrivals:
    """One collective, with times in nanoseconds on the notebook's clock."""

    rows: Mapping[int, CollectiveRow]
    begun: Mapping[int, int]
    last: int | None
    """The rank that began it last; None: not all ranks began it."""
    complete: int | None
    """Time until which ranks waited: the last one began it, or their cell ended; None: unknown."""


@dataclass(frozen=True)
class StragglerReport:
    """The profile of each rank and collective, and the seconds that others waited for each rank."""

    ranks: dict[int, RankProfile]
    collectives: list[Collective]
    waited_for: dict[int, float]


def compute_waits(reports: Mapping[int, ProfileReport], offsets: Mapping[int, int], world_size: int) -> StragglerReport:
    """Compute from the `reports` how long ranks waited for others in collectives, in seconds; all by rank.

    `offsets`: how far each rank's clock is ahead of the notebook's, in nanoseconds. `world_size`: number of ranks in
    the group, some of which may have no report.
    """
    arrivals = _find_arrivals(reports, offsets)
    waits: dict[int, float] = {}
    waited_for: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    in_collective: dict[Key, float] = defaultdict(float)
    for rank, report in reports.items():
        exposed = _Exposed(report["communication"], offsets[rank])
        waits[rank], covered = 0.0, 0
        own = sorted((arrival.begun[rank], key) for key, arrival in arrivals.items() if rank in arrival.begun)
        for begun, key in own:
            arrival = arrivals[key]
            if arrival.complete is None or arrival.complete <= max(begun, covered):
                continue
            seconds = exposed.between(max(begun, covered), arrival.complete)
            covered = arrival.complete
            waits[rank] += seconds
            in_collective[key] = max(in_collective[key], seconds)
            for other in _waited_for(arrival):
                waited_for[other][rank] += seconds
    return StragglerReport(
        {rank: _rank_profile(rank, report, waits[rank]) for rank, report in sorted(reports.items())},
        _collective_rows(arrivals, in_collective, world_size),
        {rank: max(by.values()) for rank, by in waited_for.items()},
    )


def _waited_for(arrival: _Arrivals) -> list[int]:
    """Return the rank that began the collective last, or those that never began it."""
    if arrival.last is not None:
        return [arrival.last]
    group = next(iter(arrival.rows.values()))[1]
    return [rank for rank in group if rank not in arrival.rows]


def _find_arrivals(reports: Mapping[int, ProfileReport], offsets: Mapping[int, int]) -> dict[Key, _Arrivals]:
    rows: dict[Key, dict[int, CollectiveRow]] = defaultdict(dict)
    for rank, report in reports.items():
        seen: dict[tuple[str, int], int] = defaultdict(int)
        for row in report["collectives"]:
            rows[row[0], row[2], seen[row[0], row[2]]][rank] = row
            seen[row[0], row[2]] += 1
    ends = {rank: report["end"] - offsets[rank] for rank, report in reports.items()}
    complete_reports = {rank for rank, report in reports.items() if not report["note"]}
    found = {}
    for key, row_of in rows.items():
        begun = {rank: row[6] - offsets[rank] for rank, row in row_of.items()}
        group = next(iter(row_of.values()))[1]
        ops = {row[3] for row in row_of.values()}
        last, complete = None, None
        if len(ops) == 1 and set(group) <= set(row_of):
            last = max(begun, key=lambda rank: begun[rank])
            complete = begun[last]
        elif len(ops) == 1 and all(rank in complete_reports for rank in group if rank not in row_of):
            complete = max(ends[rank] for rank in row_of)  # the missing ranks never began it
        found[key] = _Arrivals(row_of, begun, last, complete)
    return found


class _Exposed:
    """The times when a rank only communicated, on the notebook's clock."""

    def __init__(self, pieces: Sequence[tuple[int, int, float]], offset: int) -> None:
        self._pieces = [(a - offset, b - offset, share) for a, b, share in pieces]
        self._begins = [a for a, _, _ in self._pieces]
        self._before = [0.0, *itertools.accumulate((b - a) * share for a, b, share in self._pieces)]

    def _exposed_until(self, moment: int) -> float:
        i = bisect.bisect_right(self._begins, moment)
        if i == 0:
            return 0.0
        a, b, share = self._pieces[i - 1]
        return self._before[i - 1] + (min(moment, b) - a) * share

    def between(self, begin: int, end: int) -> float:
        """Return the seconds of pure communication between two times, which are in nanoseconds."""
        return (self._exposed_until(end) - self._exposed_until(begin)) / 1e9


def _rank_profile(rank: int, report: ProfileReport, waiting: float) -> RankProfile:
    communication = sum((b - a) * share for a, b, share in report["communication"]) / 1e9
    return RankProfile(
        rank=rank,
        seconds=(report["end"] - report["begin"]) / 1e9,
        compute=report["compute"],
        communication=max(0.0, communication - waiting),
        waiting=waiting,
        loading=report["loading"],
        idle=report["idle"],
        python=report["python"],
        note=report["note"],
    )


def _collective_rows(
    arrivals: Mapping[Key, _Arrivals], waits: Mapping[Key, float], world_size: int
) -> list[Collective]:
    found = []
    for key, arrival in sorted(arrivals.items(), key=lambda item: min(item[1].begun.values())):
        _, group, number, op, shapes, dtypes, _, _ = next(iter(arrival.rows.values()))
        longest = max(row[7] - row[6] for row in arrival.rows.values()) / 1e9
        found.append(
            Collective(
                group=group_text(group, world_size),
                number=number,
                op=op,
                shapes=tuple(tuple(shape) for shape in shapes),
                dtype=dtypes[0] if dtypes else "",
                seconds=max(longest, waits.get(key, 0.0)),  # torch before 2.11 records only the calls
                waiting=waits.get(key, 0.0),
                last=arrival.last,
            )
        )
    return found
