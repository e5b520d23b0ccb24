"""Group: all ranks as one object.

    Group.run("loss = step()")                        main thread of the notebook
        cell             -> engine of each rank       (ipyparallel: client, controller, engine)
        stream, display  <- each rank, live           client's IO thread -> one queue -> CellOutput on the main thread
        its answer       <- each rank                 the cell ends when every rank has answered and fallen silent
        errors           -> one CellError, by rank

Requests of ddip itself (join the group, take objects, tell figures) are calls of functions in ``ddip.rank``;
``ranks.py`` sends them. ``cells.py`` runs the cells, ``process_group.py`` forms the process group and mends it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from ddip import apps, guard
from ddip.cluster import devices
from ddip.cluster.reach import Reach
from ddip.errors import BadInput, GroupError, RequestInterrupted
from ddip.group import status, stopping
from ddip.group.background import Background
from ddip.group.cells.history import History
from ddip.group.lifecycle import nobody
from ddip.group.members import placement
from ddip.group.members.placement import HostRequest, Request
from ddip.group.objects import model_layout as shards
from ddip.group.objects import modules, transfer
from ddip.group.objects.modules import ModulesPushed
from ddip.output.area import notify
from ddip.output.cells.background_page import Differing
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.router import CellOutput
from ddip.output.progress import Report
from ddip.output.tables import tables
from ddip.output.tables.check_table import CheckTable
from ddip.output.tables.profile_report import Profile
from ddip.output.tables.shards_table import ShardsTable
from ddip.protocol import on_rank
from ddip.protocol.location import Stack, StackLocation
from ddip.protocol.on_rank import R, RemoteCall
from ddip.settings import DEFAULTS

log = logging.getLogger("ddip")
log.addHandler(logging.NullHandler())
guard.show = notify

NAME_SECONDS = 2.0
"""How long ``has_name`` waits for rank 0's answer, after a cell that has failed anyway."""
STACK_SECONDS = 1.0
"""How long ``stacks`` waits for a rank's answer."""
ASKING = "asking the ranks was interrupted"


