"""Group: all ranks as one object.

    Group.run("loss = step()")                        main thread of the notebook
        cell             -> engine of each rank       (ipyparallel: client, controller, engine)
        stream, display  <- each rank, live           client's IO thread -> one queue -> CellOutput on the main thread
        its answer       <- each rank                 the cell ends when every rank has answered and fallen silent
        errors           -> one CellError, by rank

Requests of ddip itself (join the group, take objects, tell figures) are calls of functions in ``ddip.rank``;
``ranks.py`` sends them. ``lifecycle.py`` starts, changes and ends the ranks, and makes the parts of a group that runs:
``cells.py`` runs the cells, ``process_group.py`` forms the process group and mends it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from ddip import apps, guard
from ddip.cluster import devices
from ddip.cluster.cluster_api import Cluster
from ddip.cluster.processes import ownership
from ddip.cluster.reach import Reach
from ddip.errors import BadInput, GroupError, RequestInterrupted, ranks_text
from ddip.group import repair, status, stopping
from ddip.group.cells import logs
from ddip.group.cells.cell import Cell
from ddip.group.cells.cell_state import Limits
from ddip.group.cells.comms import Comms
from ddip.group.cells.history import History
from ddip.group.cells.running import RunningCell
from ddip.group.lifecycle import SAME, Lifecycle, Parts, nobody, own_cluster
from ddip.group.members import placement
from ddip.group.members.members import Member
from ddip.group.members.placement import GroupSpec, HostRequest, Request
from ddip.group.members.ranks import Ranks
from ddip.group.objects import model_layout as shards
from ddip.group.objects import modules, transfer
from ddip.group.objects.modules import Modules, ModulesPushed
from ddip.group.objects.transfer import Transferred
from ddip.group.options import Options
from ddip.group.profiling.profile import Profiling, folder_for
from ddip.group.watching import peek, vitals
from ddip.group.watching.peek import SECONDS
from ddip.group.watching.vitals import PERIOD
from ddip.output.area import notify
from ddip.output.cells.background_page import BackgroundOutput, Differing
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.router import CellOutput
from ddip.output.progress import Report
from ddip.output.tables import tables
from ddip.output.tables.check_table import CheckTable
from ddip.output.tables.profile_report import Profile
from ddip.output.tables.shards_table import ShardsTable
from ddip.output.tables.vitals_table import RankVitals
from ddip.protocol import on_rank
from ddip.protocol.cell_messages import Asked
from ddip.protocol.location import Stack, StackLocation
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.status_types import Status
from ddip.settings import DEFAULTS

log = logging.getLogger("ddip")
log.addHandler(logging.NullHandler())
guard.show = notify

NAME_SECONDS = 2.0
"""How long ``has_name`` waits for rank 0's answer, after a cell that has failed anyway."""
STACK_SECONDS = 1.0
"""How long ``stacks`` waits for a rank's answer."""
ASKING = "asking the ranks was interrupted"


