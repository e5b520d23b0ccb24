"""The ranks of a group from their start to their end, in the group that was asked for.

engines         processes, one a rank                     -> Engines
process group   the one that they are in                  -> ProcessGroupManager
app             prepared on every rank, or not yet     -> Prepared
repair          new processes for ranks that are lost, while the others keep their variables
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from IPython.core.getipython import get_ipython

from ddip import apps
from ddip.cluster import limits
from ddip.cluster.cluster_api import Cluster
from ddip.cluster.ipyparallel.own_cluster import OwnCluster
from ddip.cluster.processes import ownership
from ddip.cluster.processes.host import Host
from ddip.cluster.reach import Reach
from ddip.errors import (
    REPAIR,
    BadInput,
    CellError,
    GroupError,
    RequestFailed,
    RequestInterrupted,
    TransferError,
    ranks_text,
)
from ddip.group import stopping
from ddip.group.cells.cell import Cell
from ddip.group.cells.cells import Cells
from ddip.group.cells.comms import Comms
from ddip.group.cells.differences import Differences
from ddip.group.cells.history import History
from ddip.group.members import placement, places, wanted
from ddip.group.members.engines import Engines
from ddip.group.members.members import Member
from ddip.group.members.placement import GroupSpec, HostRequest, Request
from ddip.group.members.ranks import Ranks
from ddip.group.objects import delivery, transfer
from ddip.group.objects.modules import Modules
from ddip.group.objects.transfer import Fetched
from ddip.group.process_group import revival
from ddip.group.process_group.fitness import Fitness
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.output.area import notify, stop_name
from ddip.output.progress import Report
from ddip.protocol import on_rank
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import Going


class Prepared:
    """The part of a `Lifecycle` that knows the app."""

    request: Request
    _manager: ProcessGroupManager
    _progress: Report

    def __init__(self) -> None:
        self._app: str | None = None
        self._unprepared: set[int] = set()
        """Ranks on which the app has still to be prepared."""
        self._app_knows = 0
        """Generation of the group that the app is prepared for, or was told of."""
        self._unfit: set[int] = set()
        """Ranks that cannot be in a group."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of a group that has not ended."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        raise NotImplementedError

    def _form_again(self) -> None:
        raise NotImplementedError

    def _prepare(self, ranks: Sequence[int]) -> None:
        """Prepare the app on `ranks`; if that fails it is tried again before the next cell."""
        if self._app is not None:
            self._progress(f"ddip: preparing {self._app}", 0.95)
            try:
                self.ask_app(ranks, on_rank.prepare_app(apps.find(self._app)))
            except RequestFailed as error:
                if len(error.by_rank) == self.world_size:
                    raise self._without_the_app(str(error)) from None
                self._unfit.update(error.by_rank)
                raise GroupError(self.ranks.with_repair(str(error))) from None
        self._unprepared -= set(ranks)

    def _without_the_app(self, why: str) -> GroupError:
        """Give up the app that cannot be prepared."""
        self._app, self.request = None, replace(self.request, app=None)
        self._unprepared.clear()
        self._unfit.clear()
        return GroupError(f"{why}; the group is there without the app")

    def _tell_app(self, app: str) -> None:
        """Tell `app` on every rank that the group was formed again; ranks that are new have prepared it before.

        What fails there is said, and not tried again: the group is there, formed once more if some ranks only failed.
        """
        try:
            self.ask_app(range(self.world_size), on_rank.tell_app_rejoined(apps.find(app)))
        except RequestFailed as error:
            notify(f"{error}; the group is there")
            if not self._manager.healthy:
                self._form_again()
        self._app_knows = self._manager.generation

    def ask_app(self, ranks: Sequence[int], call: RemoteCall[R]) -> list[R]:
        """Have the app do something; if only some ranks did it they are out of step, and the group is formed again."""
        try:
            return self.ranks.ask(ranks, call, release=self._manager.release)
        except RequestFailed as error:
            self._manager.healthy = self._manager.healthy and len(error.by_rank) == len(ranks)
            raise
        except RequestInterrupted:
            self._manager.healthy = False
            raise


ipp_log = logging.getLogger("ddip.ipyparallel")
ipp_log.setLevel(logging.ERROR)  # it warns of every engine that we end

