"""The ranks of a group from their start to their end, in the group that was asked for.

engines         processes, one a rank                     -> Engines
process group   the one that they are in                  -> ProcessGroupManager
app             prepared on every rank, or not yet
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence

from IPython.core.getipython import get_ipython

from ddip import apps
from ddip.cluster import limits, ownership
from ddip.cluster.host import Host
from ddip.cluster.own_cluster import OwnCluster
from ddip.cluster.seam import Cluster
from ddip.errors import REPAIR, BadInput, CellError, GroupError, RequestInterrupted
from ddip.group import places, revival, stopping, wanted
from ddip.group.cell import Cell
from ddip.group.cells import Cells
from ddip.group.comms import Comms
from ddip.group.engines import Engines
from ddip.group.fitness import Fitness
from ddip.group.history import History
from ddip.group.members import Member
from ddip.group.placement import GroupSpec, Request
from ddip.group.prepared import Prepared
from ddip.group.process_group import ProcessGroupManager
from ddip.group.ranks import Ranks
from ddip.output.area import stop_name
from ddip.output.progress import Report
from ddip.protocol import on_rank
from ddip.protocol.reports import Going

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
            self._cells = Cells(self._ranks, self._manager, self.history, self.turn)
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
                with self._told(progress):
                    self._form(spec, request)
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
        self._unprepared, self._came_later = set(), set()
        if ranks is not None:
            with stopping.button(f"{stop_name()} was pressed while the group ended; there is no group any more"):
                self._cells.end_all("the cell ended with its group: %makedip -k, -r, or the end of the notebook")
                self._manager.close()
                ranks.cluster.stop()
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
        if not self._manager.healthy:
            self._cells.ensure_not_running(range(self.world_size), FORMED_AGAIN, before)
            self._form_again()
        if self._unprepared:
            self._prepare(sorted(self._unprepared))
        if self._app is not None and self._app_knows != self._manager.generation:
            self._tell_app(self._app)

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
            self._came_later |= {member.engine for member in members} - {member.engine for member in self.members}
        self.ranks.members = members

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
