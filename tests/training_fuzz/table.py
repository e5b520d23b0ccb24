"""The fuzzer's table: kind of fault x part of the loop x outcome, and a line for each bad case."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping

from .plan import BAD, OUTCOMES, Fault

NOT_REACHED = "not reached"


class Table:
    """Outcomes of all trials."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rows: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._loops: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._bad: list[tuple[Fault, str, str]] = []
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, fault: Fault, outcome: str, reason: str, seconds: float) -> None:
        """Add one trial."""
        self._rows[fault.kind, fault.part][outcome] += 1
        self._loops[fault.loop][outcome] += 1
        self._seconds[fault.kind].append(seconds)
        if outcome in BAD:
            self._bad.append((fault, outcome, reason))

    @property
    def count(self) -> int:
        """Return the number of trials so far."""
        return sum(sum(counts.values()) for counts in self._rows.values())

    @property
    def failed(self) -> bool:
        """Return True if any trial has ended badly."""
        return bool(self._bad)

    def text(self, places: Mapping[str, tuple[Collection[str], Collection[str]]]) -> str:
        """Return the whole table, with the covered and existing places of each loop."""
        columns = [*OUTCOMES, NOT_REACHED]
        lines = [f"\n{'fault':8} {'part':24} " + " ".join(f"{name:>11}" for name in columns)]
        for (kind, part), counts in sorted(self._rows.items()):
            lines.append(f"{kind:8} {part:24} " + _figures(counts, columns))
        whole = sum(self._rows.values(), collections.Counter[str]())
        lines.append(f"{'all':33} " + _figures(whole, columns))
        lines.append(f"\n{'loop':33} " + " ".join(f"{name:>11}" for name in columns) + "  places covered / there")
        for loop, counts in sorted(self._loops.items()):
            used, there = places.get(loop, ((), ()))
            own = [place for place in there if place.startswith("loop:")]
            covered = f"{len(used)} / {len(there)}, own lines {len(set(own) & set(used))} / {len(own)}"
            lines.append(f"{loop:33} {_figures(counts, columns)}  {covered}")
        used = sum(len(one) for one, _ in places.values())
        there = sum(len(all) for _, all in places.values())
        lines.append(f"places covered / there: {used} / {there}")
        for kind, seconds in sorted(self._seconds.items()):
            lines.append(f"{kind:8} {len(seconds):5} faults, {sum(seconds) / len(seconds):.2f} s each")
        for fault, outcome, reason in self._bad:
            lines.append(f"\n{outcome}: python -m tests.training_fuzz --replay '{fault}'\n    {reason}")
        lines.append(f"\nseed {self._seed}: {whole.total()} faults, {len(self._bad)} bad")
        return "\n".join(lines)


def _figures(counts: Mapping[str, int], columns: Collection[str]) -> str:
    return " ".join(f"{counts.get(name, 0) or '.':>11}" for name in columns)
