"""New processes in place of ranks that are lost, while the others keep their variables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddip.cluster.ways import Reach
from ddip.errors import BadInput, GroupError, RequestInterrupted, TransferError, ranks_text
from ddip.group import delivery, placement, stopping, transfer, wanted
from ddip.group.history import History
from ddip.group.lifecycle import SAME, Lifecycle, nobody
from ddip.group.modules import Modules
from ddip.group.placement import HostRequest, Request
from ddip.output.progress import Report
from ddip.protocol.pickling import Pickled

CELL_ENDS_WITHIN = 5.0
"""Seconds in which a cell ends, after those that ranks get, when one has ended and the others wait for it."""


class Repairable(Lifecycle):
    """A group that can be repaired."""

    failure_grace: float

    def __init__(
        self, request: Request, timeout: float, collect: bool, spawn: bool, progress: Report, history: History
    ) -> None:
        self._modules = Modules()
        super().__init__(request, timeout, collect, spawn, progress, history)

    def restart(self, request: Request = SAME, progress: Report = nobody) -> None:
        """End every engine and start afresh, without any variables: the same group, or the one that is asked for."""
        super().restart(request, progress)
        self._modules.send_again(self.ranks, progress)

    def repair(
        self,
        names: Sequence[str] = (),
        source: int | None = None,
        progress: Report = nobody,
        hosts: Sequence[HostRequest] = (),
    ) -> list[int]:
        """Put new processes in place of ranks that ended, that do not stop, or that can run no cell or be in no group.

        Those are asked to stop once more, and kept if they do. The others keep their variables, too. `names` are copied
        from the rank `source` to the new ones. `hosts`: all hosts of the group, with others in place of those that are
        lost; a host that was lost, and is there again, is used again. In place of nodes of a job of ddip's
        it submits another job, and waits until that runs. Returns the ranks that were replaced.

        Raises GroupError or TransferError; if a name cannot be pickled, or the new processes do not come, nothing has
        changed.
        """
        self._wait_for_cells()
        with self._told(progress), self.turn:
            self._replace_hosts(hosts)
            return self._repair(names, source)

    def _wait_for_cells(self) -> None:
        """Those in the background that a rank has left by its end are about to end. Raises GroupError for others."""
        ended, end = set(self.ranks.ended), self.failure_grace + CELL_ENDS_WITHIN
        left = [cell.done for cell in self._cells.active_on(ended)]
        with stopping.button("the repair was interrupted; no rank has been replaced") as button:
            button.wait_for(left, end)
        self._cells.ensure_not_running(
            range(self.world_size), "a repair forms the group again, and for that all ranks must be free"
        )

    def _replace_hosts(self, hosts: Sequence[HostRequest]) -> None:
        """Reach other hosts in place of those that are lost; raises BadInput, or GroupError."""
        lost = [bool(host.lost) for host in self.cluster.hosts]
        try:
            for number in wanted.replaced_hosts(hosts, self.request, lost):
                self._reach(number, hosts[number].name, self.request.reach)
            if self.request.reach.jobs:
                self._replace_nodes(lost)
        except KeyboardInterrupt as error:
            if isinstance(error, RequestInterrupted):
                raise
            raise RequestInterrupted("the repair was interrupted; no rank has been replaced") from None

    def _replace_nodes(self, lost: Sequence[bool]) -> None:
        """Reach nodes of Slurm that were lost once more, or others in the place of those that cannot be reached."""
        gone = [number for number, is_lost in enumerate(lost) if is_lost and not self._is_up_again(number)]
        if not gone:
            return
        try:
            job, names = self.place.others(gone, self._progress)
            for number, name in zip(gone, names, strict=True):
                self._reach(number, name, self.request.reach.moved(number, job))
        finally:
            self.place.move(self.request)

    def _is_up_again(self, number: int) -> bool:
        """Reach the node in place of the lost host `number` that it was; returns False if that is over."""
        if not self.place.has(number):
            return False
        try:
            self._reach(number, self.request.hosts[number].name, self.request.reach)
        except GroupError:
            return False
        return True

    def _reach(self, number: int, name: str, reach: Reach) -> None:
        """Have the host `name` in place of a lost one. Raises GroupError; nothing has changed then."""
        self._progress(f"ddip: reaching {name}", 0.0)
        self.cluster.replace_host(number, name, reach, time.monotonic() + self.timeout)
        hosts = list(self.request.hosts)
        hosts[number] = replace(hosts[number], name=name)
        self.request = replace(self.request, hosts=tuple(hosts), reach=reach)

    def _repair(self, names: Sequence[str], source: int | None) -> list[int]:
        if source is not None:
            (source,) = placement.check_ranks([source], self.world_size, "source")
        transfer.check_own(names, "repair")
        self.cluster.ensure_controller()
        began = time.monotonic()
        self.ranks.carry_on()
        gone = self._lost() or self._find_lost()
        packed: Mapping[str, Pickled] = {}
        if names:
            packed = self._pack_for_repair(names, 0 if source is None else source, gone)
        replaced: list[int] = []
        while gone:
            self._replace(gone)
            replaced = sorted({*replaced, *gone})
            gone = [rank for rank in self._find_lost() if rank not in replaced]
        if not replaced:
            return []
        if self._unfit.intersection(replaced) and self._unprepared:
            raise self._without_the_app(f"{self._app} cannot be prepared in a new process either")
        self.ensure_ready()
        self._modules.send_again(self.ranks, self._progress)  # first: what is copied may be of them
        if packed:
            self._unpack(packed, replaced)
        self.seconds = time.monotonic() - began
        return replaced

    def _lost(self) -> list[int]:
        """The ranks that are known to need a new process; those that are only slow to stop are waited for."""
        return sorted({*self._cells.settle(), *self.ranks.ended, *self.ranks.gpu_lost, *self._unfit})

    def _find_lost(self) -> list[int]:
        """The same, after all ranks have been in use together, in a new group if need be."""
        try:
            self.ensure_ready()
            self._manager.check(time.monotonic() + self.timeout)
            return self._fitness.no_cell_runs(self.timeout)
        except GroupError:
            if self._lost():
                return self._lost()
        try:
            self._form_again()
            self._manager.check(time.monotonic() + self.timeout)
        except GroupError:
            if not self._lost():
                self._unfit = set(self._fitness.alone(self.spec, self.collect))
            deadline = time.monotonic() + self.timeout
            return self._lost() or self._fitness.with_a_helper(self.spec, self.collect, self._app, deadline)
        return self._fitness.no_cell_runs(self.timeout)

    def _replace(self, gone: Sequence[int]) -> None:
        """Put new processes in place of the ranks `gone`; the group must be formed again then."""
        try:
            self._progress(f"ddip: starting {ranks_text(gone)}", 0.0)
            members = self._engines.replace(gone, self.spec, self._app, time.monotonic() + self.timeout)
        except BaseException as error:
            with stopping.button():
                self.cluster.stop_engines_but([member.engine for member in self.members])
            if isinstance(error, KeyboardInterrupt):
                raise RequestInterrupted(f"the repair was interrupted; {ranks_text(gone)} not replaced") from None
            raise
        with stopping.button():
            self._manager.release()
            self.cluster.stop_engines_but([member.engine for member in members])
            self._take(members)
            self._cells.forget(gone)
            self._unfit.difference_update(gone)
            if self._app is not None:
                self._unprepared.update(gone)

    def _unpack(self, packed: Mapping[str, Pickled], ranks: Sequence[int]) -> None:
        try:
            delivery.deliver(self.ranks, packed, ranks, self._progress)
        except TransferError as error:
            raise TransferError(f"{ranks_text(ranks)} replaced, but {error}") from None

    def _pack_for_repair(self, names: Sequence[str], source: int, gone: Sequence[int]) -> Mapping[str, Pickled]:
        what = f"--from {source} {' '.join(names)}"
        if not gone:
            raise BadInput(f"{what}: every rank is there, so nothing was copied; %dipull and %dipush copy variables")
        if source in gone:
            here = [rank for rank in range(self.world_size) if rank not in gone]
            if not here:
                raise BadInput(f"{what}: all ranks are gone, with their variables; type %makedip --repair alone")
            others = f"{'one of ' * (len(here) > 1)}{ranks_text(here)}"
            raise BadInput(f"{what}: {ranks_text([source])} is gone itself; copy from {others}")
        (fetched,) = transfer.fetch(self.ranks, names, [source], self._progress)
        return transfer.forward(fetched, "repaired")
