"""Lifecycle of a group: start, change, rebuild and end its ranks. ``repair.py`` replaces the processes of lost ranks.

This is the way from ``%makedip`` to ranks in a process group:

    notebook's kernel                      preload process       controller           engine, one per rank
    -------------------------------------  --------------------  -------------------  --------------------------------
    %load_ext ddip ------ start ---------> imports torch
    %makedip: Group, Lifecycle._start        |
    1 PLAN     places.allocate_hosts         |
               wanted.resolve_spec           |
    2 CLUSTER  OwnCluster, Hosts             |
    3 START    Engines.complete              |
               OwnCluster.start -- fork ---> +-----------------> connection file
                                -- fork ---> +--------------------------------------> hooks; waits for that file
               client <--------------- connect ----------------> | <-- register ----- RankEngine
               greeting.wait_for <---- hello, empty cell ------> | <----------------> |
    4 JOIN     RendezvousFactory.prepare                                              |
               RankSpec ------------------------------------------------------------> membership.join_group
                                                                   gloo, nccl <-----> | <----> other ranks
    5 APP      App.prepare ---------------------------------------------------------> app_hooks.prepare_app

    another host:   notebook --ssh, srun, or an engine--> agent --> preload process there --fork--> engine
                    engine there <--> relay in the agent <== frames, same connection ==> relay here <--> controller

1. Plan. ``places.allocate_hosts`` finds the hosts if the request does not name them: by a Slurm job, the allocation
   that the notebook is in, or an ipyparallel cluster. ``wanted.resolve_spec`` places the ranks on devices, and refuses
   a group that the machines cannot hold. If there are other hosts, it does so after step 2, which finds out their GPUs.

2. Cluster. ``Group._new_cluster`` first ends the processes that dead notebooks have left (``ownership.py``).
   `OwnCluster` creates the run folder, which only this user can enter, for sockets, logs and the store. `Hosts` starts
   the agents of all hosts at once. Each reports the facts of its host, and a host with another version of torch, Python
   or ddip is refused here, before its ranks fail in a way that does not show the reason.

3. Start. To import torch takes seconds, so the preload process does it once, when the extension is loaded, and each
   rank is a fork of it. CUDA does not survive a fork, so that process refuses to fork if it holds a GPU. ``boot.py``
   starts it without the notebook's folder on its path, where a file such as ``random.py`` could replace a module.
   Controller and engines start at the same time, and an engine waits for the connection file. Only an engine on
   another host starts later, with the connection details in its environment. Before an engine registers, it looks for
   the private names that ddip needs, and installs the hooks that must be there before its first group
   (``membership.install_hooks``). Registration is not enough to send messages: ZeroMQ drops those for channels that
   are not connected yet, so ``greeting.py`` uses each channel until it answers. `Engines` then checks each `Hello`: the
   version of ddip's protocol, and what torch can do. It also prints which mechanisms of ``rank/native`` are off, by
   ``DDIP_NATIVE`` or a failed self-test.

4. Join. Ranks on one host meet in a file, and ranks on several hosts in a store that the first rank serves
   (``meeting.py``). Before, the hosts try to reach each other (``network.py``): hosts that a firewall parts are named
   in seconds, since torch would retry for a long time, and no rank is blamed for them.
   Each rank applies its `RankSpec` on its main thread, and calls ``init_process_group``. While gloo forms a group, it
   takes any process that connects for a rank, and waits in C++ for a rank that does not come. Therefore the ranks
   first meet in the store, then connect within a short timeout, and then fence their listening sockets
   (``rank/process_group/setup.py``; ``DDIP_NATIVE_LISTENERS``). The notebook compares both ends of all connections
   (``connections.py``): if one leads to an unknown process, the group is formed a second time.

5. App. The adapter, which was imported before the fork, prepares each rank in its group. If that fails on a rank,
   there is no group.

Threads: all steps run on the thread that creates the `Group`, mostly the notebook's main thread. Of the threads that
serve it, ``ddip-cluster`` runs ipyparallel's cluster code, which needs an event loop; ``ddip-warm`` and
``ddip-host-NAME`` read the reports of the preload process and the agents; and the client has one for its messages.

Invariants:

- A start that fails or is interrupted ends all that it has started. A change that fails before the ranks have left
  their former process group, or for a partition of the hosts, changes nothing; otherwise, the next cell completes it
  (`Lifecycle._form`).
- Each process ends with its parent: the preload process and an engine by a signal of the Linux kernel (elsewhere, a
  thread of the engine watches), the controller when it notices that its parent has ended, and an agent when its stdin
  ends. The next start ends others, which ``owner.json`` in the run folder lists.
- ddip's messages pass through sockets in the run folders and the connections to agents. Only torch, and the
  clusters of ``--cluster`` and ``--engines``, listen on a network.

If the preload process cannot fork (macOS, ``DipMagics.spawn``, a GPU that it holds), this host's processes are spawned
with ``boot.py`` instead.
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
from ddip.errors import REPAIR, BadInput, CellError, GroupError, PartitionError, RequestInterrupted
from ddip.group import stopping
from ddip.group.app import App
from ddip.group.cells.cell import Cell
from ddip.group.cells.cells import Cells
from ddip.group.cells.comms import Comms
from ddip.group.cells.differences import Differences
from ddip.group.cells.history import Change, History
from ddip.group.members import places, wanted
from ddip.group.members.engines import Engines
from ddip.group.members.placement import GroupSpec, Request
from ddip.group.members.ranks import Ranks
from ddip.group.options import Options
from ddip.group.process_group import revival
from ddip.group.process_group.fitness import Fitness
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.group.process_group.revival import NewRanks
from ddip.output.area import notify, stop_name
from ddip.output.progress import Report

ipp_log = logging.getLogger("ddip.ipyparallel")
ipp_log.setLevel(logging.ERROR)  # it warns about every engine that ddip ends

FORMED_AGAIN = "the group must first be rebuilt, which needs all ranks free"
APART = (
    "{partition}\ncells without collectives still run, and all variables stay; once the hosts reach each other, the "
    "group is rebuilt before the next cell"
)
SAME = Request()
"""Request without a change."""
NewCluster = Callable[[Request], Cluster]
"""Factory of a group's cluster, in which no process runs yet."""


