"""The ranks of a group from their start to their end, in the group that was asked for.

engines         processes, one a rank                          -> Engines
process group   the one that they are in                       -> ProcessGroupManager
app             prepared on every rank, or not yet             -> App
new ranks       what they lack, and get of the others          -> NewRanks
cells           that run, or have left the group as it is      -> Cells

A start makes all of these anew (`Parts`); ``repair.py`` puts new processes in place of ranks that are lost.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from IPython.core.getipython import get_ipython

from ddip.cluster import limits
from ddip.cluster.cluster_api import Cluster
from ddip.cluster.ipyparallel.own_cluster import OwnCluster
from ddip.cluster.processes.host import Host
from ddip.cluster.reach import Reach
from ddip.errors import REPAIR, BadInput, CellError, GroupError, RequestInterrupted
from ddip.group import stopping
from ddip.group.app import App
from ddip.group.cells.cell import Cell
from ddip.group.cells.cells import Cells
from ddip.group.cells.comms import Comms
from ddip.group.cells.differences import Differences
from ddip.group.cells.history import History
from ddip.group.members import places, wanted
from ddip.group.members.engines import Engines
from ddip.group.members.placement import GroupSpec, Request
from ddip.group.members.ranks import Ranks
from ddip.group.options import Options
from ddip.group.process_group import revival
from ddip.group.process_group.fitness import Fitness
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.group.process_group.revival import NewRanks
from ddip.output.area import stop_name
from ddip.output.progress import Report
from ddip.protocol.reports import Going

ipp_log = logging.getLogger("ddip.ipyparallel")
ipp_log.setLevel(logging.ERROR)  # it warns of every engine that we end

FORMED_AGAIN = "the group must be formed again before it is used, and for that all ranks must be free"
SAME = Request()
"""Asks for nothing new."""
NewCluster = Callable[[Request], Cluster]
"""Makes the cluster of a group, in which no process runs yet."""


def own_cluster(request: Request, spawn: bool) -> Cluster:
    """A cluster of this process for the group that `request` asks for."""
    with limits.named():
        return OwnCluster(ipp_log, not spawn, [host.name for host in request.hosts], request.reach)


def nobody(text: str, share: float | None = None) -> None:
    """Whom progress is told that nobody wants to know of."""


class Progress:
    """Passes on what is under way to whoever wants to know it just now."""

    def __init__(self) -> None:
        self._report: Report = nobody

    def __call__(self, text: str, share: float | None = None) -> None:
        self._report(text, share)

    @contextlib.contextmanager
    def told_to(self, report: Report) -> Iterator[None]:
        """While this lasts, `report` hears it."""
        former, self._report = self._report, report
        try:
            yield
        finally:
            self._report = former


class Parts:
    """What a group that runs consists of, on the processes of `cluster`; none of them runs yet."""

    def __init__(
        self,
        cluster: Cluster,
        history: History,
        turn: contextlib.AbstractContextManager[object],
        progress: Report,
    ) -> None:
        self.ranks = Ranks(cluster)
        self.engines = Engines(self.ranks, progress)
        self.manager = ProcessGroupManager(self.ranks)
        self.differences = Differences(self.ranks, self.manager)
        self.cells = Cells(self.ranks, self.manager, self.differences, history, turn)
        self.fitness = Fitness(self.ranks, self.manager, self.engines)
        self.app = App(self.ranks, self.manager, self.fitness, progress)
        self.new_ranks = NewRanks(self.ranks)
        self.comms = Comms(self.ranks)


class Lifecycle:
    """Starts, changes and ends the ranks of a group, and has them ready for what is to be done with them.

    Raises GroupError if the group that `request` asks for did not form; nothing is left running then.
    """

    def __init__(
        self, request: Request, new_cluster: NewCluster, options: Options, history: History, report: Report
    ) -> None:
        self.options = options
        self.turn = threading.RLock()
        """Held by whoever changes the group, or asks main threads of ranks for something; a cell that goes on in the
        background has it when it begins and when it has ended."""
        self.seconds = 0.0
        """That the last start, change or repair took."""
        self.progress = Progress()
        self.spec: GroupSpec
        """The ranks of the group, and where they are."""
        self.place: places.Place
        """Where it is, or was."""
        self._new_cluster, self._history = new_cluster, history
        self._request = request
        self._parts: Parts | None = None
        self._pid = os.getpid()
        if getattr(get_ipython(), "is_rank", False):
            raise BadInput("ddip.Group: this process is a rank of a group; start groups in the notebook or a script")
        with self.progress.told_to(report):
            self._start(request)

    # -- what there is

    @property
    def parts(self) -> Parts:
        """Those of a group that has not ended; raises GroupError if it has."""
        if self._parts is None:
            raise GroupError("this group has ended; start one with %makedip, or ddip.Group()")
        return self._parts

    @property
    def alive(self) -> bool:
        """False after ``shutdown``."""
        return self._parts is not None

    @property
    def request(self) -> Request:
        """What was asked for, without an app that cannot be prepared."""
        return self._request if self._parts is None else replace(self._request, app=self._parts.app.name)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parts.ranks.members)

    def describe(self) -> str:
        """Ranks, devices and backend in one line."""
        return f"ddip: {self.spec.describe(self.request.hosts)}"

    # -- start, change, end

    def _resolve(self, request: Request, hosts: Sequence[Host] = ()) -> GroupSpec:
        return wanted.resolve(request, hosts, 0 if self._parts is None else len(self._parts.ranks.members))

    def _start(self, request: Request) -> None:
        self.place = places.found(request, self.progress)
        request = self.place.request
        if not request.hosts:
            self.spec = self._resolve(request)
        atexit.register(self.shutdown)
        try:
            self._parts = Parts(self._new_cluster(request), self._history, self.turn, self.progress)
            cluster = self._parts.ranks.cluster
            if request.hosts:
                cluster.wait_for_hosts(time.monotonic() + self.options.timeout, self.progress)
                self.spec = self._resolve(request, cluster.hosts)
            self._form(self.spec, request)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, KeyboardInterrupt):
                raise RequestInterrupted("the start was interrupted; there is no group") from None
            raise

    def change(self, request: Request, report: Report = nobody) -> bool:
        """Make it the group that `request` asks for; returns False if it is that already."""
        former = self.spec
        try:
            with self.turn:
                self.ensure_ready()
                parts = self.parts
                request = request.after(self.request)
                wanted.ensure_same_hosts(request, self.request)
                spec = self._resolve(request, parts.ranks.cluster.hosts if request.hosts else ())
                if spec == self.spec and request.app == parts.app.name:
                    return False
                parts.new_ranks.carried = ""
                with self.progress.told_to(report):
                    marks = parts.differences.rank_marks() if spec.size != former.size else []
                    self._form(spec, request)
                    if marks:
                        parts.differences.refuse_stale(marks, former.size)
                    parts.new_ranks.carry_settings()
        except KeyboardInterrupt as error:
            now = "the group is unchanged" if self.spec is former else "the group is what was asked for"
            what = f"the change was interrupted; {now} ({self.describe().removeprefix('ddip: ')})"
            why = [str(error)] if isinstance(error, RequestInterrupted) else []
            raise RequestInterrupted("\n".join([what, *why])) from None
        return True

    def restart(self, request: Request = SAME, report: Report = nobody) -> None:
        """End every engine and start afresh, without any variables: the same group, or the one that is asked for."""
        request = places.again(request.after(self.request), self.parts.ranks.cluster.hosts if self.alive else ())
        if not request.hosts and not request.reach.finds:
            spec = self._resolve(request)
            if self.alive:
                self.parts.engines.check_torch(spec)
        with self.progress.told_to(report), places.kept(request):
            self.shutdown()
            self._request = request
            self._start(request)

    def shutdown(self) -> None:
        """End all processes and remove all files; the group is empty then. May be called twice."""
        if os.getpid() != self._pid:
            return  # a fork of the owner: the group is not its to end
        atexit.unregister(self.shutdown)
        self._request = self.request
        parts, self._parts = self._parts, None
        try:
            if parts is not None:
                with stopping.button(f"{stop_name()} was pressed while the group ended; there is no group any more"):
                    parts.cells.end_all("the cell ended with its group: %makedip -k, -r, or the end of the notebook")
                    parts.manager.close()
                    parts.ranks.cluster.stop()
        finally:
            self.place.give_back()

    def replace_host(self, number: int, name: str, reach: Reach) -> None:
        """Reach the host `name` in place of the lost one with that number.

        Raises GroupError; nothing has changed then.
        """
        self.progress(f"ddip: reaching {name}", 0.0)
        self.parts.ranks.cluster.replace_host(number, name, reach, time.monotonic() + self.options.timeout)
        hosts = list(self._request.hosts)
        hosts[number] = replace(hosts[number], name=name)
        self._request = replace(self._request, hosts=tuple(hosts), reach=reach)

    # -- ready for what is to be done

    def ensure_ready(self, ranks: Collection[int] | None = None, before: Cell | None = None) -> None:
        """Have every rank there, `ranks` (None: all) free, and a good group; raises GroupError if that cannot be.

        Of cells, only those that came `before` that one count.
        """
        self.ensure_free(ranks, before)
        parts = self.parts
        parts.ranks.ensure_no_gpu_lost()
        is_same_group = parts.manager.healthy
        if not is_same_group:
            parts.cells.ensure_not_running(range(self.size), FORMED_AGAIN, before)
            self.form_again()
        parts.manager.iterations.settle(self._free_ranks(ranks, before), is_same_group)
        parts.app.catch_up(self.form_again)
        if parts.new_ranks.lack_settings and len(self._free_ranks(ranks, before)) == self.size:
            parts.new_ranks.carry_settings()

    def ensure_ready_for_cell(self, ranks: Collection[int] | None = None, before: Cell | None = None) -> None:
        """Do what `ensure_ready` does, and then say what a fault before has left different on the ranks."""
        self.ensure_ready(ranks, before)
        parts = self.parts
        if parts.differences.pending and not parts.cells.active_on(range(self.size), before):
            parts.differences.report_fault()

    def _free_ranks(self, ranks: Collection[int] | None, before: Cell | None) -> Collection[int]:
        """All ranks if no cell runs; else these (None: all), which are free."""
        everyone = range(self.size)
        return everyone if ranks is None or not self.parts.cells.active_on(everyone, before) else ranks

    def ensure_free(self, ranks: Collection[int] | None = None, before: Cell | None = None) -> None:
        """Have every rank there, and `ranks` (None: all) free; raises GroupError if that cannot be."""
        parts = self.parts
        parts.ranks.cluster.ensure_controller()
        parts.cells.ensure_not_running(range(self.size) if ranks is None else ranks, before=before)
        parts.ranks.ensure_all()
        parts.ranks.end_late()
        parts.cells.ensure_idle()

    # -- forming

    def _form(self, spec: GroupSpec, request: Request) -> None:
        """Bring the ranks into the group of `spec`.

        What fails, or is interrupted, until all have left the old group leaves it as it was, with the ranks that it
        had. From then on the group is the one that was asked for, and what is missing is done before the next cell.
        """
        began = time.monotonic()
        deadline = began + self.options.timeout
        parts = self.parts
        ranks, cluster, manager = parts.ranks, parts.ranks.cluster, parts.manager
        new = not ranks.members  # if that fails, everything goes
        try:
            members = parts.engines.complete(spec, request.app, deadline)
            self.progress(f"ddip: forming a group of {spec.size} rank{'s' * (spec.size > 1)}", 0.9)
            with stopping.button():
                going = None if new else self._leave(deadline)
                self._request, self.spec = request, spec
                parts.new_ranks.take(members)
                parts.app.choose(request.app)
                cluster.stop_engines_but([member.engine for member in members])
                try:
                    manager.join(spec, self.options.collect, deadline)
                except GroupError as error:
                    raise error if new else GroupError(f"forming the group failed: {self._blame(error)}") from None
                if going is not None:
                    revival.go_on(ranks, manager, going)
                parts.app.prepare(is_start=new)
        except BaseException:
            if new:
                raise
            with stopping.button():
                cluster.stop_engines_but([member.engine for member in ranks.members])
            raise
        self.seconds = time.monotonic() - began

    def form_again(self) -> None:
        """Have the same ranks form a new process group: the former was released, or left by a cell."""
        deadline = time.monotonic() + self.options.timeout
        parts = self.parts
        with stopping.button():
            try:
                going = parts.manager.leave(deadline)
                parts.manager.join(self.spec, self.options.collect, deadline)
            except GroupError as error:
                raise GroupError(f"the group could not be formed again: {self._blame(error)}") from None
            parts.fitness.unfit.clear()
            revival.go_on(parts.ranks, parts.manager, going)

    def _blame(self, error: GroupError) -> str:
        """Find the ranks because of which a group could not be formed; returns what to say of them."""
        ranks, fitness = self.parts.ranks, self.parts.fitness
        if ranks.ended:
            return ranks.with_repair(str(error))
        unfit = fitness.alone(self.spec, self.options.collect)
        fitness.unfit = set(unfit)
        texts = [str(CellError(unfit))] if unfit else []
        texts += [f"rank {rank} is still {doing}" for rank, doing in ranks.busy.items()]
        texts = texts or [str(error).removeprefix("forming the group failed: ")]
        return "; ".join([*texts, *([] if REPAIR in texts[0] else [REPAIR])])

    def _leave(self, deadline: float) -> Going:
        """All ranks leave the group; returns what goes with it."""
        self.parts.app.release()
        return self.parts.manager.leave(deadline)
