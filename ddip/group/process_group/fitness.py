"""Find the ranks that are to blame when a group cannot be formed, whatever their cells did to them.

The errors that ranks raise then often mislead: the first rank to raise may only have noticed another's fault. So
ranks are tried instead: first each alone, as most faults of a process show there; then all but one, with a new process
in its place, on the same host; and if several ranks are to blame, each with a new process.

A rank may be fit for the group and yet unable to run a cell.
"""

from __future__ import annotations

from ddip.cluster.cluster_api import Recipient
from ddip.errors import RankError, RequestFailed
from ddip.group import stopping
from ddip.group.members.engines import Engines
from ddip.group.members.placement import GroupSpec
from ddip.group.members.ranks import Ranks
from ddip.group.process_group.process_group import ProcessGroupManager

TRY_SECONDS = 10.0
"""Time that a rank may take for one step of a trial; it takes milliseconds, or longer on a loaded machine."""

CELL = "assert __import__"
"""A cell without effect that fails if every cell would fail."""


class Fitness:
    """Trials of ranks; these leave ranks without a group, and with their variables unchanged."""

    def __init__(self, ranks: Ranks, manager: ProcessGroupManager, engines: Engines) -> None:
        self._ranks = ranks
        self._manager = manager
        self._engines = engines
        self.unfit: set[int] = set()
        """The ranks that were found unable to join any group."""

    def find_unfit(self, spec: GroupSpec, collect: bool) -> dict[int, RankError]:
        """Have each idle rank form a group of one; return those that cannot, each with its error.

        Each trial may take TRY_SECONDS. Raises RequestInterrupted, and GroupError if a trial cannot be prepared.
        """
        free = [rank for rank in self._ranks.live if rank not in self._ranks.busy]
        unfit: dict[int, RankError] = {}
        while free:
            try:
                self._manager.attempt([[rank] for rank in free], spec, collect, TRY_SECONDS)
                break
            except RequestFailed as error:
                late = RankError("TimeoutError", f"no answer in {TRY_SECONDS:g} s", "")
                unfit.update({**dict.fromkeys(error.late, late), **error.by_rank})
                free = [rank for rank in free if rank not in unfit]
        return unfit

    def blame_with_helpers(self, spec: GroupSpec, collect: bool, app: str | None, deadline: float) -> list[int]:
        """Return the ranks to blame for a group that cannot be formed, found with a new process on each host.

        So a rank is blamed only if a new process at its place does better; none if the group can be formed after all.
        The new processes are ended. `deadline` for their start is on ``time.monotonic``; `app` as in
        ``Engines.complete``. Raises PartitionError if the network is to blame, other GroupErrors, and
        RequestInterrupted.
        """
        members = self._ranks.members
        ranks = list(range(len(members)))
        hosts = [member.binding.host for member in members]
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        try:
            started = self._engines.replace(firsts, spec, app, deadline)
            self._ranks.members = [*members, *(started[rank] for rank in firsts)]
            helper = {hosts[rank]: len(members) + place for place, rank in enumerate(firsts)}
            without = [[helper[hosts[rank]] if other == rank else other for other in ranks] for rank in ranks]
            fit = [rank for rank in ranks if self._can_form(without[rank], spec, collect)]
            if fit:
                formed = len(fit) == len(members) > 1 or self._can_form(ranks, spec, collect)
                return [] if formed else fit[:1]
            return [
                rank for rank in ranks if self._is_unfit(rank, helper[hosts[0]], helper[hosts[rank]], spec, collect)
            ]
        finally:
            self._ranks.members = members
            with stopping.note_presses():
                self._ranks.cluster.stop_engines_but([member.engine for member in members])

    def find_cell_failures(self, seconds: float) -> list[int]:
        """Run an empty cell on all ranks, and return those on which it fails or takes longer than `seconds`.

        ``__builtins__`` may be empty, or a hook of IPython may fail or hang. Late cells are interrupted. Raises
        RequestInterrupted, or GroupError if the controller ends.
        """
        cluster = self._ranks.cluster
        recipients = [Recipient(member.engine, lambda _: None) for member in self._ranks.members]
        cells = dict(enumerate(cluster.execute(CELL, recipients, {}, history=False)))
        try:
            with stopping.note_presses("trying a cell was interrupted") as button:
                button.wait_for(cells.values(), seconds, cluster.ensure_controller)
                self._ranks.interrupt({rank: cell.msg_id for rank, cell in cells.items() if not cell.done()})
        finally:
            for cell in cells.values():
                cluster.stop_listening(cell.msg_id)
        return [rank for rank, cell in cells.items() if not cell.done() or self._ranks.error_of(rank, cell.result())]

    def _can_form(self, group: list[int], spec: GroupSpec, collect: bool) -> bool:
        """Have the ranks `group` try to form a group for up to TRY_SECONDS; return True if they can.

        Raises PartitionError if only the network keeps them from that.
        """
        try:
            self._manager.attempt([group], spec, collect, TRY_SECONDS)
        except RequestFailed:
            self._manager.ensure_connected(spec)
            return False
        return True

    def _is_unfit(self, rank: int, other: int, helper: int, spec: GroupSpec, collect: bool) -> bool:
        """Return whether `rank` cannot form a group with the `other` rank, but the `helper` on its host can."""
        if self._can_form([other, rank], spec, collect):
            return False
        return helper == other or self._can_form([other, helper], spec, collect)
