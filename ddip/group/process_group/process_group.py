"""Form the process group of the ranks, abort its collectives when a rank waits in vain, and rebuild it.

a cell fails on rank 0, ranks 1-3 wait in all_reduce
    store        :  replaced by an unreadable one                  waits for a key raise
    connections  <- both ends of each, from every rank             those between two ranks belong to the group
    release      -> every rank shuts them down, aborts nccl        waits in a collective raise
the next cell
    leave, join  -> main thread of every rank                      a new group; variables are unchanged

``ddip/group/repair.py`` describes the whole recovery, of which this is a part.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddip.errors import GroupError
from ddip.group.members.placement import GroupSpec
from ddip.group.members.ranks import Ranks
from ddip.group.process_group import connections, signatures
from ddip.group.process_group.iterations import Iterations
from ddip.group.process_group.meeting import Rendezvous, RendezvousFactory
from ddip.group.process_group.network import Network
from ddip.group.process_group.signatures import DifferentCollectives
from ddip.group.process_group.steps import StepMismatch, Steps
from ddip.output.area import notify
from ddip.output.tables.tables import cut_off_text, places_text
from ddip.protocol import on_rank
from ddip.protocol.location import StackLocation
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import Begun, CellReport, LostObjects

log = logging.getLogger("ddip")

OUT_OF_STEP = """\
the ranks have begun different numbers of collectives in {uneven}{where}
pending collectives are dropped, and the group is rebuilt before the next cell; if intended, %%dip --unmatched keeps \
the group"""
WRONG_RESULTS = """\
their results are wrong: correct the cell, and run it again from correct values; the group is rebuilt before \
the next cell; if intended, %%dip --unmatched keeps the group"""
SET_UP_SHARE = 0.15
"""Share of the time for forming the group that gloo gets to connect the ranks."""
GROUPS_EACH = 1_000_000
"""Number of names reserved for the groups that cells create during the life of one process group; torch makes the
names from a counter."""
TELL_SECONDS = 5.0
"""Time that a rank may take to report its collectives when ranks seem out of step."""
ADOPT_SECONDS = 2.0
"""Time that a rank may take to adopt a group that a cell has formed."""


class ProcessGroupManager:
    """Manages the ranks' current process group, and its successors after a rebuild."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._formed = 0
        self._meetings = RendezvousFactory(ranks)
        self._meeting: Rendezvous | None = None
        """The rendezvous of the current group."""
        self._is_released = True
        """True if the collectives of the current group raise on every rank instead of waiting."""
        self._made_connections: dict[int, list[tuple[Any, ...]]] = {}
        """Connections of each rank from when the group was formed. A rank that has ended can no longer report them, and
        a process that it has forked may keep them open."""
        self._steps = Steps()
        self.iterations = Iterations(ranks, self.release)
        self._groups_made = 1
        """Value of torch's group counter on the ranks, as last reported."""
        self.healthy = False
        """False if the group must be formed or rebuilt before it is used."""
        self.generation = 0
        """Number of the current group, counting those formed by ddip or by a cell."""
        self.has_revived = False
        """True if a rebuild has given DDP wrappers rank 0's parameters, until the next fault of equal ranks."""

    def networks(self) -> dict[int, Network]:
        """Return address and interface of each host by its number.

        Empty if the group is on one host or not formed.
        """
        found = {} if self._meeting is None else dict(zip(self._meeting.hosts, self._meeting.networks, strict=True))
        return found if len(found) > 1 else {}

    def ensure_connected(self, spec: GroupSpec) -> None:
        """Check that the hosts of the group of `spec` can connect to each other; raise PartitionError if they cannot.

        Takes up to eight seconds. Lost hosts are ignored. Raises GroupError if a host does not answer the notebook.
        """
        self._meetings.ensure_connected(tuple(dict.fromkeys(map(spec.host, range(spec.size)))))

    def describe_partition(self) -> str:
        """Return which hosts of the group cannot reach each other now, after a brief look; empty if all can."""
        hosts = tuple(dict.fromkeys(member.binding.host for member in self._ranks.members))
        with contextlib.suppress(RuntimeError, OSError):  # the caller reports something else
            return str(self._meetings.find_partition(hosts) or "")
        return ""

    def join(self, spec: GroupSpec, collect: bool, deadline: float) -> None:
        """Make all ranks join a new group, until `deadline` on ``time.monotonic``; `healthy` is then True.

        It is tried twice, since gloo accepts connections from any process while it forms the group. `collect`: ranks
        collect garbage after each cell. Raises GroupError, PartitionError if hosts cannot reach each other, and
        RequestInterrupted.
        """
        try:
            self._form_group(spec, collect, deadline)
        except GroupError as error:
            if not self._ranks.ended:
                self.ensure_connected(spec)
            if self._ranks.ended or self._ranks.abandoned or time.monotonic() > deadline:
                raise
            log.debug("forming the group again: %s", error)
            try:
                self.leave(deadline)
            except GroupError:
                raise error from None
            self._form_group(spec, collect, deadline)

    def _form_group(self, spec: GroupSpec, collect: bool, deadline: float) -> None:
        self.healthy, self._made_connections = False, {}
        self._steps.forget()
        former, self._meeting = self._meeting, self._prepare_meeting(range(spec.size))
        self._groups_made = self._first_group
        made = self._join_meetings([self._meeting], spec, collect, deadline, SET_UP_SHARE)
        if connections.has_unknown_connection(made):
            self.release()
            raise GroupError("forming the group failed: an unknown process connected to a rank during the start")
        if former is not None:
            self._meetings.remove_store(former)
        self._is_released = False
        self._made_connections = connections.between_ranks(
            {rank: [tuple(ends) for ends in connected] for rank, (connected, _) in enumerate(made)}
        )
        self.healthy = True
        self.generation += 1

    @property
    def _first_group(self) -> int:
        """The value of torch's group counter in a newly formed group."""
        return (self._formed - 1) * GROUPS_EACH + 1

    def _prepare_meeting(self, ranks: Sequence[int]) -> Rendezvous:
        self._formed += 1
        return self._meetings.prepare(self._formed, ranks)

    def _join_meetings(
        self,
        meetings: Sequence[Rendezvous],
        spec: GroupSpec,
        collect: bool,
        deadline: float,
        share: float = 1.0,
        together: bool = True,
    ) -> list[Any]:
        """Make the ranks of each of `meetings` join a group, as its ranks 0, 1 and so on, until `deadline`.

        gloo gets a `share` of the time to connect them. If the ranks act `together`, a failure unblocks the others.
        Returns the result of ``membership.join_group`` by rank.
        """
        seconds = max(1.0, (deadline - time.monotonic()) * share)
        calls: dict[int, RemoteCall[object]] = {}
        for meeting in meetings:
            specs = self._meetings.specs(meeting, spec, collect=collect, groups=self._first_group, seconds=seconds)
            calls |= {rank: on_rank.join_group(rank_spec) for rank, rank_spec in specs.items()}
        return self._ranks.ask_each(
            calls,
            deadline,
            # unblocks ranks that wait for others
            release=(lambda: self._abort_collectives(meetings)) if together else None,
            together=together,
        )

    def attempt(self, groups: Sequence[Sequence[int]], spec: GroupSpec, collect: bool, seconds: float) -> None:
        """Make ranks form each of `groups` as a trial, use it, and leave it; at most `seconds` for each step.

        The ranks leave their present group first, and have none afterwards. Raises RequestFailed, which names all
        failed ranks if each group has one rank, and RequestInterrupted.
        """
        self.healthy = False
        ranks = [rank for group in groups for rank in group]
        meetings = [self._prepare_meeting(group) for group in groups]
        together = len(groups) < len(ranks)
        try:
            self._ask_within(ranks, on_rank.leave_group(), seconds, together)
            self._join_meetings(meetings, spec, collect, time.monotonic() + seconds, together=together)
            self._ask_within(ranks, on_rank.check_group(), seconds, together, meetings)
            self._ask_within(ranks, on_rank.leave_group(), seconds, together)
        finally:
            for meeting in meetings:
                self._meetings.remove_store(meeting)

    def check(self, deadline: float) -> None:
        """Run one collective on all ranks; raise GroupError if it fails, and the group must be rebuilt then.

        It does nothing if ranks are deliberately out of step, as the collective would meet the pending ones.
        """
        ranks = range(len(self._ranks.members))
        answers = self._ranks.call_on_control_channel(ranks, on_rank.begun_operations(), seconds=TELL_SECONDS)
        latest = Steps()
        latest.update({rank: begun for rank, begun in answers.items() if begun is not None})
        if latest.uneven(len(ranks)):
            return
        try:
            self._ask_within(ranks, on_rank.check_group(), deadline - time.monotonic(), True)
        except BaseException:
            self.healthy = False
            raise

    def _ask_within(
        self,
        ranks: Sequence[int],
        call: RemoteCall[object],
        seconds: float,
        together: bool,
        meetings: Sequence[Rendezvous] = (),
    ) -> None:
        """Make `call` on `ranks`, for at most `seconds`; then abort the collectives of those that still wait.

        They are those of the groups of `meetings`, by default the current group; none is aborted unless ranks act
        `together`. Raises RequestFailed or RequestInterrupted.
        """
        deadline = time.monotonic() + seconds
        release = (lambda: self._abort_collectives(meetings)) if meetings else self.release
        calls = dict.fromkeys(ranks, call)
        self._ranks.ask_each(calls, deadline, release=release if together else None, together=together)

    def leave(self, deadline: float) -> LostObjects:
        """Make all running ranks leave their group; return the number of objects that end with it.

        The group may be in any state. Aborts pending collectives first if the group is not `healthy`, and marks it as
        unhealthy. Raises RequestFailed, RequestInterrupted, or GroupError if the controller ends.
        """
        if not self.healthy:
            self.release()
        self.healthy = False
        live = self._ranks.live
        all_counts = self._ranks.ask_each(dict.fromkeys(live, on_rank.leave_group()), deadline)
        self._ranks.add_lost_gpus({r: c["gpu_lost"] for r, c in zip(live, all_counts, strict=True) if c["gpu_lost"]})
        return {
            "wrappers": max((counts["wrappers"] for counts in all_counts), default=0),
            "meshes": max((counts["meshes"] for counts in all_counts), default=0),
            "subgroups": max((counts["subgroups"] for counts in all_counts), default=0),
            "rpc": any(counts["rpc"] for counts in all_counts),
        }

    def close(self) -> None:
        """Release what the manager holds for groups; no group can be formed afterwards."""
        self._meetings.close()

    def ask_together(self, call: RemoteCall[R]) -> list[R]:
        """Make a `call` that is a collective on all ranks; return the results in order.

        If it fails or is stopped, the group is rebuilt before the next cell, as some ranks may have begun more
        collectives than others. Raises RequestFailed and RequestInterrupted.
        """
        try:
            return self._ranks.ask(range(len(self._ranks.members)), call, release=self.release)
        except BaseException:
            self.ensure_released()
            raise

    def ensure_released(self) -> None:
        """Abort the collectives of the current group on every rank, unless this has been done."""
        if not self._is_released:
            self.release()

    def release(self, ranks: Collection[int] | None = None) -> None:
        """Abort every waiting collective on all ranks, or on `ranks` only if others run another cell.

        The group is unhealthy from then on.
        """
        self.healthy, self._is_released = False, self._is_released or ranks is None
        self._abort_collectives([] if self._meeting is None else [self._meeting], ranks)

    def _abort_collectives(self, meetings: Sequence[Rendezvous], ranks: Collection[int] | None = None) -> None:
        """Abort waiting collectives in the groups of `meetings`, on all ranks or on `ranks` only."""
        live = self._ranks.live
        for meeting in meetings:
            self._meetings.poison_store(meeting)
        now = connections.between_ranks(self._ranks.connections(live))
        ours = {rank: list({*now[rank], *self._made_connections.get(rank, ())}) for rank in live}
        cut_off: dict[int, bool] = {}
        for meeting in meetings:
            calls = {
                rank: on_rank.release_group(meeting.store, ends)
                for rank, ends in ours.items()
                if ranks is None or rank in ranks
            }
            answers = self._ranks.call_each_on_control_channel(calls)
            cut_off |= {
                rank: answer or cut_off.get(rank, False) for rank, answer in answers.items() if answer is not None
            }
        if any(cut_off.values()):
            notify(cut_off_text(cut_off))

    def update_health(
        self,
        reports: Mapping[int, CellReport | None],
        failed: bool,
        unmatched: bool = False,
        is_reported: bool = False,
    ) -> None:
        """Update `healthy` from the `reports` of ranks that have run a cell; None: the rank has sent no report.

        `healthy` becomes False if the process group must be rebuilt before its next use, and True if a cell has formed
        a fitting group. If the ranks have begun different numbers of collectives, the user is told, unless the cell has
        `failed` or its user allows it (`unmatched`). Collectives that do not match are reported, unless the user allows
        them or has already been told (`is_reported`).
        """
        present = {rank: report for rank, report in reports.items() if report is not None}
        size = len(self._ranks.members)
        is_unknown = not present or len(present) < len(reports)
        are_ours = bool(present) and all(report["state"] == "ours" for report in present.values())
        if is_unknown or any(report["released"] for report in present.values()):
            self.healthy = False
        elif are_ours:
            self._equalize_group_counters([report["groups"] for report in present.values()])
            self._compare_steps({rank: report["begun"] for rank, report in present.items()}, failed, unmatched)
            if failed and len(present) == size and _changes_differ([report["changes"] for report in present.values()]):
                self.healthy = False  # one rank has taken an optimizer step that another has not
        else:
            self.healthy = len(present) == size and all(
                _group_fits(report, rank, size) for rank, report in present.items()
            )
            if self.healthy:
                self._adopt_group()
        if are_ours:  # also if the group has been released: a rank may have used wrong results before that
            silent = [rank for rank, report in reports.items() if report is None]
            answers = self._ranks.call_on_control_channel(silent, on_rank.begun_operations()) if silent else {}
            begun = {rank: report["begun"] for rank, report in present.items()}
            begun |= {rank: answer for rank, answer in answers.items() if answer is not None}
            self._steps.update(begun)
            known = {rank: last for rank, last in self._steps.known().items() if rank in begun or rank not in reports}
            self._report_different(signatures.find_different(self._ranks, known), unmatched or is_reported)
        if self.healthy:
            self._meetings.forget_partition()

    def _adopt_group(self) -> None:
        """Adopt the group that a cell has formed in place of ours, and hold another port, as it may use ours."""
        ranks = range(len(self._ranks.members))
        adopt = on_rank.adopt_group(*self._meetings.hold_port())
        answers = self._ranks.call_on_control_channel(ranks, adopt, seconds=ADOPT_SECONDS)
        self.healthy = all(answer is not None for answer in answers.values())
        self.generation += 1
        self._steps.forget()

    def known_operations(self, rank: int) -> Begun | None:
        """Return the operations that `rank` had begun at its last report; None if it has not reported any."""
        return self._steps.known_of(rank)

    def _compare_steps(self, begun: Mapping[int, Begun], failed: bool, unmatched: bool) -> None:
        """Compare the collectives that each rank has begun, and also its messages if the cell has failed.

        If they differ, `healthy` becomes False, or the difference is accepted if the user allows it (`unmatched`).
        """
        size = len(self._ranks.members)
        messages = failed and self._steps.are_messages_uneven(begun, size)
        self._steps.update(begun)
        if messages:
            self.healthy = False
        elif self.healthy and self._steps.uneven(size):
            self._handle_uneven(failed, unmatched)

    def _report_different(self, different: Mapping[str, DifferentCollectives], unmatched: bool) -> None:
        """Mark the group for a rebuild, and report the collectives that did not match.

        `different`: the result of `signatures.find_different`. If the user allows them (`unmatched`), nothing is
        reported, now or later, until the group is rebuilt. A failed cell reports them too: they may be the reason why
        it failed.
        """
        if unmatched:
            self._steps.accepted_different.update(different)
        for group in different.keys() - self._steps.accepted_different:
            self.healthy = False
            lines = signatures.describe_different(self._ranks, group, different[group])
            notify(f"{signatures.DIFFERENT.format(lines=lines)}\n{WRONG_RESULTS}")

    def _equalize_group_counters(self, counters: Sequence[int]) -> None:
        """Set torch's group counter to the same value on all ranks; `counters`: the counters of the ranks.

        Some ranks may have created groups without the others.
        """
        if min(counters) < max(counters) or (
            max(counters) > self._groups_made and len(counters) < len(self._ranks.members)
        ):
            self._ranks.call_on_control_channel(self._ranks.live, on_rank.set_groups_made(max(counters)))
        self._groups_made = max(counters)

    def _handle_uneven(self, failed: bool, unmatched: bool) -> None:
        """Handle ranks that have begun more collectives than others.

        A group in which a thread may still catch up is left alone: a later cell may find it even, or prove it uneven.
        After a failed cell, this holds only for groups that threads have used.
        """
        size = len(self._ranks.members)
        # includes ranks without the cell, and threads that still run
        answers = self._ask_control(range(size), on_rank.begun_operations())
        self._steps.update({rank: begun for rank, begun in answers.items() if begun is not None})
        found = self._steps.uneven(size)
        uneven = [group for group in found if group.is_sure or (failed and not group.by_threads)]
        if unmatched and not failed:
            self._steps.accept(uneven)
        elif failed:
            self.healthy = not uneven
        else:
            for group in uneven:
                self._report_uneven(group)

    def _ask_control(self, ranks: Sequence[int], call: RemoteCall[R]) -> dict[int, R | None]:
        return self._ranks.call_on_control_channel(ranks, call, seconds=TELL_SECONDS)

    def _report_uneven(self, uneven: StepMismatch) -> None:
        """Mark the group for a rebuild, and report that a good cell has left it out of step."""
        self.healthy = False
        answers = self._ask_control(uneven.ahead, on_rank.line_of(uneven.group, uneven.least))
        places: dict[int, StackLocation | None] = {
            rank: StackLocation(**place) for rank, place in answers.items() if place is not None
        }
        where = f", the first too many here:\n{places_text(places)}" if places else ""
        notify(OUT_OF_STEP.format(uneven=uneven.text(), where=where))


def _changes_differ(changes: Sequence[Mapping[str, int]]) -> bool:
    """Return whether ranks have written unequally often to any object that all of them have.

    A negative number means that a rank was within a step, and may have changed any part.
    """
    first, *others = changes
    shared = set(first).intersection(*others)
    return any(other[owner] != first[owner] or first[owner] < 0 for other in others for owner in shared)


def _group_fits(report: CellReport, rank: int, size: int) -> bool:
    """Return whether the cell has formed a group of `size` in which `rank` keeps its number."""
    return report["state"] == "other" and (report["rank"], report["size"]) == (rank, size)