def own_cluster(request: Request, spawn: bool) -> Cluster:
    """Return a new cluster of this process, on the hosts of `request`.

    With `spawn`, engines are not forked. Starts no engine. Raises GroupError if a host or the run folder cannot be
    used.
    """
    with limits.explain_errors():
        return OwnCluster(ipp_log, not spawn, [host.name for host in request.hosts], request.reach)


def ignore_progress(text: str, share: float | None = None) -> None:
    """Do nothing; the default of all `progress` parameters."""


class Progress:
    """Callable that forwards progress reports to the current listener.

    Outside of `reported_to`, there is none.
    """

    def __init__(self) -> None:
        self._report: Report = ignore_progress

    def __call__(self, text: str, share: float | None = None) -> None:
        self._report(text, share)

    @contextlib.contextmanager
    def reported_to(self, report: Report) -> Iterator[None]:
        """Forward reports to `report` within this context."""
        former, self._report = self._report, report
        try:
            yield
        finally:
            self._report = former


class Parts:
    """Parts of a running group, on the processes of `cluster`; no process runs yet.

    Each start creates new ones, and they end with the group.
    """

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
    """Starts, changes and ends the ranks of a group, and prepares them for each request.

    The constructor starts the group and waits until it has formed. It raises GroupError if the requested group did not
    form; no process is left running then. It raises BadInput for an impossible request, and RequestInterrupted.
    """

    def __init__(
        self, request: Request, new_cluster: NewCluster, options: Options, history: History, report: Report
    ) -> None:
        self.options = options
        self.turn = threading.RLock()
        """Lock for changes of the group and for requests to main threads of ranks. A background cell holds it while it
        begins and after it has ended."""
        self.seconds = 0.0
        """Duration of the last start, change or repair."""
        self.progress = Progress()
        self.spec: GroupSpec
        """Number, devices and hosts of the ranks."""
        self.place: places.Allocation
        """Hosts or job that the group runs on, or ran on."""
        self._new_cluster, self._history = new_cluster, history
        self._request = request
        self._parts: Parts | None = None
        self._reported = ""
        """The partition that was reported last; empty once the group has been rebuilt."""
        self._pid = os.getpid()
        if getattr(get_ipython(), "is_rank", False):
            raise BadInput("ddip.Group: this process is a rank of a group; start groups in the notebook or a script")
        with self.progress.reported_to(report):
            self._start(request)

    # -- state

    @property
    def parts(self) -> Parts:
        """The parts of the running group. Raises GroupError if it has ended, and in a process forked from its own."""
        if os.getpid() != self._pid:  # threads and locks of the group are missing here
            raise GroupError(
                "this process was forked from the one that started the group, and cannot use it; use the group there, "
                "or start another one here with ddip.Group()"
            )
        if self._parts is None:
            raise GroupError("this group has ended; start one with %makedip, or ddip.Group()")
        return self._parts

    @property
    def alive(self) -> bool:
        """False after ``shutdown``."""
        return self._parts is not None

    @property
    def request(self) -> Request:
        """The requested group, without an app that could not be prepared."""
        return self._request if self._parts is None else replace(self._request, app=self._parts.app.name)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parts.ranks.members)

    @contextlib.contextmanager
    def ready_for_push(self, to: Sequence[int], progress: Report) -> Iterator[None]:
        """Hold the turn of the group within the context, and make the ranks `to` ready to receive variables.

        Raises GroupError.
        """
        with self.turn:
            with self.progress.reported_to(progress):
                self.ensure_ready(to, needs_group=False)
            yield

    @contextlib.contextmanager
    def ready_for_pull(self, names: Sequence[str], of: Sequence[int], progress: Report) -> Iterator[None]:
        """Hold the turn of the group within the context, and make the ranks `of` ready to send `names`.

        Raises GroupError.
        """
        with self.turn:
            parts = self.parts
            parts.cells.ensure_not_running(of, f"%dipull --now {' '.join(names)} copies without waiting")
            with self.progress.reported_to(progress):
                if parts.ranks.gpu_lost:
                    self.ensure_free(of)
                else:
                    self.ensure_ready(of, needs_group=False)
            yield

    def describe(self) -> str:
        """Return ranks, devices and backend in one line."""
        return f"ddip: {self.spec.describe(self.request.hosts)}"

    # -- start, change, end

    def _resolve(self, request: Request, hosts: Sequence[Host] = ()) -> GroupSpec:
        return wanted.resolve_spec(request, hosts, 0 if self._parts is None else len(self._parts.ranks.members))

    def _start(self, request: Request) -> None:
        self._history.begin_session()
        self.place = places.allocate_hosts(request, self.progress)
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

    def change(self, request: Request, report: Report = ignore_progress) -> bool:
        """Change the group to the requested one, and return False if nothing had to change.

        Raises BadInput for an impossible request, PartitionError, GroupError if a rank is lost or busy or the group did
        not form, and RequestInterrupted; the message says whether the group has changed.
        """
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
                with self.progress.reported_to(report):
                    marks = parts.differences.rank_marks() if spec.size != former.size else []
                    try:
                        self._form(spec, request)
                    finally:
                        if self.spec is not former:  # even if the next request must complete the change
                            parts.differences.note_size(marks, former.size)
                    parts.differences.refuse_stale()
                    parts.new_ranks.carry_settings()
                what = f"%makedip changed the group from {former.size} to {spec.size} ranks"
                if spec.size == former.size:
                    what = "%makedip changed the backend, devices or app of the group"
                self._history.changes.append(Change(what, resizes=spec.size != former.size))
        except KeyboardInterrupt as error:
            now = "the group is unchanged" if self.spec is former else "the group has the requested form"
            what = f"the change was interrupted; {now} ({self.describe().removeprefix('ddip: ')})"
            why = [str(error)] if isinstance(error, RequestInterrupted) else []
            raise RequestInterrupted("\n".join([what, *why])) from None
        except PartitionError as error:
            if self.spec is not former:
                raise
            raise PartitionError(f"the group is unchanged: {error}") from None
        return True

    def restart(self, request: Request = SAME, report: Report = ignore_progress) -> None:
        """End every engine and start again without any variables: the same group, or the requested one.

        Raises BadInput or GroupError if the request cannot be met, and RequestInterrupted. If the start fails, there is
        no group.
        """
        request = places.restart_request(
            request.after(self.request), self.parts.ranks.cluster.hosts if self.alive else ()
        )
        if not request.hosts and not request.reach.finds:
            spec = self._resolve(request)
            if self.alive:
                self.parts.engines.check_torch(spec)
        with self.progress.reported_to(report), places.hold_resources(request):
            self.shutdown()
            self._request = request
            self._start(request)

    def shutdown(self) -> None:
        """End all processes and remove all temporary files. A second call does nothing.

        Raises RequestInterrupted, after everything has ended, if the stop button was pressed meanwhile.
        """
        if os.getpid() != self._pid:
            return  # only the process that started the group may end it
        atexit.unregister(self.shutdown)
        self._request = self.request
        parts, self._parts = self._parts, None
        try:
            if parts is not None:
                with stopping.note_presses(f"{stop_name()} was pressed while the group was ending; it has ended"):
                    parts.cells.end_all("the cell ended with its group: %makedip -k, -r, or the end of the notebook")
                    parts.manager.close()
                    parts.ranks.cluster.stop()
        finally:
            self.place.give_back()

    def replace_host(self, number: int, name: str, reach: Reach) -> None:
        """Connect to the host `name` in place of the lost host `number`, or to that host again.

        `reach` applies to all hosts from now on. No rank starts. Raises GroupError; nothing has changed then.
        """
        self.progress(f"ddip: reaching {name}", 0.0)
        self.parts.ranks.cluster.replace_host(number, name, reach, time.monotonic() + self.options.timeout)
        hosts = list(self._request.hosts)
        hosts[number] = replace(hosts[number], name=name)
        self._request = replace(self._request, hosts=tuple(hosts), reach=reach)

    # -- readiness

    def ensure_ready(
        self, ranks: Collection[int] | None = None, before: Cell | None = None, *, needs_group: bool = True
    ) -> None:
        """Ensure that all ranks run, `ranks` (default: all) are free, and the process group is usable.

        Call it before each request to main threads of ranks. It rebuilds an unhealthy process group, resets interrupted
        training iterations, and prepares the app on new ranks. It does not wait for running cells: it raises GroupError
        if a rank has ended or is busy. `before`: a queued cell; then cells admitted after it are ignored. If hosts
        cannot reach each other, so that there is no group, it raises PartitionError, or tells the user once if the
        request does without (`needs_group`).
        """
        self.ensure_free(ranks, before)
        parts = self.parts
        parts.ranks.ensure_no_gpu_lost()
        is_same_group = parts.manager.healthy
        if not is_same_group:
            parts.cells.ensure_not_running(range(self.size), FORMED_AGAIN, before)
            try:
                self.rebuild()
            except PartitionError as error:
                if needs_group or parts.ranks.busy:  # a cell would wait for ranks that still try to connect
                    raise
                self._report_partition(str(error))
                return
        parts.manager.iterations.settle(self._free_ranks(ranks, before), is_same_group)
        parts.app.catch_up(self.rebuild)
        is_due = parts.new_ranks.lack_settings or parts.differences.has_stale
        if is_due and len(self._free_ranks(ranks, before)) == self.size:
            parts.differences.refuse_stale()
            parts.new_ranks.carry_settings()

    def _report_partition(self, partition: str) -> None:
        if partition != self._reported:
            self._reported = partition
            notify(APART.format(partition=partition))

    def ensure_ready_for_cell(
        self, ranks: Collection[int] | None = None, before: Cell | None = None, *, needs_group: bool = False
    ) -> None:
        """Call `ensure_ready`, then print which variables an earlier fault left different across ranks.

        Before a cell on all ranks, also print which optimizers of new ranks differ from those of the others. If other
        cells run, the comparison is left to a later call. Raises the errors of `ensure_ready`, and RequestInterrupted.
        """
        self.ensure_ready(ranks, before, needs_group=needs_group)
        parts = self.parts
        compared = parts.new_ranks.compared if ranks is None or len(ranks) == self.size else None
        if not (parts.differences.pending or compared is not None) or not parts.manager.healthy:
            return
        if parts.cells.active_on(range(self.size), before):
            return
        if parts.differences.pending:
            parts.differences.report_fault()
        if compared is not None:
            parts.new_ranks.compared = parts.differences.report_new_ranks(compared)

    def _free_ranks(self, ranks: Collection[int] | None, before: Cell | None) -> Collection[int]:
        """Return the free ranks: all if `ranks` is None or no cell runs, else `ranks`. Ignores cells after `before`."""
        everyone = range(self.size)
        return everyone if ranks is None or not self.parts.cells.active_on(everyone, before) else ranks

    def ensure_free(self, ranks: Collection[int] | None = None, before: Cell | None = None) -> None:
        """Ensure that every rank's process runs, and that `ranks` (default: all) are free.

        Raises GroupError otherwise. It does not wait for running cells, but it interrupts leftovers of earlier requests
        and abandoned cells, and waits while they make progress. `before`: a queued cell; then cells admitted after it
        are ignored. Raises RequestInterrupted.
        """
        parts = self.parts
        parts.ranks.cluster.ensure_controller()
        parts.cells.ensure_not_running(range(self.size) if ranks is None else ranks, before=before)
        parts.ranks.ensure_all()
        parts.ranks.end_late()
        parts.cells.end_abandoned()

    # -- forming

    def _form(self, spec: GroupSpec, request: Request) -> None:
        """Bring the ranks into the group of `spec`, which `request` asked for, and wait until it has formed.

        A failure or interrupt before all ranks have left the old process group leaves the group unchanged, and so does
        a partition of the hosts. After that point the group is the requested one, and the next cell completes missing
        steps.
        """
        began = time.monotonic()
        deadline = began + self.options.timeout
        parts = self.parts
        ranks, cluster, manager = parts.ranks, parts.ranks.cluster, parts.manager
        new = not ranks.members  # a first start that fails ends all processes
        try:
            manager.ensure_connected(spec)
            members = parts.engines.complete(spec, request.app, deadline)
            self.progress(f"ddip: forming a group of {spec.size} rank{'s' * (spec.size > 1)}", 0.9)
            with stopping.note_presses():
                former = ranks.members, self.request, self.spec
                if not new:
                    parts.app.release()
                lost_objects = None if new else manager.leave(deadline)
                ranks.ensure_no_gpu_lost()
                self._request, self.spec = request, spec
                parts.new_ranks.set_members(members)
                parts.app.choose(request.app)
                try:
                    manager.join(spec, self.options.collect, deadline)
                except PartitionError:
                    ranks.members, self._request, self.spec = former
                    parts.app.choose(self._request.app)
                    raise
                except GroupError as error:
                    raise error if new else GroupError(f"forming the group failed: {self._blame(error)}") from None
                cluster.stop_engines_but([member.engine for member in members])
                if lost_objects is not None:
                    revival.revive_objects(ranks, manager, lost_objects)
                parts.app.prepare(is_start=new)
        except BaseException:
            if new:
                raise
            with stopping.note_presses():
                cluster.stop_engines_but([member.engine for member in ranks.members])
            raise
        self.seconds = time.monotonic() - began

    def rebuild(self) -> None:
        """Rebuild the process group with the same ranks, after an abort or a cell has left it unusable.

        Raises PartitionError if hosts cannot reach each other, GroupError that names the ranks at fault, and
        RequestInterrupted.
        """
        deadline = time.monotonic() + self.options.timeout
        parts = self.parts
        with stopping.note_presses():
            try:
                parts.manager.ensure_connected(self.spec)
                lost_objects = parts.manager.leave(deadline)
                if not parts.ranks.gpu_lost:
                    parts.manager.join(self.spec, self.options.collect, deadline)
            except PartitionError:
                parts.manager.ensure_released()
                raise
            except GroupError as error:
                raise GroupError(f"the group could not be rebuilt: {self._blame(error)}") from None
            parts.ranks.ensure_no_gpu_lost()
            self._reported = ""
            parts.fitness.unfit.clear()
            revival.revive_objects(parts.ranks, parts.manager, lost_objects)

    def _blame(self, error: GroupError) -> str:
        """Find the ranks that prevent the group from forming, and return a message that names them."""
        ranks, fitness = self.parts.ranks, self.parts.fitness
        if ranks.ended:
            return ranks.with_repair(str(error))
        unfit = fitness.find_unfit(self.spec, self.options.collect)
        fitness.unfit = set(unfit)
        texts = [str(CellError(unfit))] if unfit else []
        texts += [f"rank {rank} is still {doing}" for rank, doing in ranks.busy.items()]
        texts = texts or [str(error).removeprefix("forming the group failed: ")]
        return "; ".join([*texts, *([] if REPAIR in texts[0] else [REPAIR])])
