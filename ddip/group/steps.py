"""Are the ranks in step? In each group they must have begun as many collectives, since the n-th of one rank meets the
n-th of the others, in whatever cells they were begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ddip.errors import ranks_text
from ddip.protocol.rank_spec import DEFAULT_GROUP
from ddip.protocol.reports import Begun

Numbers: TypeAlias = dict[int, int]
"""Of collectives, by rank."""


@dataclass(frozen=True)
class Uneven:
    """A group whose ranks have begun different numbers of collectives."""

    group: str
    """As the ranks name it, and the device."""
    begun: Numbers

    @property
    def ahead(self) -> list[int]:
        """Ranks that have begun more than others."""
        return [rank for rank, n in self.begun.items() if n > self.least]

    @property
    def least(self) -> int:
        """What all of them have begun."""
        return min(self.begun.values())

    def text(self) -> str:
        """Which group, and how many each rank has begun."""
        by_number: dict[int, list[int]] = {}
        for rank, n in self.begun.items():
            by_number.setdefault(n, []).append(rank)
        numbers = ", ".join(f"{ranks_text(ranks)}: {n}" for n, ranks in sorted(by_number.items()))
        name = (
            "the default group"
            if self.group.startswith(DEFAULT_GROUP)
            else f"a group of {ranks_text(list(self.begun))}"
        )
        return f"{name} ({numbers})"


class Steps:
    """What the ranks have begun since their group was formed, as far as they have told."""

    def __init__(self) -> None:
        self._known: dict[int, Begun] = {}
        self._meant: dict[str, Numbers] = {}
        """Differences that are left alone."""

    def forget(self) -> None:
        """The ranks are in a new group."""
        self._known.clear()
        self._meant.clear()

    def are_sends_uneven(self, reports: Mapping[int, Begun], size: int) -> bool:
        """Have ranks begun different numbers of sends and receives since they last told?

        Where a cell has failed, some of them may wait for one that never comes, and would take the next one.
        """
        numbers: dict[str, Numbers] = {}
        for rank, report in reports.items():
            for group, (_, sends, members) in report.items():
                ranks = range(size) if members is None else members
                former = self._known.get(rank, {}).get(group, (0, 0))[1]
                numbers.setdefault(group, dict.fromkeys(ranks, 0))[rank] = sends - former
        return any(len(set(sends.values())) > 1 for sends in numbers.values())

    def take(self, reports: Mapping[int, Begun]) -> None:
        """What these ranks have begun so far."""
        self._known.update(reports)

    def uneven(self, size: int) -> list[Uneven]:
        """The groups of `size` ranks, and of fewer, that are out of step; not those that were so before, and meant.

        A rank that has told nothing yet has begun nothing. One that tells nothing of a group has left it.
        """
        groups: dict[str, Numbers] = {}
        for report in self._known.values():
            for group, (_, _, members) in report.items():
                if group not in groups:
                    ranks = range(size) if members is None else members
                    groups[group] = {rank: self._begun(rank, group) for rank in ranks if self._is_in(rank, group)}
        return [
            Uneven(group, begun)
            for group, begun in sorted(groups.items())
            if len(set(begun.values())) > 1 and begun != self._meant.get(group)
        ]

    def _is_in(self, rank: int, group: str) -> bool:
        return rank not in self._known or group in self._known[rank]

    def _begun(self, rank: int, group: str) -> int:
        return self._known[rank][group][0] if rank in self._known else 0

    def accept(self, uneven: list[Uneven]) -> None:
        """They are meant; what is begun from here on is news again."""
        self._meant.update({one.group: one.begun for one in uneven})
