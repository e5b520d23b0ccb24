"""Decide whether the ranks that still run a cell wait for collectives that can never complete.

A rank waits in vain if it has begun an operation in a group and a member of that group will never begin its part,
because the cell has ended there, no thread of it may begin more, and no other cell does. The rank need not wait for the
whole `failure_grace` then:

    rank 0    raises                                       has begun 7 collectives of the default group, and ends
    rank 1    waits in its 8th collective of that group    in vain
    rank 2    computes                                     may raise an error of its own: nothing is aborted yet

All running ranks must wait in vain, at two looks in a row: a rank that computes, or is about to fail by itself, is left
alone for the grace. After a stop, ranks also wait in vain for each other, as in a deadlock: none begins its part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ddip.group.members.members import Members
from ddip.group.process_group.steps import group_members
from ddip.protocol import on_rank
from ddip.protocol.reports import Begun, CellReport, GroupUse, PendingWait

LOOK_SECONDS, MOST_SECONDS = 0.02, 1.0
"""Shortest and longest pause between two looks; it doubles with each look, until the cell ends on another rank."""
ANSWER_SECONDS = 0.2
"""Time for the ranks to answer; a rank that does not answer does not wait in a collective that Python knows."""


class VainWaits:
    """Looks at the ranks of one cell until their waits in vain are proved.

    `former` returns the operations that a rank had begun before the cell; None if they are unknown.
    """

    def __init__(self, ranks: Members, former: Callable[[int], Begun | None], began: float) -> None:
        self._ranks = ranks
        self._former = former
        self._due, self._pause, self._finished = began, LOOK_SECONDS, 0
        self._last: dict[int, PendingWait] = {}
        self._is_stopped = False
        self.missing: set[int] = set()
        """The ranks on which the cell has ended without their parts of the operations, once that is proved."""

    def are_proved(
        self,
        running: Sequence[int],
        reports: Mapping[int, CellReport | None],
        ended: Collection[int],
        now: float,
        is_stopped: bool = False,
    ) -> bool:
        """Ask the `running` ranks where they wait, if it is time; return True if all wait in vain.

        The look before must have found the same waits. `reports`: those of the ranks on which the cell has ended, by
        rank; None without one. `ended`: ranks whose processes have ended. `now`: ``time.monotonic``. If the cell
        `is_stopped`, it suffices that all wait, and one of them for a part that another has not begun. Call it
        repeatedly: it waits at most ANSWER_SECONDS per question, and returns False between two looks. `missing` then
        names the ranks that were waited for.
        """
        least = 2 * LOOK_SECONDS if is_stopped else LOOK_SECONDS  # an interrupted rank may be about to end by itself
        if len(reports) != self._finished:
            self._due, self._pause, self._finished = now + least, least, len(reports)
        if is_stopped and not self._is_stopped:
            self._is_stopped, self._due, self._pause = True, now, least
        if now < self._due:
            return False
        answers = self._ranks.call_on_control_channel(running, on_rank.pending_wait(), ANSWER_SECONDS)
        last, self._last = self._last, {rank: answer for rank, answer in answers.items() if answer is not None}
        self._due, self._pause = time.monotonic() + self._pause, min(2 * self._pause, MOST_SECONDS)
        if self._last.keys() != set(running) or self._last != last:
            return False
        begun = {rank: report.get("begun", {}) for rank, report in reports.items() if report is not None}
        if not is_stopped and not self._are_in_vain(begun, ended, False):
            return False
        # a thread or task of an ended rank may have begun operations since; a waiting rank has others than it waits for
        asked = sorted({*begun, *running}) if is_stopped else list(begun)
        latest = self._ranks.call_on_control_channel(asked, on_rank.begun_operations(), ANSWER_SECONDS)
        return self._are_in_vain({rank: answer or {} for rank, answer in latest.items()}, ended, is_stopped)

    def _are_in_vain(self, by_ended: Mapping[int, Begun], ended: Collection[int], is_stopped: bool) -> bool:
        """Return True if each rank of the last look waits in vain, or any of a stopped cell; set `missing`.

        `by_ended` has the operations of the ranks that begin no more; of a stopped cell, these are all. `ended`: ranks
        whose processes have ended.
        """
        if is_stopped:
            by_ended = {rank: _without_later(begun) for rank, begun in by_ended.items()}
        size = len(self._ranks.members)
        missing = {
            rank: find_missing(rank, wait["begun"], by_ended, size, self._former(rank))
            for rank, wait in self._last.items()
        }
        proved = (any if is_stopped else all)(
            missing[rank] or uses_groups_of(ended, wait["begun"], self._former(rank), size)
            for rank, wait in self._last.items()
        )
        self.missing = set().union(*missing.values()) if proved else set()
        return proved


def find_missing(
    rank: int, begun: Begun, by_ended: Mapping[int, Begun], size: int, former: Begun | None = None
) -> set[int]:
    """Return the ranks in `by_ended` that will never begin their part of an operation of `rank`.

    `begun` has the operations of `rank`, and `by_ended` those of each rank that begins no more; `size`: number of ranks
    in the default group. `former` has the operations of `rank` before the cell, if known: it need not wait for those
    that earlier cells have left, such as an ``isend`` that a later cell receives.
    """
    missing = set()
    for group, use in begun.items():
        before = (former or {}).get(group)
        done, messages = (before["collectives"], before["messages"]) if before else (0, dict[str, int]())
        members = group_members(use, size)
        for other, theirs in by_ended.items() if rank in members else ():
            lacking = theirs.get(group)
            if lacking is None or group_members(lacking, size) != members or lacking["may_begin"] != "no":
                continue
            new = {way for way, number in use["messages"].items() if number > messages.get(way, 0)}
            if use["collectives"] > max(lacking["collectives"], done) or _lacks_message(
                members.index(rank), use, members.index(other), lacking, new
            ):
                missing.add(other)
    return missing


def uses_groups_of(ended: Collection[int], begun: Begun, former: Begun | None, size: int) -> bool:
    """Return True if a rank has used groups in this cell, and each of them has lost a member.

    `ended` are the ranks whose processes have ended; `size`: number of ranks in the default group. `begun` and `former`
    have the rank's operations now and before the cell; `former` is None if they are unknown. Only collectives count as
    use.
    """
    used = [
        set(group_members(use, size))
        for group, use in begun.items()
        if use["collectives"] > ((former or {}).get(group) or {"collectives": 0})["collectives"]
    ]
    return bool(used) and all(members.intersection(ended) for members in used)


def _without_later(begun: Begun) -> Begun:
    """Return `begun` of a rank that begins no more operations."""
    return {group: {**use, "may_begin": "no"} for group, use in begun.items()}


def _lacks_message(rank: int, use: GroupUse, ended: int, ended_use: GroupUse, new: Collection[str]) -> bool:
    """Return True if a message of `rank` has no counterpart on the ended rank `ended`.

    Both are numbers in the group. Only messages in the directions `new` count, such as ``to 1``.
    """
    source, target = f"from {ended}", f"to {ended}"
    received = source in new and use["messages"][source] > ended_use["messages"].get(f"to {rank}", 0)
    sent = target in new and use["messages"][target] > ended_use["messages"].get(f"from {rank}", 0)
    return received or (sent and "from any" not in ended_use["messages"])
