"""When a group cannot be formed: which ranks are to blame, whatever they have done to themselves.

What a rank raises then often tells nothing: it may be the first to notice what another does wrong. So ranks are tried:
each alone, since most of what is wrong with a process shows there; then all but one, with a new process in its place,
and if there are several, each with a new process.

A rank can be good for the group, and yet for no cell.
"""

from __future__ import annotations

from ddip.cluster.cluster_api import Recipient
from ddip.errors import GroupError, RankError, RequestFailed
from ddip.group import stopping
from ddip.group.members.engines import Engines
from ddip.group.members.placement import GroupSpec
from ddip.group.members.ranks import Ranks
from ddip.group.process_group.process_group import ProcessGroupManager

TRY_SECONDS = 10.0
"""How long a rank may take for one step of a trial, which takes milliseconds; a busy machine is slower."""

CELL = "assert __import__"
"""Does nothing, and leaves nothing, but needs what every cell needs."""


class Fitness:
    """Tries ranks; they are in no group then, and their variables are as they were."""

    def __init__(self, ranks: Ranks, manager: ProcessGroupManager, engines: Engines) -> None:
        self._ranks = ranks
        self._manager = manager
        self._engines = engines
        self.unfit: set[int] = set()
        """Ranks that were found to be fit for no group."""

    def alone(self, spec: GroupSpec, collect: bool) -> dict[int, RankError]:
        """The ranks that live, and do nothing else, that cannot form a group of themselves alone, and why."""
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

    def with_a_helper(self, spec: GroupSpec, collect: bool, app: str | None, deadline: float) -> list[int]:
        """The ranks without which a group can be formed, where a new process takes part; until `deadline`."""
        members = self._ranks.members
        ranks, helper = range(len(members)), len(members)
        try:
            self._ranks.members = [*members, self._engines.replace([0], spec, app, deadline)[0]]
            without = [[helper if other == rank else other for other in ranks] for rank in ranks]
            fit = [rank for rank in ranks if self._can_form(without[rank], spec, collect)]
            if fit:
                return [] if len(fit) == len(members) > 1 else fit[:1]
            return [rank for rank in ranks if not self._can_form([helper, rank], spec, collect)]
        finally:
            self._ranks.members = members
            with stopping.button():
                self._ranks.cluster.stop_engines_but([member.engine for member in members])

    def no_cell_runs(self, seconds: float) -> list[int]:
        """The ranks on which not even a cell that does nothing goes well within `seconds`: ``__builtins__`` may be
        empty, or a hook of IPython may fail or hang. Raises RequestInterrupted, or GroupError if the controller ends.
        """
        cluster = self._ranks.cluster
        to = [Recipient(member.engine, lambda _: None) for member in self._ranks.members]
        cells = dict(enumerate(cluster.execute(CELL, to, {}, history=False)))
        try:
            with stopping.button("trying a cell was interrupted") as button:
                button.wait_for(cells.values(), seconds, cluster.ensure_controller)
                self._ranks.interrupt({rank: cell.msg_id for rank, cell in cells.items() if not cell.done()})
        finally:
            for cell in cells.values():
                cluster.stop_listening(cell.msg_id)
        return [rank for rank, cell in cells.items() if not cell.done() or self._ranks.error_of(rank, cell.result())]

    def _can_form(self, group: list[int], spec: GroupSpec, collect: bool) -> bool:
        try:
            self._manager.attempt([group], spec, collect, TRY_SECONDS)
        except GroupError:
            return False
        return True
