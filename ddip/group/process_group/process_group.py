"""The process group of the ranks: formed, released when somebody waits in it for ever, and formed again.

a cell fails on rank 0, ranks 1-3 wait in all_reduce
    store        :  replaced by what nobody can read               who waits for a key raises
    connections  <- both ends of each, from every rank             those that two ranks share are the group's
    release      -> every rank shuts them down, aborts nccl        who waits in a collective raises
the next cell
    leave, join  -> main thread of every rank                      a new group; the variables are where they were
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddip.errors import GroupError
from ddip.group.members import host_facts
from ddip.group.members.placement import GroupSpec
from ddip.group.members.ranks import Ranks
from ddip.group.process_group import connections
from ddip.group.process_group.iterations import Iterations
from ddip.group.process_group.meeting import Meeting, Meetings
from ddip.group.process_group.network import Network
from ddip.group.process_group.steps import Steps, Uneven
from ddip.output.area import notify
from ddip.output.tables.tables import cut_off_text, places_text
from ddip.protocol import on_rank
from ddip.protocol.location import StackLocation
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import Begun, CellReport, Going

log = logging.getLogger("ddip")

OUT_OF_STEP = """\
the ranks have begun different numbers of collectives in {uneven}{where}
what is pending is given up, and the group is formed again before the next cell; if you mean it, %%dip --unmatched \
leaves the group as it is"""
SET_UP_SHARE = 0.15
"""Of the time for forming the group, what gloo gets to connect the ranks."""
GROUPS_EACH = 1_000_000
"""Names for the groups that cells make while one group is formed: torch makes them of a count."""
TELL_SECONDS = 5.0
"""How long a rank may take to tell of collectives, where some seem to be out of step."""
ADOPT_SECONDS = 2.0
"""How long a rank may take to note that a group is its own."""


class ProcessGroupManager:
    """The one group that the ranks are in, one after the other."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._formed = 0
        self._meetings = Meetings(ranks)
        self._meeting: Meeting | None = None
        """Where the ranks met last."""
        self._made: dict[int, list[tuple[Any, ...]]] = {}
        """Connections of each rank that were made when the group was formed: to a rank that has ended nobody can tell
        them any more, and a process that it has forked may keep them open."""
        self._steps = Steps()
        self.iterations = Iterations(ranks, self.release)
        self._groups = 1
        """How many groups each rank has made in the group that was formed last; it is 1 of them."""
        self.healthy = False
        """False if the group must be formed (again) before anything can be done with it."""
        self.generation = 0
        """Number of the group that the ranks are in: of those that ddip or a cell has formed."""

    def networks(self) -> dict[int, Network]:
        """By which address and interface each host of a group on several takes part in it, by the host's number."""
        found = {} if self._meeting is None else dict(zip(self._meeting.hosts, self._meeting.networks, strict=True))
        return found if len(found) > 1 else {}

    def join(self, spec: GroupSpec, collect: bool, deadline: float) -> None:
        """Have all ranks join a new group; until `deadline` on ``time.monotonic``. Raises GroupError.

        It is tried twice: while gloo forms the group it takes connections of anybody, who can spoil it.
        """
        try:
            self._form(spec, collect, deadline)
        except GroupError as error:
            if self._ranks.ended or self._ranks.abandoned or time.monotonic() > deadline:
                raise
            log.debug("forming the group once more: %s", error)
            try:
                self.leave(deadline)
            except GroupError:
                raise error from None
            self._form(spec, collect, deadline)

    def _form(self, spec: GroupSpec, collect: bool, deadline: float) -> None:
        self.healthy, self._made = False, {}
        self._steps.forget()
        if not self._formed and len(spec.hosts) == 1:
            host_facts.tell_interfaces()
        former, self._meeting = self._meeting, self._prepare(range(spec.size))
        self._groups = self._first_group
        made = self._join([self._meeting], spec, collect, deadline, SET_UP_SHARE)
        if connections.is_spoilt(made):
            self.release()
            raise GroupError("forming the group failed: somebody else has connected to a rank meanwhile")
        if former is not None:
            self._meetings.over(former)
        self._made = connections.shared(
            {rank: [tuple(ends) for ends in connected] for rank, (connected, _) in enumerate(made)}
        )
        self.healthy = True
        self.generation += 1

    @property
    def _first_group(self) -> int:
        """How many groups count as made when the cells begin to make some."""
        return (self._formed - 1) * GROUPS_EACH + 1

    def _prepare(self, ranks: Sequence[int]) -> Meeting:
        self._formed += 1
        return self._meetings.prepare(self._formed, ranks)

    def _join(
        self,
        meetings: Sequence[Meeting],
        spec: GroupSpec,
        collect: bool,
        deadline: float,
        share: float = 1.0,
        together: bool = True,
    ) -> list[Any]:
        """Have the ranks of each meeting join a group, as its ranks 0, 1 and so on.

        Connecting them gets a `share` of the time. Returns what ``process_group.join`` does, by rank.
        """
        seconds = max(1.0, (deadline - time.monotonic()) * share)
        calls: dict[int, RemoteCall[object]] = {}
        for meeting in meetings:
            specs = self._meetings.specs(meeting, spec, collect=collect, groups=self._first_group, seconds=seconds)
            calls |= {rank: on_rank.join(rank_spec) for rank, rank_spec in specs.items()}
        return self._ranks.ask_each(
            calls,
            deadline,
            release=(lambda: self._release(meetings)) if together else None,  # who waits for one that does not come
            together=together,
        )

    def attempt(self, groups: Sequence[Sequence[int]], spec: GroupSpec, collect: bool, seconds: float) -> None:
        """Have ranks form each of `groups` for once, use it, and leave it; at most `seconds` for each of these.

        Raises RequestFailed, which names all ranks that failed if each group is one rank.
        """
        self.healthy = False
        ranks = [rank for group in groups for rank in group]
        meetings = [self._prepare(group) for group in groups]
        together = len(groups) < len(ranks)
        try:
            self._of(ranks, on_rank.leave(), seconds, together)
            self._join(meetings, spec, collect, time.monotonic() + seconds, together=together)
            self._of(ranks, on_rank.check(), seconds, together, meetings)
            self._of(ranks, on_rank.leave(), seconds, together)
        finally:
            for meeting in meetings:
                self._meetings.over(meeting)

    def check(self, deadline: float) -> None:
        """Have all ranks use the group once; raises GroupError, and then it must be formed again.

        Nothing is done where they are out of step, and that is meant: this would meet what is pending.
        """
        ranks = range(len(self._ranks.members))
        answers = self._ranks.call_on_control_channel(ranks, on_rank.begun(), seconds=TELL_SECONDS)
        now = Steps()
        now.take({rank: begun for rank, begun in answers.items() if begun is not None})
        if now.uneven(len(ranks)):
            return
        try:
            self._of(ranks, on_rank.check(), deadline - time.monotonic(), True)
        except BaseException:
            self.healthy = False
            raise

    def _of(
        self,
        ranks: Sequence[int],
        call: RemoteCall[object],
        seconds: float,
        together: bool,
        meetings: Sequence[Meeting] = (),
    ) -> None:
        """Ask `ranks` for something, for at most `seconds`; those that wait for others are freed."""
        deadline = time.monotonic() + seconds
        release = (lambda: self._release(meetings)) if meetings else self.release
        calls = dict.fromkeys(ranks, call)
        self._ranks.ask_each(calls, deadline, release=release if together else None, together=together)

    def leave(self, deadline: float) -> Going:
        """Have all ranks leave their group, whatever state it is in; returns what goes with it."""
        if not self.healthy:
            self.release()
        self.healthy = False
        going = self._ranks.ask_each(dict.fromkeys(self._ranks.live, on_rank.leave()), deadline)
        return {
            "wrappers": max((one["wrappers"] for one in going), default=0),
            "meshes": max((one["meshes"] for one in going), default=0),
            "subgroups": max((one["subgroups"] for one in going), default=0),
            "rpc": any(one["rpc"] for one in going),
        }

    def close(self) -> None:
        """There will be no group any more."""
        self._meetings.close()

    def release(self, ranks: Collection[int] | None = None) -> None:
        """Make every collective that waits fail, now: on all ranks, or on these, if others run another cell."""
        self.healthy = False
        self._release([] if self._meeting is None else [self._meeting], ranks)

    def _release(self, meetings: Sequence[Meeting], ranks: Collection[int] | None = None) -> None:
        """The same in the groups of these `meetings`."""
        live = self._ranks.live
        for meeting in meetings:
            self._meetings.poison(meeting)
        now = connections.shared(self._ranks.connections(live))
        ours = {rank: list({*now[rank], *self._made.get(rank, ())}) for rank in live}
        cut_off: dict[int, bool] = {}
        for meeting in meetings:
            calls = {
                rank: on_rank.release(meeting.store, its)
                for rank, its in ours.items()
                if ranks is None or rank in ranks
            }
            answers = self._ranks.call_each_on_control_channel(calls)
            cut_off |= {
                rank: answer or cut_off.get(rank, False) for rank, answer in answers.items() if answer is not None
            }
        if any(cut_off.values()):
            notify(cut_off_text(cut_off))

    def update_health(self, reports: Mapping[int, CellReport | None], failed: bool, unmatched: bool = False) -> None:
        """Look at what the ranks that have run a cell report of their group: it may have to be formed again.

        The user is told if a good cell has left the ranks out of step, unless that is meant (`unmatched`).
        """
        told = {rank: report for rank, report in reports.items() if report is not None}
        size = len(self._ranks.members)
        if len(told) < len(reports) or any(report["released"] for report in told.values()):
            self.healthy = False
        elif all(report["state"] == "ours" for report in told.values()):
            self._level_groups([report["groups"] for report in told.values()])
            self._take_steps({rank: report["begun"] for rank, report in told.items()}, failed, unmatched)
            if failed and len(told) == size and _differ([report["changes"] for report in told.values()]):
                self.healthy = False  # one rank has taken a step that another has not
        else:
            self.healthy = len(told) == size and all(_fits(report, rank, size) for rank, report in told.items())
            if self.healthy:
                self._adopt()

    def _adopt(self) -> None:
        """The group that a cell has formed in place of ours is ours from now on; it may listen at our port."""
        ranks = range(len(self._ranks.members))
        adopt = on_rank.adopt(*self._meetings.hold_port())
        answers = self._ranks.call_on_control_channel(ranks, adopt, seconds=ADOPT_SECONDS)
        self.healthy = all(answer is not None for answer in answers.values())
        self.generation += 1
        self._steps.forget()

    def _take_steps(self, begun: Mapping[int, Begun], failed: bool, unmatched: bool) -> None:
        """Compare the collectives that each rank has begun, and the messages if the cell has failed."""
        size = len(self._ranks.members)
        messages = failed and self._steps.are_messages_uneven(begun, size)
        self._steps.take(begun)
        if messages:
            self.healthy = False
        elif self.healthy and self._steps.uneven(size):
            self._judge_steps(failed, unmatched)

    def _level_groups(self, made: Sequence[int]) -> None:
        """Some ranks may have made groups without the others, which has no effect but on the name of the next one."""
        if min(made) < max(made) or (max(made) > self._groups and len(made) < len(self._ranks.members)):
            self._ranks.call_on_control_channel(self._ranks.live, on_rank.set_groups_made(max(made)))
        self._groups = max(made)

    def _judge_steps(self, failed: bool, unmatched: bool) -> None:
        """Act on ranks that have begun more collectives than others.

        Nothing is done about a group in which a thread may still catch up: a later cell may find it even, or prove it
        uneven. After a failed cell, only a group that threads have used is such a one.
        """
        size = len(self._ranks.members)
        answers = self._ask(range(size), on_rank.begun())  # ranks that were not in the cell, and threads that go on
        self._steps.take({rank: begun for rank, begun in answers.items() if begun is not None})
        found = self._steps.uneven(size)
        uneven = [one for one in found if one.is_sure or (failed and not one.by_threads)]
        if unmatched and not failed:
            self._steps.accept(uneven)
        elif failed:
            self.healthy = not uneven
        else:
            for one in uneven:
                self._tell_uneven(one)

    def _ask(self, ranks: Sequence[int], call: RemoteCall[R]) -> dict[int, R | None]:
        return self._ranks.call_on_control_channel(ranks, call, seconds=TELL_SECONDS)

    def _tell_uneven(self, uneven: Uneven) -> None:
        """Report that a good cell has left a group out of step."""
        self.healthy = False
        answers = self._ask(uneven.ahead, on_rank.line_of(uneven.group, uneven.least))
        places: dict[int, StackLocation | None] = {
            rank: StackLocation(**place) for rank, place in answers.items() if place is not None
        }
        where = f", the first too many here:\n{places_text(places)}" if places else ""
        notify(OUT_OF_STEP.format(uneven=uneven.text(), where=where))


def _differ(changes: Sequence[Mapping[str, int]]) -> bool:
    """Have ranks written unequally often to anything that all of them have?"""
    first, *others = changes
    shared = set(first).intersection(*others)
    return any(one[owner] != first[owner] for one in others for owner in shared)


def _fits(report: CellReport, rank: int, size: int) -> bool:
    """Has the cell formed a group in which `rank` is what it is in ours?"""
    return report["state"] == "other" and (report["rank"], report["size"]) == (rank, size)