class Group:
    """A group of ranks, each a process that keeps its variables from cell to cell.

    Parameters
    ----------
    n
        Number of ranks on the CPU. With neither `n` nor `gpus`: one rank on each GPU, or two on the CPU.
    gpus
        GPU of each rank, in rank order, as this process counts GPUs; a GPU may come twice. Or ``all``.
    backend
        Of ``torch.distributed``. Default: ``gloo``, or ``cpu:gloo,cuda:nccl`` on GPUs.
    app
        Name of a framework adapter to prepare on every rank.
    hosts
        Other hosts, by ssh: ``"h1:4,h2:4"``, or a list of `HostRequest`. `n` and `gpus` are then those of each host.
    reach
        How they are reached, and where their ranks begin.
    timeout
        Seconds to wait for the group to form.
    collect
        Collect garbage on every rank after each cell, once its answer has been sent.
    spawn
        Start each engine as a process of its own. Otherwise, on Linux, they are forked from one process that has
        imported torch: quicker, and in less memory.
    failure_grace
        Seconds that the other ranks get to end a cell by themselves when one has failed; then those that wait in a
        collective are released.
    stall_timeout
        Seconds without progress after which a cell says which rank waits where.
    display
        How cells are shown.
    history
        Of cells of former groups, to go on with.
    progress
        Told what is under way while the group forms; what takes long later has an argument of its own for it.

    Raises
    ------
    BadInput
        for a group that cannot be on this machine.
    GroupError
        if it did not form; nothing is left running then.
    """

    def __init__(
        self,
        n: int | None = None,
        gpus: Sequence[int] | Literal["all"] | None = None,
        *,
        backend: str | None = None,
        app: str | None = None,
        hosts: Sequence[HostRequest] | str = (),
        reach: Reach | None = None,
        timeout: float = DEFAULTS.timeout,
        collect: bool = DEFAULTS.collect,
        spawn: bool = DEFAULTS.spawn,
        failure_grace: float = DEFAULTS.failure_grace,
        stall_timeout: float = DEFAULTS.stall_timeout,
        display: DisplayOptions | None = None,
        history: History | None = None,
        progress: Report = nobody,
    ) -> None:
        self.options = Options(timeout, collect, spawn, failure_grace, stall_timeout, display or DisplayOptions())
        """What may be changed at any time, for what comes."""
        self.history = history or History()
        """The cells of this group, and of those before it."""
        self.transferred = Transferred()
        """Size of what the last push sent to each rank, or the last pull brought, bytes."""
        self.last_profile: Profile | None = None
        """Of the cell that was profiled last."""
        if isinstance(hosts, str):
            hosts = placement.parse_hosts(hosts)
        if gpus == "all" and not hosts:
            gpus = placement.parse_gpus(["all"], len(devices.gpu_names()))
        chosen = gpus if gpus is None or gpus == "all" else tuple(gpus)
        request = Request(n, chosen, backend, app, tuple(hosts), reach or Reach())
        self._modules = Modules()
        self.lifecycle = Lifecycle(request, self._new_cluster, self.options, self.history, progress)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- life

    def _new_cluster(self, request: Request) -> Cluster:
        """The processes that the ranks will be, of which none runs yet."""
        ownership.clear_up_orphans()
        return own_cluster(request, self.options.spawn)

    def change(self, request: Request, progress: Report = nobody) -> bool:
        """Make it the group that `request` asks for; returns False if it is that already.

        The engines that can stay do, with their variables. Raises as ``Group`` does; if the new ranks do not come, the
        group stays as it was.
        """
        return self.lifecycle.change(request, progress)

    def restart(self, request: Request = SAME, progress: Report = nobody) -> None:
        """End every engine and start afresh, without any variables: the same group, or the one that is asked for."""
        self.lifecycle.restart(request, progress)
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
        return repair.repair(self.lifecycle, self._modules, names, source, hosts, progress)

    def shutdown(self) -> None:
        """End all processes and remove all files; the group is empty then. May be called twice."""
        self.lifecycle.shutdown()

    close = shutdown

    @property
    def alive(self) -> bool:
        """False after ``shutdown``."""
        return self.lifecycle.alive

    @property
    def request(self) -> Request:
        """What was asked for, without an app that cannot be prepared."""
        return self.lifecycle.request

    @property
    def spec(self) -> GroupSpec:
        """The ranks that were made of that, and where they are."""
        return self.lifecycle.spec

    @property
    def _parts(self) -> Parts:
        return self.lifecycle.parts

    @property
    def ranks(self) -> Ranks:
        """The ranks of a group that has not ended; raises GroupError if it has."""
        return self._parts.ranks

    @property
    def members(self) -> list[Member]:
        """The members in rank order."""
        return self.ranks.members

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.lifecycle.size

    @property
    def cluster(self) -> Cluster:
        """The processes below; of those that ipyparallel has started, ``client`` is the ``ipyparallel.Client``."""
        return self.ranks.cluster

    @property
    def comms(self) -> Comms:
        """Who passes on the messages of the ranks' widgets."""
        return self._parts.comms

    @property
    def new_ranks(self) -> list[int]:
        """The ranks that a change or a repair has added: they lack the variables of the cells that ran before."""
        return self._parts.new_ranks.ranks

    @property
    def carried(self) -> str:
        """What the new ranks of the last change or repair have got of the others' settings, in words."""
        return self._parts.new_ranks.carried

    @property
    def seconds(self) -> float:
        """That the last start, change or repair took."""
        return self.lifecycle.seconds

    def describe(self) -> str:
        """Ranks, devices and backend in one line."""
        return self.lifecycle.describe()

    # -- cells

    def run(
        self,
        code: str,
        ranks: Sequence[int] | None = None,
        *,
        show_ranks: Sequence[int] = (0,),
        quiet: bool = False,
        timeout: float | None = None,
        tell: bool = False,
        unmatched: bool = False,
        log: str = "",
        profile: str | None = None,
    ) -> None:
        """Run `code` as a cell on `ranks` (default: all), and show what the ranks in `show_ranks` write and display.

        With `tell` it is said at the end where it ran and how long it took, however short that was.

        Each rank writes what it writes to the file ``<log>.<rank>.log``, too, whole and as it comes.

        If it leaves the ranks of a group with different numbers of collectives begun, the group is formed again before
        it is used; with `unmatched` that is meant, and the next cells may begin what is missing.

        With `profile`, the name of a folder (empty: a new one in ``ddip_profile``), each rank records what it does with
        torch's profiler; the traces are written there, the figures are shown, and are in `last_profile`.

        Returns when every rank has finished. Raises CellError if it failed on any rank, seen or not; CellTimeout if it
        took longer than `timeout` seconds; CellInterrupted if the user interrupted it. Whatever waited in a collective
        was released then, the variables are there, and the group is formed again before it is used.

        Raises BadInput for ranks that the group has not, and GroupError if a rank is gone or busy or the group cannot
        be formed; nothing has run then.
        """
        where, seen = self._checked(ranks), placement.check_ranks(show_ranks, self.world_size, "show_ranks")
        asked = self._asked_of_ranks(log)
        with contextlib.ExitStack() as until_it_ends:
            with self.lifecycle.turn:
                self.lifecycle.ensure_ready_for_cell(where)
                if profile is not None:
                    asked |= until_it_ends.enter_context(self._profiled(profile, where))
                show = CellOutput(seen, self._display(tell), quiet=quiet, comms=self.comms)
                running = self._admit(code, where, show, timeout, until_it_ends)
            self._parts.cells.run(running, unmatched, asked)

    def run_there_too(
        self, code: str, ranks: Sequence[int], here: tuple[str, str], *, timeout: float | None, tell: bool
    ) -> None:
        """Run `code` as a cell that has run in the notebook, and has shown `here` there
        (``output/cells/background_page.py``); only what ranks show that differs is shown. Otherwise as `run`."""
        where = self._checked(ranks)
        with contextlib.ExitStack() as until_it_ends:
            with self.lifecycle.turn:
                self.lifecycle.ensure_ready_for_cell(where)
                show = Differing(where, self._display(tell), here, comms=self.comms)
                running = self._admit(code, where, show, timeout, until_it_ends)
            self._parts.cells.run(running, False, {})

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
            self.lifecycle.ensure_ready_for_cell(where, cell)
            if profiling is not None:
                profiling.prepare(where)

        with self.lifecycle.turn:
            queued = queue and bool(self._parts.cells.active_on(where))
            if not queued:
                ready()
            number = self._parts.cells.number()
            begins = f"cell {number} {'waits for' if queued else 'runs in the background on'} {ranks_text(where)}"
            output = BackgroundOutput(seen, begins, self.options.display, quiet=quiet, comms=self.comms)
            cell = Cell(number, tuple(where), code, output, background=True)
            limits = Limits(self.options.failure_grace, self.options.stall_timeout, timeout, self.ranks.can_unblock)
            with contextlib.ExitStack() as until_it_goes_on:
                running = self._parts.cells.admit(cell, limits, until_it_goes_on)
                if profiling is not None:
                    asked |= {"profile": str(profiling.folder)}
                    running.after = lambda stuck: self._show_profile(profiling, where, stuck, output)
                self._parts.cells.start(running, unmatched, asked, (lambda: ready(cell)) if queued else None)
        return cell

    def wait_until_free(self, ranks: Sequence[int] | None = None) -> None:
        """Wait for the cells that `ranks` (default: all) run, or have still to run; the stop button ends the wait.

        Raises GroupError if one of them fails.
        """
        where = self._checked(ranks)
        while active := self._parts.cells.active_on(where):
            numbers = ", ".join(
                f"{cell.text} goes on (%dipwait {cell.number}, %dipstop {cell.number})" for cell in active
            )
            with stopping.button(f"waiting was interrupted, and this cell did not run; {numbers}") as button:
                button.wait_for([cell.done for cell in active], float("inf"))
            for cell in active:
                if cell.done.done() and cell.outcome != "ok":
                    what = f"{cell.text}, for which this cell waited, {cell.outcome_text}; it did not run"
                    raise GroupError(f"{what}; %dipwait {cell.number} shows the error")

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

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Interrupt the cell that runs on `ranks` (default: all): in Python code it ends with KeyboardInterrupt.

        Where none runs, nothing happens.
        """
        self.ranks.interrupt_what_runs(self._checked(ranks))

    def stacks(self) -> dict[int, Stack | None]:
        """Where each rank is, and the stacks of all its threads; None: it does not answer. Works while a cell runs."""
        with stopping.button(ASKING) as button:
            ranks, ended = range(self.world_size), self.ranks.ended
            answers = self.ranks.call_on_control_channel(
                ranks, on_rank.whole_stack(), seconds=STACK_SECONDS, button=button
            )
            stacks: dict[int, Stack | None] = {}
            for rank, answer in answers.items():
                if answer is not None:
                    stacks[rank] = tables.stack_of(answer)
                elif not button.pressed:
                    place = StackLocation(state="ended") if rank in ended else self.ranks.place_from_outside(rank)
                    stacks[rank] = None if place is None else Stack(place, {"main": str(place)})
            return stacks

    def set_collect(self, collect: bool) -> None:
        """Turn the collection of garbage after each cell on or off."""
        self.options.collect = collect
        self.ranks.call_on_control_channel(self.ranks.live, on_rank.set_collect(collect), seconds=status.ANSWER_SECONDS)

    def command(self, text: str) -> str | None:
        """Give `text` to the app on every rank; returns what it answers on rank 0."""
        app = self._parts.app
        if app.name is None:
            raise BadInput(f"%%dip -a {text}: this group has no app; start it with %makedip -a NAME")
        with self.lifecycle.turn:
            self.lifecycle.ensure_ready()
            return app.ask(range(self.world_size), on_rank.command_app(apps.find(app.name), text))[0]

    # -- what cells have in common

    def _display(self, tell: bool) -> DisplayOptions:
        return replace(self.options.display, report_after=0.0) if tell else self.options.display

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
        cell = Cell(self._parts.cells.number(), tuple(where), code, show, told=True)
        limits = Limits(self.options.failure_grace, self.options.stall_timeout, timeout, self.ranks.can_unblock)
        return self._parts.cells.admit(cell, limits, until_it_ends)

    def _asked_of_ranks(self, log: str) -> Asked:
        """What the ranks are told of a cell besides; raises BadInput for a `log` that cannot be written."""
        return {"log": str(logs.checked(log))} if log else {}

    @contextlib.contextmanager
    def _profiled(self, folder: str, ranks: Sequence[int]) -> Iterator[Asked]:
        """While this lasts, a cell is profiled; what its ranks must be told for it."""
        profiling = Profiling(self.ranks, folder_for(folder))
        try:
            with profiling.around(ranks, lambda: self._parts.cells.stuck):
                yield {"profile": str(profiling.folder)}
        finally:
            self.last_profile = profiling.result

    def _show_profile(
        self, profiling: Profiling, ranks: Sequence[int], stuck: Sequence[int], output: BackgroundOutput
    ) -> None:
        profiling.finish(ranks, stuck, output.show_more)
        self.last_profile = profiling.result

    # -- names

    def try_call(self, call: RemoteCall[R], seconds: float) -> R | None:
        """What rank 0 answers on its main thread; None if it is busy, or takes longer than `seconds`."""
        if 0 in self._parts.cells.stuck or 0 in self.ranks.ended or self._parts.cells.active_on([0]):
            return None
        return self.ranks.try_call(0, call, seconds)

    def has_name(self, name: str) -> bool:
        """Is `name` a variable of rank 0?"""
        return bool(self.ranks.call_on_control_channel([0], on_rank.has_name(name), seconds=NAME_SECONDS)[0])

    # -- objects

    def push(
        self, values: Mapping[str, Any], ranks: Sequence[int] | None = None, progress: Report = nobody
    ) -> list[str]:
        """Put `values` into the namespaces of `ranks` (default: all); returns the names whose tensors moved to the CPU.

        Raises TransferError, and changes nothing on any rank, if one of them cannot be carried; BadInput for ranks that
        the group has not, and for ``rank``, ``world_size`` and ``device``, which are each rank's own; GroupError if a
        rank is gone or busy; RequestInterrupted if the user stopped it.
        """
        to = self._checked(ranks)
        transfer.check_own(values, "push")
        with self.lifecycle.turn:
            with self.lifecycle.progress.told_to(progress):
                self.lifecycle.ensure_ready(to)
            self.transferred = transfer.push(self.ranks, values, to, progress)
        return [*self.transferred.moved]

    def pull(self, names: Sequence[str], rank: int = 0, progress: Report = nobody) -> dict[str, Any]:
        """The objects `names` of `rank`, with tensors on the CPU.

        Raises TransferError if one of them cannot be had, and what `push` raises besides.
        """
        (rank,) = placement.check_ranks([rank], self.world_size, "rank")
        return self.pull_all(names, [rank], progress)[0][0]

    def pull_all(
        self, names: Sequence[str], ranks: Sequence[int], progress: Report = nobody
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The objects `names` of each of `ranks`, in order, and the names whose tensors moved to the CPU.

        Raises what `pull` does.
        """
        of = self._checked(ranks)
        with self.lifecycle.turn:
            self._parts.cells.ensure_not_running(of, f"%dipull --now {' '.join(names)} looks without waiting")
            with self.lifecycle.progress.told_to(progress):
                if self.ranks.gpu_lost:
                    self.lifecycle.ensure_free(of)
                else:
                    self.lifecycle.ensure_ready(of)
            values, self.transferred = transfer.pull(self.ranks, names, of, progress)
        return values, [*self.transferred.moved]

    def peek(self, names: Sequence[str], rank: int = 0, seconds: float = SECONDS) -> dict[str, Any]:
        """The objects `names` of `rank` as they are at this moment, while it runs a cell, or none; tensors on the CPU.

        The cell waits between two of its steps while tensors are copied, and goes on. If it is inside a long operation,
        such as a collective, a line names that: it may have written half of a tensor. The local variables of functions
        are no variables of the rank.

        Raises TransferError if one of them cannot be had within `seconds`, BadInput for ranks that the group has not,
        GroupError if the rank has ended, and RequestInterrupted if the user stopped it.
        """
        (rank,) = placement.check_ranks([rank], self.world_size, "rank")
        return self.peek_all(names, [rank], seconds)[0][0]

    def peek_all(
        self, names: Sequence[str], ranks: Sequence[int], seconds: float = SECONDS, progress: Report = nobody
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The objects `names` of each of `ranks`, in order, and the names whose tensors moved to the CPU.

        Each rank has a moment of its own. Raises what `peek` does.
        """
        values, self.transferred = peek.peek(self.ranks, names, self._checked(ranks), seconds, progress)
        return values, [*self.transferred.moved]

    # -- the state of a training

    def check(self, names: Sequence[str] = ()) -> CheckTable:
        """Compare the variables of all ranks, and look for common mistakes in a distributed training.

        Only in the variables `names`, if there are any. Raises GroupError if a rank is gone or busy.
        """
        with self.lifecycle.turn:
            self.lifecycle.ensure_ready_for_cell()
            return self._parts.differences.check(names)

    def sync(self, names: Sequence[str] = (), source: int = 0) -> list[str]:
        """Copy the state of rank `source` into the other ranks' objects: the same tensors and wrappers, other values.

        `names` are variables of the ranks. Without them: all that a fault has left different, and all that differs now
        and did not after the last good cell. What differs by design stays. The gradients of these models are cleared.
        Returns the paths that were copied. Raises BadInput for sharded objects and for a rank that the group has not,
        GroupError if a rank is gone or busy; nothing has changed then.
        """
        (rank,) = placement.check_ranks([source], self.world_size, "source")
        with self.lifecycle.turn:
            self.lifecycle.ensure_ready_for_cell()
            copied, refused = self._parts.differences.sync(names, rank)
        for path, why in refused.items():
            notify(f"{path} was not copied: {why}")
        return copied

    def report_faults(self) -> None:
        """Form the group again after a fault, and say what differs on the ranks, if that can be done at once.

        Otherwise it is done before the next cell. Never raises.
        """
        with contextlib.suppress(GroupError, RequestInterrupted), self.lifecycle.turn:
            if self.alive and self._parts.differences.pending and not (self.ranks.ended or self._parts.cells.stuck):
                self.lifecycle.ensure_ready_for_cell()

    # -- the notebook's modules

    def push_modules(
        self, names: str | Sequence[str], *, reload: bool = False, progress: Report = nobody
    ) -> ModulesPushed:
        """Let ranks on hosts without the notebook's folder import its modules, by name: ``"utils, models"``, or a list.

        The source files of each, a ``.py`` file or a package's folder, are sent once a host; again when they have
        changed. Ranks look there first. A module that a rank has imported stays as it is there, or is loaded again, by
        `reload`, as IPython's autoreload does it. Ranks beside the notebook have the files.

        Raises BadInput for a module that is not the notebook's own, such as an installed one, and what `push` raises.
        """
        sources = modules.find(names)
        with self.lifecycle.turn, self.lifecycle.progress.told_to(progress):
            self.lifecycle.ensure_ready()
            return self._modules.push(self.ranks, sources, reload, progress)

    # -- figures

    @property
    def notices(self) -> list[str]:
        """What is to be known of how the group lies on its machines."""
        return self.lifecycle.place.notices(self.spec, self.cluster.hosts)

    def remarks(self) -> list[str]:
        """What stands below the table of its ranks: its network, what a signal has stopped, and its time."""
        hosts, networks = self.cluster.hosts, self._parts.manager.networks()
        ways = [f"{hosts[number].name or 'this machine'} {its}" for number, its in networks.items()]
        between = f"between the hosts: {', '.join(ways)}" if ways else ""
        return [*filter(None, (between, self.cluster.stopped(), self.lifecycle.place.text()))]

    def shards(self, name: str) -> ShardsTable:
        """How the model in the variable `name`, or a part of it (``model.encoder``), is divided among the ranks.

        Raises BadInput if it is not there, or no module, on a rank, and what `push` raises besides.
        """
        with self.lifecycle.turn:
            self.lifecycle.ensure_free()
            return shards.ask(self.ranks, name)

    def info(self) -> list[tables.RankInfo]:
        """Each rank: where it lives, its memory, and what it is doing; also while a cell runs."""
        with stopping.button(ASKING) as button:
            return status.rank_infos(self.ranks, self.spec, button)

    def status(self, cells: int = status.LISTED) -> Status:
        """All that is known of the group as plain data, which JSON holds: ranks, devices, the last `cells` and those
        that go on, and the last error of each rank. Works while cells run, and never waits for them.

        A group that has ended is None there.
        """
        kept = status.last(self.cells, cells)
        with contextlib.suppress(GroupError):  # it has ended, or another thread ends it just now
            parts = self._parts
            infos = self.info()
            group = status.about(self.spec, parts.app.name, parts.manager.healthy, infos)
            return status.group_status(kept, group, infos, parts.cells.stuck)
        return status.group_status(kept)

    def vitals(self, seconds: float = PERIOD) -> list[RankVitals]:
        """Each rank: its state, its cell and where it is there, its rates, whether it waits for others, its CPU time,
        memory and GPU; also while a cell runs. Rates need a second look, so many `seconds` later, if a rank is busy."""
        return vitals.look(self.lifecycle, seconds)
