"""Compare the numbers of collectives that the ranks have begun in each group.

The numbers must be equal, since the n-th collective of one rank meets the n-th of the others, whichever cells began
them. They cannot be compared while a thread may still catch up on a rank that is behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ddip.errors import ranks_text
from ddip.protocol.rank_spec import DEFAULT_GROUP
from ddip.protocol.reports import Begun, GroupUse

Numbers: TypeAlias = dict[int, int]
"""Numbers of collectives, by rank."""


@dataclass(frozen=True)
class StepMismatch:
    """A group whose ranks have begun different numbers of collectives."""

    group: str
    """The group's name on the ranks, and the device."""
    begun: Numbers
    is_sure: bool = True
    """False if a thread of a rank that is behind may still begin more."""
    by_threads: bool = False
    """True if threads other than main threads have begun operations in the group."""

    @property
    def ahead(self) -> list[int]:
        """The ranks that have begun more collectives than the rank with the fewest."""
        return [rank for rank, n in self.begun.items() if n > self.least]

    @property
    def least(self) -> int:
        """The number of collectives that all of them have begun."""
        return min(self.begun.values())

    def text(self) -> str:
        """Return the name of the group, and how many collectives each rank has begun."""
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


def group_members(use: GroupUse, size: int) -> list[int]:
    """Return the ranks of the group of `use`; `size`: number of ranks in the default group."""
    return list(range(size)) if use["ranks"] is None else use["ranks"]


class Steps:
    """The operations that each rank has begun since its group was formed, as last reported."""

    def __init__(self) -> None:
        self._known: dict[int, Begun] = {}
        self._accepted: dict[str, Numbers] = {}
        """Intended differences, by group."""
        self.accepted_different: set[str] = set()
        """Groups in which different collectives are intended."""

    def forget(self) -> None:
        """Discard all numbers, as the ranks are in a new group."""
        self._known.clear()
        self._accepted.clear()
        self.accepted_different.clear()

    def known(self) -> Mapping[int, Begun]:
        """Return the last report of each rank since its group was formed."""
        return self._known

    def known_of(self, rank: int) -> Begun | None:
        """Return the last report of `rank`; None if it has not reported since the group was formed."""
        return self._known.get(rank)

    def are_messages_uneven(self, reports: Mapping[int, Begun], size: int) -> bool:
        """Return whether ranks have begun a send without its receive, or a receive without its send, since `update`.

        The next cell's sends and receives would then be paired with those. `reports`: the operations that each rank has
        begun so far; `size`: number of ranks in the default group. Groups that threads of cells still use are left out.
        """
        groups: dict[str, list[int]] = {}
        for report in reports.values():
            for group, use in report.items():
                groups.setdefault(group, group_members(use, size))
        return any(self._is_uneven_in(group, members, reports) for group, members in groups.items())

    def _is_uneven_in(self, group: str, members: Sequence[int], reports: Mapping[int, Begun]) -> bool:
        pending: dict[tuple[int, int], int] = {}
        """Messages sent but not received, by sender and receiver as ranks of the group."""
        from_any = dict.fromkeys(range(len(members)), 0)
        for own_index, rank in enumerate(members):
            use = reports.get(rank, {}).get(group)
            if use is None:
                continue
            if use["may_begin"] == "yes" and use["by_threads"]:
                return False
            former = self._known.get(rank, {}).get(group, {"messages": {}})["messages"]
            for direction, number in use["messages"].items():
                towards, _, peer = direction.partition(" ")
                new = number - former.get(direction, 0)
                if peer == "any":
                    from_any[own_index] = new
                else:
                    endpoints = (own_index, int(peer)) if towards == "to" else (int(peer), own_index)
                    pending[endpoints] = pending.get(endpoints, 0) + (new if towards == "to" else -new)
        for receiver, awaited in from_any.items():
            arriving = [n for (_, end), n in pending.items() if end == receiver]
            if sum(arriving) != awaited or min(arriving, default=0) < 0:
                return True
        return False

    def update(self, reports: Mapping[int, Begun]) -> None:
        """Store the latest reports of these ranks."""
        self._known.update(reports)

    def uneven(self, size: int) -> list[StepMismatch]:
        """Return the groups whose ranks have begun different numbers, except for accepted differences.

        `size`: number of ranks in the default group. A rank without any report has begun nothing; one that does not
        report a group has left it, or cannot know.
        """
        groups: dict[str, list[int]] = {}
        for report in self._known.values():
            for group, use in report.items():
                groups.setdefault(group, group_members(use, size))
        found = []
        for group, members in sorted(groups.items()):
            begun = {rank: self._begun_by(rank, group) for rank in members if self._is_in(rank, group, members, size)}
            if len(set(begun.values())) > 1 and begun != self._accepted.get(group):
                by_threads = any(self._known[rank][group]["by_threads"] for rank in begun if rank in self._known)
                found.append(StepMismatch(group, begun, self._is_sure(group, begun), by_threads))
        return found

    def _is_in(self, rank: int, group: str, members: Sequence[int], size: int) -> bool:
        if rank not in self._known:
            return True
        use = self._known[rank].get(group)
        return use is not None and group_members(use, size) == members

    def _begun_by(self, rank: int, group: str) -> int:
        return self._known[rank][group]["collectives"] if rank in self._known else 0

    def _is_sure(self, group: str, begun: Numbers) -> bool:
        """Return whether no rank that is behind can begin further collectives in `group`.

        A thread that has not used the group so far could begin one, but a rank's "maybe" counts only in groups in which
        main threads have not begun all collectives so far.
        """
        most = max(begun.values())
        uses = {rank: self._known[rank][group] for rank in begun if rank in self._known}
        by_main = all(use["by_main"] for use in uses.values())
        behind = {uses[rank]["may_begin"] for rank, n in begun.items() if n < most and rank in uses}
        return "yes" not in behind and (by_main or "maybe" not in behind)

    def accept(self, uneven: list[StepMismatch]) -> None:
        """Accept these differences as intended; only further ones are found from now on."""
        self._accepted.update({group.group: group.begun for group in uneven})
        self.accepted_different.update(self._accepted)  # their n-th collectives are not meant to match