class Group(Background):
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
        self.failure_grace = failure_grace
        self.stall_timeout = stall_timeout
        self.display = display or DisplayOptions()
        self.transferred = transfer.Transferred()
        """Size of what the last push sent to each rank, or the last pull brought, bytes."""
        self.last_profile: Profile | None = None
        """Of the cell that was profiled last."""
        if isinstance(hosts, str):
            hosts = placement.parse_hosts(hosts)
        if gpus == "all" and not hosts:
            gpus = placement.parse_gpus(["all"], len(devices.gpu_names()))
        chosen = gpus if gpus is None or gpus == "all" else tuple(gpus)
        request = Request(n, chosen, backend, app, tuple(hosts), reach or Reach())
        super().__init__(request, timeout, collect, spawn, progress, history or History())

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

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
            with self.turn:
                self.ensure_ready_for_cell(where)
                if profile is not None:
                    asked |= until_it_ends.enter_context(self._profiled(profile, where))
                show = CellOutput(seen, self._display(tell), quiet=quiet, comms=self._comms)
                running = self._admit(code, where, show, timeout, until_it_ends)
            self._cells.run(running, unmatched, asked)

    def run_there_too(
        self, code: str, ranks: Sequence[int], here: tuple[str, str], *, timeout: float | None, tell: bool
    ) -> None:
        """Run `code` as a cell that has run in the notebook, and has shown `here` there
        (``output/cells/background_page.py``); only what ranks show that differs is shown. Otherwise as `run`."""
        where = self._checked(ranks)
        with contextlib.ExitStack() as until_it_ends:
            with self.turn:
                self.ensure_ready_for_cell(where)
                show = Differing(where, self._display(tell), here, comms=self._comms)
                running = self._admit(code, where, show, timeout, until_it_ends)
            self._cells.run(running, False, {})

    def _display(self, tell: bool) -> DisplayOptions:
        return replace(self.display, report_after=0.0) if tell else self.display

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
        self.collect = collect
        self.ranks.call_on_control_channel(self.ranks.live, on_rank.set_collect(collect), seconds=status.ANSWER_SECONDS)

    def command(self, text: str) -> str | None:
        """Give `text` to the app on every rank; returns what it answers on rank 0."""
        if self._app is None:
            raise BadInput(f"%%dip -a {text}: this group has no app; start it with %makedip -a NAME")
        with self.turn:
            self.ensure_ready()
            answers: list[str | None] = self.ask_app(
                range(self.world_size), on_rank.command_app(apps.find(self._app), text)
            )
        return answers[0]

    # -- names

    def try_call(self, call: RemoteCall[R], seconds: float) -> R | None:
        """What rank 0 answers on its main thread; None if it is busy, or takes longer than `seconds`."""
        if 0 in self._cells.stuck or 0 in self.ranks.ended or self._cells.active_on([0]):
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
        with self.turn:
            with self._told(progress):
                self.ensure_ready(to)
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
        with self.turn:
            self._cells.ensure_not_running(of, f"%dipull --now {' '.join(names)} looks without waiting")
            with self._told(progress):
                if self.ranks.gpu_lost:
                    self.ensure_free(of)
                else:
                    self.ensure_ready(of)
            values, self.transferred = transfer.pull(self.ranks, names, of, progress)
        return values, [*self.transferred.moved]

    # -- the state of a training

    def check(self, names: Sequence[str] = ()) -> CheckTable:
        """Compare the variables of all ranks, and look for common mistakes in a distributed training.

        Only in the variables `names`, if there are any. Raises GroupError if a rank is gone or busy.
        """
        with self.turn:
            self.ensure_ready_for_cell()
            return self._differences.check(names)

    def sync(self, names: Sequence[str] = (), source: int = 0) -> list[str]:
        """Copy the state of rank `source` into the other ranks' objects: the same tensors and wrappers, other values.

        `names` are variables of the ranks. Without them: all that a fault has left different, and all that differs now
        and did not after the last good cell. What differs by design stays. The gradients of these models are cleared.
        Returns the paths that were copied. Raises BadInput for sharded objects and for a rank that the group has not,
        GroupError if a rank is gone or busy; nothing has changed then.
        """
        (rank,) = placement.check_ranks([source], self.world_size, "source")
        with self.turn:
            self.ensure_ready_for_cell()
            copied, refused = self._differences.sync(names, rank)
        for path, why in refused.items():
            notify(f"{path} was not copied: {why}")
        return copied

    def report_faults(self) -> None:
        """Form the group again after a fault, and say what differs on the ranks, if that can be done at once.

        Otherwise it is done before the next cell. Never raises.
        """
        with contextlib.suppress(GroupError, RequestInterrupted), self.turn:
            if self.alive and self._differences.pending and not (self.ranks.ended or self._cells.stuck):
                self.ensure_ready_for_cell()

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
        with self.turn, self._told(progress):
            self.ensure_ready()
            return self._modules.push(self.ranks, sources, reload, progress)

    # -- figures

    @property
    def notices(self) -> list[str]:
        """What is to be known of how the group lies on its machines."""
        return self.place.notices(self.spec, self.cluster.hosts)

    def remarks(self) -> list[str]:
        """What stands below the table of its ranks: its network, what a signal has stopped, and its time."""
        hosts, networks = self.cluster.hosts, self._manager.networks()
        ways = [f"{hosts[number].name or 'this machine'} {its}" for number, its in networks.items()]
        between = f"between the hosts: {', '.join(ways)}" if ways else ""
        return [*filter(None, (between, self.cluster.stopped(), self.place.text()))]

    def shards(self, name: str) -> ShardsTable:
        """How the model in the variable `name`, or a part of it (``model.encoder``), is divided among the ranks.

        Raises BadInput if it is not there, or no module, on a rank, and what `push` raises besides.
        """
        with self.turn:
            self.ensure_free()
            return shards.ask(self.ranks, name)

    def info(self) -> list[tables.RankInfo]:
        """Each rank: where it lives, its memory, and what it is doing; also while a cell runs."""
        with stopping.button(ASKING) as button:
            return status.rank_infos(self.ranks, self.spec, button)
