"""Cells in the background: the part of `Group` that starts them, and knows those that there were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ddip.errors import BadInput, GroupError, ranks_text
from ddip.group import stopping
from ddip.group.cells import logs
from ddip.group.cells.cell import Cell
from ddip.group.cells.cell_state import Limits
from ddip.group.cells.comms import Comms
from ddip.group.cells.running import RunningCell
from ddip.group.members import placement
from ddip.group.profiling.profile import Profiling, folder_for
from ddip.group.status import LISTED, about, group_status, last, rank_infos
from ddip.group.watching.vitals import Watchable
from ddip.output.cells.background_page import BackgroundOutput
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.router import CellOutput
from ddip.output.tables.profile_report import Profile
from ddip.protocol.cell_messages import Asked
from ddip.protocol.status_types import Status


class Background(Watchable):
    """A group with cells that go on while others run."""

    display: DisplayOptions
    stall_timeout: float
    last_profile: Profile | None

    @property
    def comms(self) -> Comms:
        """Who passes on the messages of the ranks' widgets."""
        return self._comms

    @property
    def cells(self) -> list[Cell]:
        """The last cells that were given to this group, and to those before it; the oldest first."""
        return list(self.history)

    def cell(self, number: int) -> Cell:
        """The last cell with this number, one that runs before others; raises BadInput if there is none."""
        cell = self.history.find(number)
        if cell is None:
            numbers = [str(known.number) for known in self.history][-5:]
            known = f"the last ones are {', '.join(numbers)}" if numbers else "there were none"
            raise BadInput(f"{number}: no cell with this number was given to ranks; {known}")
        return cell

    def status(self, cells: int = LISTED) -> Status:
        """All that is known of the group as plain data, which JSON holds: ranks, devices, the last `cells` and those
        that go on, and the last error of each rank. Works while cells run, and never waits for them.

        A group that has ended is None there.
        """
        kept = last(self.cells, cells)
        if self.alive:
            with contextlib.suppress(GroupError):  # another thread ends it just now
                with stopping.button("asking the ranks was interrupted") as button:
                    infos = rank_infos(self.ranks, self.spec, button)
                group = about(self.spec, self.request.app, self._manager.healthy, infos)
                return group_status(kept, group, infos, self._cells.stuck)
        return group_status(kept)

    def start(
        self,
        code: str,
        ranks: Sequence[int] | None = None,
        *,
        show_ranks: Sequence[int] = (0,),
        quiet: bool = False,
        timeout: float | None = None,
        unmatched: bool = False,
        queue: bool = False,
        log: str = "",
        profile: str | None = None,
    ) -> Cell:
        """Run `code` as `run` does, but in the background: returns at once.

        ``cell.wait()`` waits for it and raises what `run` would; ``cell.stop()`` ends it. What the ranks show comes
        below the notebook's cell, whatever else runs. If some of `ranks` are busy with another cell, it is refused;
        with `queue` it begins when those before it have ended, and does not run if one of them fails.
        """
        where, seen = self._checked(ranks), placement.check_ranks(show_ranks, self.world_size, "show_ranks")
        asked = self._asked_of_ranks(log)
        profiling = None if profile is None else Profiling(self.ranks, folder_for(profile))

        def ready(cell: Cell | None = None) -> None:
            self.ensure_ready_for_cell(where, cell)
            if profiling is not None:
                profiling.prepare(where)

        with self.turn:
            queued = queue and bool(self._cells.active_on(where))
            if not queued:
                ready()
            number = self._cells.number()
            begins = f"cell {number} {'waits for' if queued else 'runs in the background on'} {ranks_text(where)}"
            output = BackgroundOutput(seen, begins, self.display, quiet=quiet, comms=self._comms)
            cell = Cell(number, tuple(where), code, output, background=True)
            limits = Limits(self.failure_grace, self.stall_timeout, timeout, self.ranks.can_unblock)
            with contextlib.ExitStack() as until_it_goes_on:
                running = self._cells.admit(cell, limits, until_it_goes_on)
                if profiling is not None:
                    asked |= {"profile": str(profiling.folder)}
                    running.after = lambda stuck: self._show_profile(profiling, where, stuck, output)
                self._cells.start(running, unmatched, asked, (lambda: ready(cell)) if queued else None)
        return cell

    @contextlib.contextmanager
    def _profiled(self, folder: str, ranks: Sequence[int]) -> Iterator[Asked]:
        """While this lasts, a cell is profiled; what its ranks must be told for it."""
        profiling = Profiling(self.ranks, folder_for(folder))
        try:
            with profiling.around(ranks, lambda: self._cells.stuck):
                yield {"profile": str(profiling.folder)}
        finally:
            self.last_profile = profiling.result

    def _show_profile(
        self, profiling: Profiling, ranks: Sequence[int], stuck: Sequence[int], output: BackgroundOutput
    ) -> None:
        profiling.finish(ranks, stuck, output.show_more)
        self.last_profile = profiling.result

    def wait_until_free(self, ranks: Sequence[int] | None = None) -> None:
        """Wait for the cells that `ranks` (default: all) run, or have still to run; the stop button ends the wait.

        Raises GroupError if one of them fails.
        """
        where = self._checked(ranks)
        while active := self._cells.active_on(where):
            numbers = ", ".join(
                f"{cell.text} goes on (%dipwait {cell.number}, %dipstop {cell.number})" for cell in active
            )
            with stopping.button(f"waiting was interrupted, and this cell did not run; {numbers}") as button:
                button.wait_for([cell.done for cell in active], float("inf"))
            for cell in active:
                if cell.done.done() and cell.outcome != "ok":
                    what = f"{cell.text}, for which this cell waited, {cell.outcome_text}; it did not run"
                    raise GroupError(f"{what}; %dipwait {cell.number} shows the error")

    def _checked(self, ranks: Sequence[int] | None) -> Sequence[int]:
        """The `ranks` that were given, None: all; raises BadInput before anything is sent."""
        if ranks is None:
            return range(self.world_size)
        checked = placement.check_ranks(ranks, self.world_size, "ranks")
        if not checked:
            raise BadInput("ranks=[]: give at least one rank; without ranks= it is all of them")
        return checked

    def _admit(
        self,
        code: str,
        where: Sequence[int],
        show: CellOutput,
        timeout: float | None,
        until_it_ends: contextlib.ExitStack,
    ) -> RunningCell:
        cell = Cell(self._cells.number(), tuple(where), code, show, told=True)
        limits = Limits(self.failure_grace, self.stall_timeout, timeout, self.ranks.can_unblock)
        return self._cells.admit(cell, limits, until_it_ends)

    def _asked_of_ranks(self, log: str) -> Asked:
        """What the ranks are told of a cell besides; raises BadInput for a `log` that cannot be written."""
        return {"log": str(logs.checked(log))} if log else {}