FORMED_AGAIN = "the group must be formed again before it is used, and for that all ranks must be free"
SAME = Request()
"""Asks for nothing new."""


def nobody(text: str, share: float | None = None) -> None:
    """Whom progress is told that nobody wants to know of."""


class Lifecycle(Prepared):
    """Starts, changes and ends a group; `Group` adds what is done with it.

    `timeout`, `collect` and `spawn` may be changed at any time, for what comes.
    """

    clears_up = True
    """End what is left of notebooks that are gone, before a start?"""

    def __init__(
        self, request: Request, timeout: float, collect: bool, spawn: bool, progress: Report, history: History
    ) -> None:
        super().__init__()
        self.history = history
        """The cells of this group, and of those before it."""
        self.turn = threading.RLock()
        """Held by whoever changes the group, or asks main threads of ranks for something; a cell that goes on in the
        background has it when it begins and when it has ended."""
        self.timeout = timeout
        self.collect = collect
        self.spawn = spawn
        self.seconds = 0.0
        """That the last start, change or repair took."""
        self._progress: Report = nobody
        self._ranks: Ranks | None = None
        self._pid = os.getpid()
        self._came_later: set[int] = set()
        """Engines that were not there when the group started."""
        self._bare: set[int] = set()
        """Those of them that lack what cells have changed in the processes of the others."""
        self.carried = ""
        """What the new ranks of the last change or repair have got of that, in words."""
        self.place: places.Place
        """Where it is, or was."""
        if getattr(get_ipython(), "is_rank", False):
            raise BadInput("ddip.Group: this process is a rank of a group; start groups in the notebook or a script")
        self.request = request
        with self._told(progress):
            self._start(request)

    @contextlib.contextmanager
    def _told(self, progress: Report) -> Iterator[None]:
        """While this lasts, `progress` hears what is under way."""
        former, self._progress = self._progress, progress
        try:
            yield
        finally:
            self._progress = former

    # -- life cycle

    def _resolve(self, request: Request, hosts: Sequence[Host] = ()) -> GroupSpec:
        return wanted.resolve(request, hosts, 0 if self._ranks is None else len(self._ranks.members))

    def _start(self, request: Request) -> None:
        self.place = places.found(request, self._progress)
        request = self.place.request
        if not request.hosts:
            self.spec = self._resolve(request)
        atexit.register(self.shutdown)
        try:
            self._ranks = Ranks(self._new_cluster(request))
            self._engines = Engines(self._ranks, lambda text, share=None: self._progress(text, share))
            self._manager = ProcessGroupManager(self._ranks)
            self._differences = Differences(self._ranks, self._manager)
            self._cells = Cells(self._ranks, self._manager, self._differences, self.history, self.turn)
            self._fitness = Fitness(self._ranks, self._manager, self._engines)
            self._comms = Comms(self._ranks)
            if request.hosts:
                self.cluster.wait_for_hosts(time.monotonic() + self.timeout, self._progress)
                self.spec = self._resolve(request, self.cluster.hosts)
            self._form(self.spec, request)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, KeyboardInterrupt):
                raise RequestInterrupted("the start was interrupted; there is no group") from None
            raise

    def _new_cluster(self, request: Request) -> Cluster:
        """The processes that the ranks will be, of which none runs yet."""
        if self.clears_up:
            ownership.clear_up_orphans()
        with limits.named():
            return OwnCluster(ipp_log, not self.spawn, [host.name for host in request.hosts], request.reach)

    def change(self, request: Request, progress: Report = nobody) -> bool:
        """Make it the group that `request` asks for; returns False if it is that already.

        The engines that can stay do, with their variables. Raises as ``Group`` does; if the new ranks do not come, the
        group stays as it was.
        """
        former = self.spec
        try:
            with self.turn:
                self.ensure_ready()
                request = request.after(self.request)
                wanted.ensure_same_hosts(request, self.request)
                spec = self._resolve(request, self.cluster.hosts if request.hosts else ())
                if spec == self.spec and request.app == self._app:
                    return False
                self.carried = ""
                with self._told(progress):
                    marks = self._differences.rank_marks() if spec.size != former.size else []
                    self._form(spec, request)
                    if marks:
                        self._differences.refuse_stale(marks, former.size)
                    self._carry_settings()
        except KeyboardInterrupt as error:
            now = "the group is unchanged" if self.spec is former else "the group is what was asked for"
            what = f"the change was interrupted; {now} ({self.describe().removeprefix('ddip: ')})"
            why = [str(error)] if isinstance(error, RequestInterrupted) else []
            raise RequestInterrupted("\n".join([what, *why])) from None
        return True

    def restart(self, request: Request = SAME, progress: Report = nobody) -> None:
        """End every engine and start afresh, without any variables: the same group, or the one that is asked for."""
        request = places.again(request.after(self.request), self.cluster.hosts if self.alive else ())
        if not request.hosts and not request.reach.finds:
            spec = self._resolve(request)
            if self.alive:
                self._engines.check_torch(spec)
        with self._told(progress), places.kept(request):
            self.shutdown()
            self.request = request
            self._start(request)

    def shutdown(self) -> None:
        """End all processes and remove all files; the group is empty then. May be called twice."""
        if os.getpid() != self._pid:
            return  # a fork of the owner: the group is not its to end
        atexit.unregister(self.shutdown)
        ranks, self._ranks = self._ranks, None
        self._app = None
        self._unprepared, self._came_later, self._bare = set(), set(), set()
        try:
            if ranks is not None:
                with stopping.button(f"{stop_name()} was pressed while the group ended; there is no group any more"):
                    self._cells.end_all("the cell ended with its group: %makedip -k, -r, or the end of the notebook")
                    self._manager.close()
                    ranks.cluster.stop()
        finally:
            self.place.give_back()

    close = shutdown

    @property
    def alive(self) -> bool:
        """False after ``shutdown``."""
        return self._ranks is not None

    @property
    def ranks(self) -> Ranks:
        """The ranks of a group that has not ended."""
        if self._ranks is None:
            raise GroupError("this group has ended; start one with %makedip, or ddip.Group()")
        return self._ranks

    @property
    def members(self) -> list[Member]:
        """The members in rank order."""
        return self.ranks.members

    @property
    def new_ranks(self) -> list[int]:
        """The ranks that a change or a repair has added: they lack the variables of the cells that ran before."""
        return [rank for rank, member in enumerate(self.members) if member.engine in self._came_later]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def cluster(self) -> Cluster:
        """The processes below; of those that ipyparallel has started, ``client`` is the ``ipyparallel.Client``."""
        return self.ranks.cluster

    def ensure_ready(self, ranks: Collection[int] | None = None, before: Cell | None = None) -> None:
        """Have every rank there, `ranks` (None: all) free, and a good group; raises GroupError if that cannot be.

        Of cells, only those that came `before` that one count.
        """
        self.ensure_free(ranks, before)
        self.ranks.ensure_no_gpu_lost()
        is_same_group = self._manager.healthy
        if not is_same_group:
            self._cells.ensure_not_running(range(self.world_size), FORMED_AGAIN, before)
            self._form_again()
        self._manager.iterations.settle(self._free_ranks(ranks, before), is_same_group)
        if self._unprepared:
            self._prepare(sorted(self._unprepared))
        if self._app is not None and self._app_knows != self._manager.generation:
            self._tell_app(self._app)
        if self._bare and len(self._free_ranks(ranks, before)) == self.world_size:
            self._carry_settings()

    def ensure_ready_for_cell(self, ranks: Collection[int] | None = None, before: Cell | None = None) -> None:
        """Do what `ensure_ready` does, and then say what a fault before has left different on the ranks."""
        self.ensure_ready(ranks, before)
        everyone = range(self.world_size)
        if self._differences.pending and not self._cells.active_on(everyone, before):
            self._differences.report_fault()

    def _free_ranks(self, ranks: Collection[int] | None, before: Cell | None) -> Collection[int]:
        """All ranks if no cell runs; else these (None: all), which are free."""
        everyone = range(self.world_size)
        return everyone if ranks is None or not self._cells.active_on(everyone, before) else ranks

    def ensure_free(self, ranks: Collection[int] | None = None, before: Cell | None = None) -> None:
        """Have every rank there, and `ranks` (None: all) free; raises GroupError if that cannot be."""
        self.cluster.ensure_controller()
        self._cells.ensure_not_running(range(self.world_size) if ranks is None else ranks, before=before)
        self.ranks.ensure_all()
        self.ranks.end_late()
        self._cells.ensure_idle()

    def describe(self) -> str:
        """Ranks, devices and backend in one line."""
        return f"ddip: {self.spec.describe(self.request.hosts)}"

    # -- forming

    def _form(self, spec: GroupSpec, request: Request) -> None:
        """Bring the ranks into the group of `spec`.

        What fails, or is interrupted, until all have left the old group leaves it as it was, with the ranks that it
        had. From then on the group is the one that was asked for, and what is missing is done before the next cell.
        """
        began = time.monotonic()
        deadline = began + self.timeout
        new = not self.members  # if that fails, everything goes
        try:
            members = self._engines.complete(spec, request.app, deadline)
            self._progress(f"ddip: forming a group of {spec.size} rank{'s' * (spec.size > 1)}", 0.9)
            with stopping.button():
                going = None if new else self._leave(deadline)
                self.request, self.spec = request, spec
                self._take(members)
                self._app, self._unprepared = request.app, set(range(spec.size))
                self.cluster.stop_engines_but([member.engine for member in members])
                try:
                    self._manager.join(spec, self.collect, deadline)
                except GroupError as error:
                    raise error if new else GroupError(f"forming the group failed: {self._blame(error)}") from None
                if going is not None:
                    revival.go_on(self.ranks, self._manager, going)
                self._app_knows = self._manager.generation
                self._prepare(range(spec.size))
        except BaseException:
            if new:
                raise
            with stopping.button():
                self.cluster.stop_engines_but([member.engine for member in self.members])
            raise
        self.seconds = time.monotonic() - began

    def _take(self, members: list[Member]) -> None:
        """These are the members from here on."""
        if self.members:
            new = {member.engine for member in members} - {member.engine for member in self.members}
            self._came_later |= new
            self._bare |= new
        self.ranks.members = members

    def _carry_settings(self) -> None:
        """Give new ranks what cells have changed in the processes of the others."""
        bare = [rank for rank, member in enumerate(self.members) if member.engine in self._bare]
        self.carried = revival.carry_settings(self.ranks, bare)
        self._bare.clear()

    def _form_again(self) -> None:
        """The same ranks in a new group: the former was released, or left by a cell."""
        deadline = time.monotonic() + self.timeout
        with stopping.button():
            try:
                going = self._manager.leave(deadline)
                self._manager.join(self.spec, self.collect, deadline)
            except GroupError as error:
                raise GroupError(f"the group could not be formed again: {self._blame(error)}") from None
            self._unfit.clear()
            revival.go_on(self.ranks, self._manager, going)

    def _blame(self, error: GroupError) -> str:
        """Find the ranks because of which a group could not be formed; returns what to say of them."""
        if self.ranks.ended:
            return self.ranks.with_repair(str(error))
        unfit = self._fitness.alone(self.spec, self.collect)
        self._unfit = set(unfit)
        parts = [str(CellError(unfit))] if unfit else []
        parts += [f"rank {rank} is still {doing}" for rank, doing in self.ranks.busy.items()]
        parts = parts or [str(error).removeprefix("forming the group failed: ")]
        return "; ".join([*parts, *([] if REPAIR in parts[0] else [REPAIR])])

    def _leave(self, deadline: float) -> Going:
        """All ranks leave the group; returns what goes with it."""
        if self._app is not None:
            self._unprepared = set(range(self.world_size))
            self.ask_app(range(self.world_size), on_rank.release_app(apps.find(self._app)))
        return self._manager.leave(deadline)


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
        with self.turn, self._told(progress):
            self.carried = ""
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
        fetched: Fetched | None = None
        if names:
            fetched = self._pack_for_repair(names, 0 if source is None else source, gone)
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
        if fetched is not None:
            self._unpack(fetched, replaced)
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

    def _unpack(self, fetched: Fetched, ranks: Sequence[int]) -> None:
        try:
            delivery.deliver(self.ranks, fetched.values, fetched.reply["along"], ranks, self._progress)
        except TransferError as error:
            raise TransferError(f"{ranks_text(ranks)} replaced, but {error}") from None
        transfer.notify_shares(fetched.reply["shares"], "copied")

    def _pack_for_repair(self, names: Sequence[str], source: int, gone: Sequence[int]) -> Fetched:
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
        transfer.forward(fetched, "repaired")
        return fetched
