"""Group: all ranks as one object, and the public API of ddip.

    Group.run("loss = step()")                        main thread of the notebook
        cell             -> engine of each rank       (ipyparallel: client, controller, engine)
        stream, display  <- each rank, live           client's IO thread -> one queue -> CellOutput on the main thread
        reply            <- each rank                 the cell ends once every rank has replied and its output has ended
        errors           -> one CellError, by rank

Group has parts. ``lifecycle.py`` starts, changes and ends the ranks, and creates the parts of a running group:
``cells.py`` runs the cells, ``process_group.py`` forms and rebuilds the process group. All other requests to ranks
(join the group, take objects, report figures) are calls of functions in ``ddip.rank``. ``protocol/on_rank.py`` lists
these, and ``ranks.py`` sends them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import secrets
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
from ddip.group.cells.history import Change, History
from ddip.group.cells.running import RunningCell
from ddip.group.cells.script_file import find_script
from ddip.group.debugging import ide_access
from ddip.group.debugging.ide_access import IdeAccess
from ddip.group.lifecycle import SAME, Lifecycle, Parts, ignore_progress, own_cluster
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
from ddip.group.saves import Saves
from ddip.group.watching import peek, vitals
from ddip.group.watching.peek import SECONDS
from ddip.group.watching.vitals import PERIOD
from ddip.output.area import inform, notify
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
from ddip.protocol.cell_messages import CellOptions
from ddip.protocol.location import Stack, StackLocation
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import LoadReport, SaveReport
from ddip.protocol.status_types import Status
from ddip.settings import DEFAULTS

log = logging.getLogger("ddip")
log.addHandler(logging.NullHandler())
guard.show = notify

NAME_SECONDS = 2.0
"""Longest wait of ``variable_names`` for the reply of a rank; it is called after a cell has failed."""
STACK_SECONDS = 1.0
"""Longest wait of ``stacks`` for the reply of a rank."""
DEBUG = "%debug"
"""The cell that opens the debugger at the kept error of a rank."""
DIPDEBUG = "%dipdebug"
KEEP_FRAMES = (
    "type %config DipMagics.keep_frames = True, and run the cell again; %pdb on in a %%dip cell opens the debugger at "
    "once"
)
END_SECONDS = 5.0
"""Time for a background cell to end after it was stopped at its prompt."""
ASKING = "asking the ranks was interrupted"


class Group:
    """A group of ranks, each a process that keeps its variables from cell to cell.

    In a ``with`` statement, the group is shut down at the end of the block. After that, only its cells and its status
    can be read; anything else raises GroupError.

    Parameters
    ----------
    n
        Number of ranks on the CPU. Without `n` and `gpus`: one rank per GPU, or two ranks on a machine without GPUs.
    gpus
        GPU of each rank, in rank order, numbered as in this process; a GPU may appear twice. Or ``"all"``.
    backend
        Backend of ``torch.distributed``. Default: ``gloo``, or ``cpu:gloo,cuda:nccl`` on GPUs.
    app
        Name of a framework adapter to prepare on every rank: ``fastai``, ``hf``, ``lightning`` or ``deepspeed``.
    hosts
        Hosts to connect to by ssh: ``"h1:4,h2:4"`` for four ranks on each, or a list of `HostRequest`. Then `n` and
        `gpus` apply per host. Default: this machine.
    reach
        How ddip finds and connects to the hosts, and prepares ranks there.
    timeout
        Seconds to wait for the group to form.
    collect
        True to collect garbage on every rank after each cell, once the rank has replied.
    spawn
        True to start each engine as a new process. By default, on Linux, engines are forked from a preload process that
        has imported torch, which is faster and takes less memory.
    failure_grace
        Seconds for the other ranks to finish a cell after one rank has failed; then ddip aborts the collectives that
        they wait in. It does so at once if all of them wait, and only for ranks on which the cell has ended.
    stall_timeout
        Seconds without progress after which ddip prints where each rank waits.
    keep_frames
        True to keep the frames of a failed cell for `debug`, with the tensors that they hold, until the next cell.
    display
        Options for the output of cells.
    history
        History of earlier groups, to continue.
    progress
        Function to call while the group starts, with a description of the current step, and the completed share of the
        whole, from 0 to 1, or None. All `progress` parameters of the methods are called in the same way.

    Raises
    ------
    BadInput
        If an argument is invalid, or the machine lacks the requested devices or resources.
    GroupError
        If the group did not form; no process is left running then.
    RequestInterrupted
        If the user interrupted the start; no process is left running then.
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
        keep_frames: bool = DEFAULTS.keep_frames,
        display: DisplayOptions | None = None,
        history: History | None = None,
        progress: Report = ignore_progress,
    ) -> None:
        limits = timeout, collect, spawn, failure_grace, stall_timeout, keep_frames
        self.options = Options(*limits, display or DisplayOptions())
        """Settings that may be changed at any time; they apply to later steps."""
        self.history = history or History()
        """Cells of this group and of the groups before it."""
        self.transferred = Transferred()
        """Sizes in bytes of the objects of the last push, pull or peek."""
        self.last_profile: Profile | None = None
        """Profile of the last profiled cell."""
        if isinstance(hosts, str):
            hosts = placement.parse_hosts(hosts)
        if gpus == "all" and not hosts:
            gpus = placement.parse_gpus(["all"], len(devices.gpu_names()))
        chosen = gpus if gpus is None or gpus == "all" else tuple(gpus)
        request = Request(n, chosen, backend, app, tuple(hosts), reach or Reach())
        self._modules = Modules()
        self._ide_token = secrets.token_hex(16)
        self.lifecycle = Lifecycle(request, self._new_cluster, self.options, self.history, progress)
        self.saves = Saves(self.lifecycle)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- start, change, end

    def _new_cluster(self, request: Request) -> Cluster:
        """Remove what ended notebooks have left, and return a cluster in which no process runs yet."""
        ownership.clear_up_orphans()
        return own_cluster(request, self.options.spawn)

    def change(self, request: Request, progress: Report = ignore_progress) -> bool:
        """Change the group to the one that `request` describes. Ranks that stay keep their variables.

        Parameters
        ----------
        request
            The requested group. If it names no app or hosts, these stay. If it has neither `n`, `gpus` nor hosts, the
            ranks, devices and backend stay.

        Returns
        -------
        bool
            False if the group is the requested one already.

        Raises
        ------
        BadInput
            If the request is invalid, or names other hosts than those of the group; nothing has changed then.
        GroupError
            If a rank is busy or the new ranks do not start; the group is unchanged then. If the ranks cannot form the
            new process group; the next cell tries again then.
        RequestInterrupted
            If the user interrupted the change; the message says what the group is now.
        """
        return self.lifecycle.change(request, progress)

    def restart(self, request: Request = SAME, progress: Report = ignore_progress) -> None:
        """End every rank, and start the same group or the requested one again, without any variables.

        Parameters
        ----------
        request
            The requested group. If it names no app or hosts, these stay. If it has neither `n`, `gpus` nor hosts, the
            ranks, devices and backend stay.

        Raises
        ------
        BadInput, GroupError, RequestInterrupted
            As for `Group`. After an error there may be no group.
        """
        self.lifecycle.restart(request, progress)
        self._modules.send_again(self.ranks, progress)

    def repair(
        self,
        names: Sequence[str] = (),
        source: int | None = None,
        progress: Report = ignore_progress,
        hosts: Sequence[HostRequest] = (),
    ) -> list[int]:
        """Replace the processes of lost ranks; the other ranks keep their variables.

        A rank is lost if it has ended, does not stop, or can no longer run a cell or join a process group. ddip first
        sends another interrupt to ranks that do not stop, and keeps those that then stop.

        Parameters
        ----------
        names
            Variables to copy to the new ranks.
        source
            Rank from which `names` are copied. Default: 0.
        hosts
            All hosts of the group, with a replacement in the place of each lost one. Default: the same hosts. If a
            Slurm job of ddip has lost nodes, omit `hosts`: ddip submits another job, and waits until it runs.

        Returns
        -------
        list[int]
            The replaced ranks.

        Raises
        ------
        BadInput
            If an argument is invalid, or `names` are given but no rank needs to be replaced.
        GroupError
            If a cell runs, or the new processes do not start; nothing has changed then.
        TransferError
            If one of `names` cannot be pickled; nothing has changed then. If one cannot be unpickled on the new ranks;
            these then lack all `names`.
        RequestInterrupted
            If the user interrupted the repair; the message names the ranks that were not replaced.
        """
        replaced = repair.repair_group(self.lifecycle, self._modules, names, source, hosts, progress)
        if replaced:
            self.history.changes.append(Change(f"%makedip --repair replaced {ranks_text(replaced)}"))
        return replaced

    def shutdown(self) -> None:
        """End all processes of the group, and remove all its temporary files. A second call does nothing."""
        self.saves.finish()
        self.lifecycle.shutdown()

    close = shutdown

    @property
    def alive(self) -> bool:
        """True until `shutdown` has been called."""
        return self.lifecycle.alive

    @property
    def request(self) -> Request:
        """The requested group, without an app that could not be prepared."""
        return self.lifecycle.request

    @property
    def spec(self) -> GroupSpec:
        """Number, devices and hosts of the ranks."""
        return self.lifecycle.spec

    @property
    def _parts(self) -> Parts:
        return self.lifecycle.parts

    @property
    def ranks(self) -> Ranks:
        """The ranks. Raises GroupError if the group has ended."""
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
        """The processes of the group.

        If ddip or ipyparallel started them, the attribute ``client`` is the ``ipyparallel.Client``.
        """
        return self.ranks.cluster

    @property
    def comms(self) -> Comms:
        """Relay of widget messages between the page and the ranks."""
        return self._parts.comms

    @property
    def new_ranks(self) -> list[int]:
        """The ranks that a change or a repair has added; they lack the variables of earlier cells."""
        return self._parts.new_ranks.ranks

    @property
    def seconds(self) -> float:
        """Duration of the last start, change or repair, in seconds."""
        return self.lifecycle.seconds

    def describe(self) -> str:
        """Describe ranks, devices and backend in one line."""
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
        break_on: Sequence[int] | None = None,
    ) -> None:
        """Run `code` as a cell, and return when every rank has finished.

        Parameters
        ----------
        code
            Source of the cell.
        ranks
            Ranks that run the cell. Default: all.
        show_ranks
            Ranks whose output and displays are shown.
        quiet
            True to show the output rank by rank when the cell has ended, instead of live.
        timeout
            Seconds after which ddip stops the cell. Default: no limit.
        tell
            True to print which ranks ran the cell and how long it took, even if it was short.
        unmatched
            True to allow the ranks to begin different numbers of collectives, of which later cells may begin the
            missing ones, or collectives that do not match. Otherwise ddip rebuilds the process group after such a cell.
        log
            Prefix of log files: each rank also writes its whole output to the file ``<log>.<rank>.log``.
        profile
            Folder for traces of torch's profiler; an empty string means a new folder in ``ddip_profile``. ddip also
            shows a summary of the profile, and keeps it in `last_profile`. Default: no profile.
        break_on
            Ranks on which ``breakpoint()`` stops. Default: all.

        Raises
        ------
        CellError
            If the cell failed on any rank, even if the rank's output is not shown.
        CellTimeout, CellInterrupted
            If the cell took longer than `timeout`, or the user interrupted it. After each of these three errors,
            pending collectives have been aborted, all variables are kept, and ddip rebuilds the process group before
            its next use.
        BadInput
            For a rank outside the group, and if the `log` or `profile` cannot be written; nothing has run then.
        GroupError
            If a rank is lost or busy, or the process group cannot be formed; nothing has run then.
        """
        where, seen = self._checked(ranks), placement.check_ranks(show_ranks, self.world_size, "show_ranks")
        asked = self._asked_of_ranks(code, log, break_on)
        with contextlib.ExitStack() as until_it_ends:
            with self.lifecycle.turn:
                cells = self._parts.cells
                self.lifecycle.ensure_ready_for_cell(where)
                self.saves.add_schedule(asked)
                if profile is not None:
                    asked |= until_it_ends.enter_context(self._profiled(profile, where))
                show = CellOutput(seen, self._display(tell), quiet=quiet, comms=self.comms)
                running = self._admit(code, where, show, timeout, until_it_ends)
                running.asked, running.unmatched, running.cell.script = asked, unmatched, asked.get("script")
            cells.run(running)

    def run_there_too(
        self, code: str, ranks: Sequence[int], here: tuple[str, str], *, timeout: float | None, tell: bool
    ) -> None:
        """Run on `ranks` a cell that the notebook has already run, and show only differing output.

        Waits for its end. `here` is the output in the notebook, as (stdout, stderr), which is not shown again (see
        ``output/cells/background_page.py``). `timeout`, `tell`, and the errors: as in `run`.
        """
        where, asked = self._checked(ranks), self._asked_of_ranks(code)
        with contextlib.ExitStack() as until_it_ends:
            with self.lifecycle.turn:
                cells = self._parts.cells
                self.lifecycle.ensure_ready_for_cell(where)
                self.saves.add_schedule(asked)
                show = Differing(where, self._display(tell), here, comms=self.comms)
                running = self._admit(code, where, show, timeout, until_it_ends)
                running.asked = asked
            cells.run(running)

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
        break_on: Sequence[int] | None = None,
    ) -> Cell:
        """Run `code` as a cell in the background, and return at once.

        The output appears below the notebook cell that called this method.

        Parameters
        ----------
        queue
            True to wait if some of `ranks` are busy: the cell begins when their cells have ended, and does not run if
            one of them fails. Otherwise GroupError is raised if a rank is busy.
        code, ranks, show_ranks, quiet, timeout, unmatched, log, profile, break_on
            As for `run`.

        Returns
        -------
        Cell
            The running or queued cell. Its method ``wait`` waits for its end and raises the errors of `run`; ``stop``
            stops it.

        Raises
        ------
        BadInput, GroupError
            As for `run`.
        """
        where, seen = self._checked(ranks), placement.check_ranks(show_ranks, self.world_size, "show_ranks")
        asked = self._asked_of_ranks(code, log, break_on)
        profiling = None if profile is None else Profiling(self.ranks, folder_for(profile))

        def ensure_ready(cell: Cell | None = None) -> None:
            self.lifecycle.ensure_ready_for_cell(where, cell)
            self.saves.add_schedule(asked)
            if cell is not None and cell.script is not None:  # its file may have changed while the cell was queued
                cell.script = find_script(code, cell.script["folder"]) or cell.script
                asked["script"] = cell.script
            if profiling is not None:
                profiling.prepare(where)

        with self.lifecycle.turn:
            queued = queue and bool(self._parts.cells.active_on(where))
            if not queued:
                ensure_ready()
            number = self._parts.cells.number()
            begins = f"cell {number} {'waits for' if queued else 'runs in the background on'} {ranks_text(where)}"
            output = BackgroundOutput(seen, begins, self.options.display, quiet=quiet, comms=self.comms)
            cell = Cell(number, tuple(where), code, output, background=True, script=asked.get("script"))
            limits = Limits(self.options.failure_grace, self.options.stall_timeout, timeout, self.ranks.can_unblock)
            with contextlib.ExitStack() as until_it_goes_on:
                running = self._parts.cells.admit(cell, limits, until_it_goes_on)
                running.asked, running.unmatched = asked, unmatched
                if profiling is not None:
                    asked |= {"profile": str(profiling.folder)}
                    running.after = lambda stuck: self._show_profile(profiling, where, stuck, output)
                self._parts.cells.start(running, (lambda: ensure_ready(cell)) if queued else None)
        return cell

    def wait_until_free(self, ranks: Sequence[int] | None = None) -> None:
        """Wait until all running and queued cells of `ranks` have ended.

        Parameters
        ----------
        ranks
            Ranks to wait for. Default: all.

        Raises
        ------
        GroupError
            If one of these cells fails.
        RequestInterrupted
            If the user pressed the stop button; the cells continue to run.
        """
        where = self._checked(ranks)
        while active := self._parts.cells.active_on(where):
            numbers = ", ".join(
                f"{cell.text} continues (%dipwait {cell.number}, %dipstop {cell.number})" for cell in active
            )
            with stopping.note_presses(f"waiting was interrupted, and this cell did not run; {numbers}") as button:
                button.wait_for([cell.done for cell in active], float("inf"))
            for cell in active:
                if cell.done.done() and cell.outcome != "ok":
                    what = f"this cell did not run: it waited for {cell.text}, which {cell.outcome_text}"
                    raise GroupError(f"{what}; %dipwait {cell.number} shows the error")

    @property
    def cells(self) -> list[Cell]:
        """The last 500 cells of this group and of the groups before it, oldest first."""
        return list(self.history)

    def cell(self, number: int) -> Cell:
        """Return the cell with this number.

        If there are several, cells that have not ended take precedence, then the last cell.

        Raises
        ------
        BadInput
            If there is no such cell.
        """
        cell = self.history.find(number)
        if cell is None:
            numbers = [str(known.number) for known in self.history][-5:]
            known = f"the last are {', '.join(numbers)}" if numbers else "there were none"
            raise BadInput(f"{number}: no cell with this number has run on ranks; {known}")
        return cell

    def debug(self, rank: int | None = None, number: int | None = None) -> None:
        """Open the debugger in a background cell that waits in it, or at the error of the last cell.

        Returns when no rank waits at a prompt any more. The error can be debugged if its frames were kept, as with
        `Options.keep_frames`.

        Parameters
        ----------
        rank
            Rank whose error to debug. Default: the first rank that has failed by itself.
        number
            Number of the background cell. Default: the one that waits for an answer.

        Raises
        ------
        BadInput
            If there is no such rank or cell, if no rank waits, or if the last cell has not failed there, or its frames
            were not kept.
        CellInterrupted
            If the user pressed the stop button at the prompt of an error.
        """
        running = self._parts.cells.find_asking(number)
        if running is not None:
            self._converse(running, rank)
            return
        cell = next((cell for cell in reversed(self.cells) if cell.code.strip() != DEBUG), None)
        failed = [] if cell is None else [rank for rank, error in cell.errors.items() if not error.waited]
        if cell is None or not failed:
            raise BadInput(f"{DIPDEBUG}: the last cell has not failed, and no background cell waits in a debugger")
        where = failed[0] if rank is None else rank
        if where not in failed:
            raise BadInput(f"{DIPDEBUG} -r {rank}: rank {rank} has not failed; type {DIPDEBUG} -r {failed[0]}")
        if not self.ranks.call_on_control_channel([where], on_rank.has_kept_error())[where]:
            raise BadInput(f"{DIPDEBUG}: the frames of {cell.text} were freed on rank {where}; {KEEP_FRAMES}")
        self.run(DEBUG, [where], show_ranks=[where])

    def _converse(self, running: RunningCell, rank: int | None) -> None:
        """Open the prompts of a background cell, beginning with that of `rank`; None: any."""
        cell, asking = running.cell, list(running.questions.by_rank)
        if rank is not None and rank not in asking:
            ways = " or ".join(f"{DIPDEBUG} -r {each}" for each in asking)
            raise BadInput(f"{DIPDEBUG} -r {rank}: rank {rank} does not wait in {cell.text}; type {ways}")
        running.converse(rank)
        if running.ending == "stopped":
            concurrent.futures.wait([cell.done], timeout=END_SECONDS)
            if cell.done.done():
                cell.noted = True
                inform(f"{cell.text} {cell.outcome_text}")

    def serve_ide(self, ranks: Sequence[int] | None = None) -> IdeAccess:
        """Open a port on each rank to which an IDE can attach, with the Debug Adapter Protocol.

        Returns the ports and the token. The service slows Python code down until `end_ide`. If it runs already, the
        ports stay the same.

        Parameters
        ----------
        ranks
            Ranks to debug. Default: all.

        Returns
        -------
        IdeAccess
            ``str`` of it describes how to attach, with the contents of ``launch.json``.

        Raises
        ------
        BadInput
            For a rank outside the group.
        GroupError
            If debugpy is not installed on a rank, or a rank is lost or busy.
        """
        where = self._checked(ranks)
        with self.lifecycle.turn:
            self.lifecycle.ensure_ready(where, needs_group=False)
            return ide_access.serve_ide(self.ranks, where, self._ide_token)

    def end_ide(self) -> None:
        """End the service for IDEs on all ranks: they detach, and ranks that have stopped in one continue."""
        ide_access.end_ide(self.ranks, range(self.world_size))

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Raise KeyboardInterrupt in the cells that run on `ranks` (default: all).

        Idle ranks are not affected.

        Raises
        ------
        BadInput
            For a rank outside the group.
        """
        self.ranks.interrupt_what_runs(self._checked(ranks))

    def stacks(self) -> dict[int, Stack | None]:
        """Return the position and all thread stacks of each rank, even during a cell.

        Returns
        -------
        dict[int, Stack | None]
            Stacks by rank; None for a rank that does not reply.
        """
        with stopping.note_presses(ASKING) as button:
            ranks, ended = range(self.world_size), self.ranks.ended
            answers = self.ranks.call_on_control_channel(
                ranks, on_rank.whole_stack(), seconds=STACK_SECONDS, button=button
            )
            silent = [rank for rank, answer in answers.items() if answer is None and rank not in ended]
            outside = {} if button.pressed else self.ranks.stack_locations_from_outside(silent)
            stacks: dict[int, Stack | None] = {}
            for rank, answer in answers.items():
                if answer is not None:
                    stacks[rank] = tables.stack_of(answer)
                elif not button.pressed:
                    place = StackLocation(state="ended") if rank in ended else outside.get(rank)
                    stacks[rank] = None if place is None else Stack(place, {"main": str(place)})
            return stacks

    def set_collect(self, collect: bool) -> None:
        """Set whether each rank collects garbage after a cell."""
        self.options.collect = collect
        self.ranks.call_on_control_channel(self.ranks.live, on_rank.set_collect(collect), seconds=status.ANSWER_SECONDS)

    def command(self, text: str) -> str | None:
        """Pass the command `text` to the app on every rank, and return the reply of rank 0.

        Raises
        ------
        BadInput
            If the group has no app.
        GroupError
            If a rank is lost or busy, or the app raises an error.
        """
        app = self._parts.app
        if app.name is None:
            raise BadInput(f"%%dip -a {text}: this group has no app; start it with %makedip -a NAME")
        with self.lifecycle.turn:
            self.lifecycle.ensure_ready()
            self.history.changes.append(Change(f"%%dip -a {text} sent a command to the app"))
            return app.ask(range(self.world_size), on_rank.run_app_command(apps.find_module(app.name), text))[0]

    # -- shared by cells

    def _display(self, tell: bool) -> DisplayOptions:
        return replace(self.options.display, report_after=0.0) if tell else self.options.display

    def _checked(self, ranks: Sequence[int] | None) -> Sequence[int]:
        """Return `ranks` (None: all). Raises BadInput for a rank outside the group, and if there are none."""
        if ranks is None:
            return range(self.world_size)
        checked = placement.check_ranks(ranks, self.world_size, "ranks")
        if not checked:
            raise BadInput("ranks=[]: pass at least one rank; without ranks=, all ranks run the cell")
        return checked

    def _admit(
        self,
        code: str,
        where: Sequence[int],
        show: CellOutput,
        timeout: float | None,
        until_it_ends: contextlib.ExitStack,
    ) -> RunningCell:
        cell = Cell(self._parts.cells.number(), tuple(where), code, show, is_outcome_known=True)
        limits = Limits(self.options.failure_grace, self.options.stall_timeout, timeout, self.ranks.can_unblock)
        return self._parts.cells.admit(cell, limits, until_it_ends)

    def _asked_of_ranks(self, code: str, log: str = "", break_on: Sequence[int] | None = None) -> CellOptions:
        """Return options of the cell `code` for its ranks, from the arguments of `run`.

        Raises BadInput if the `log` files cannot be written, for a rank in `break_on` outside the group, and for a
        ``%diprun`` whose script ranks cannot run.
        """
        asked: CellOptions = {"log": str(logs.resolve_prefix(log))} if log else {}
        if break_on is not None:
            asked["break_on"] = list(placement.check_ranks(break_on, self.world_size, "break_on"))
        if self.options.keep_frames:
            asked["keep_frames"] = True
        if code.lstrip().startswith(DEBUG):
            asked["debugs"] = True
        if (script := find_script(code)) is not None:
            asked["script"] = script
        return asked

    @contextlib.contextmanager
    def _profiled(self, folder: str, ranks: Sequence[int]) -> Iterator[CellOptions]:
        """Profile the cell on `ranks` that runs in this context; yield its options, and set `last_profile`.

        `folder` as typed; BadInput is raised if nothing can be written there.
        """
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
        """Make `call` on the main thread of rank 0; return None if it fails or takes longer than `seconds`.

        It also returns None if rank 0 is busy or has ended. A call that takes longer continues until the group needs
        the rank, and is interrupted then.
        """
        if 0 in self._parts.cells.stuck or 0 in self.ranks.ended or self._parts.cells.active_on([0]):
            return None
        return self.ranks.try_call(0, call, seconds)

    def has_name(self, name: str) -> bool:
        """Return whether rank 0 has a variable `name`: False if it does not answer within two seconds."""
        return name in self.variable_names(name)

    def variable_names(self, beginning: str, rank: int = 0, seconds: float = NAME_SECONDS) -> list[str]:
        """Return the names of a rank's variables that begin with `beginning`, even while the rank runs a cell.

        Returns no names if the rank does not answer within `seconds`.
        """
        call = on_rank.variable_names(beginning)
        return self.ranks.call_on_control_channel([rank], call, seconds=seconds)[rank] or []

    # -- objects

    def push(
        self, values: Mapping[str, Any], ranks: Sequence[int] | None = None, progress: Report = ignore_progress
    ) -> list[str]:
        """Copy objects into the namespaces of ranks: either all of them, or none.

        Parameters
        ----------
        values
            Objects by the names of the variables to assign.
        ranks
            Receiving ranks. Default: all.

        Returns
        -------
        list[str]
            Names of objects whose tensors arrived on the CPU instead of a GPU.

        Raises
        ------
        TransferError
            If an object cannot be transferred; nothing has changed on any rank then.
        BadInput
            For a rank outside the group, and for ``rank``, ``world_size`` and ``device``, which ddip defines on each
            rank.
        GroupError
            If a rank is lost or busy.
        RequestInterrupted
            If the user stopped the transfer.
        """
        to = self._checked(ranks)
        transfer.check_own(values, "push")
        with self.lifecycle.ready_for_push(to, progress):
            self.transferred, pickled = transfer.push_values(self.ranks, values, to, progress)
            self.history.note_push(self._parts.cells.number(), pickled, to)
        return [*self.transferred.moved]

    def pull(self, names: Sequence[str], rank: int = 0, progress: Report = ignore_progress) -> dict[str, Any]:
        """Return copies of objects of one rank, with tensors on the CPU.

        Parameters
        ----------
        names
            Variables of the rank.

        Returns
        -------
        dict[str, object]
            Copies by name.

        Raises
        ------
        TransferError
            If a variable is missing or cannot be transferred.
        BadInput, GroupError, RequestInterrupted
            As for `push`.
        """
        (rank,) = placement.check_ranks([rank], self.world_size, "rank")
        return self.pull_all(names, [rank], progress)[0][0]

    def pull_all(
        self, names: Sequence[str], ranks: Sequence[int], progress: Report = ignore_progress
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return copies of objects of several ranks, with tensors on the CPU.

        Returns
        -------
        values : list[dict[str, object]]
            Copies by name, one dict for each of `ranks`, in their order.
        moved : list[str]
            Names of objects whose tensors were moved from a GPU to the CPU; of several that share tensors, the first.

        Raises
        ------
        TransferError, BadInput, GroupError, RequestInterrupted
            As for `pull`.
        """
        of = self._checked(ranks)
        with self.lifecycle.ready_for_pull(names, of, progress):
            values, self.transferred = transfer.pull_values(self.ranks, names, of, progress)
        return values, [*self.transferred.moved]

    def peek(self, names: Sequence[str], rank: int = 0, seconds: float = SECONDS) -> dict[str, Any]:
        """Return copies of the current objects of one rank, even during a cell, with tensors on the CPU.

        The cell pauses between two steps while tensors are copied. If it is inside a long operation, such as a
        collective, ddip prints which one, because that may have written only a part of a tensor.

        Parameters
        ----------
        names
            Variables of the rank. Local variables of functions cannot be copied.
        seconds
            Longest time to wait for each answer of the rank; a large object arrives in several.

        Returns
        -------
        dict[str, object]
            Copies by name.

        Raises
        ------
        TransferError
            If the rank does not answer within `seconds`, or a variable is missing or cannot be transferred.
        BadInput
            For a rank outside the group.
        GroupError
            If the rank has ended.
        RequestInterrupted
            If the user stopped the transfer.
        """
        (rank,) = placement.check_ranks([rank], self.world_size, "rank")
        return self.peek_all(names, [rank], seconds)[0][0]

    def peek_all(
        self, names: Sequence[str], ranks: Sequence[int], seconds: float = SECONDS, progress: Report = ignore_progress
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return copies of the current objects of several ranks, even during a cell, with tensors on the CPU.

        The ranks are not synchronized: each copies its objects at a different moment.

        Returns
        -------
        values : list[dict[str, object]]
            Copies by name, one dict for each of `ranks`, in their order.
        moved : list[str]
            Names of objects whose tensors were moved from a GPU to the CPU; of several that share tensors, the first.

        Raises
        ------
        TransferError, BadInput, GroupError, RequestInterrupted
            As for `peek`.
        """
        values, self.transferred = peek.fetch_snapshots(self.ranks, names, self._checked(ranks), seconds, progress)
        return values, [*self.transferred.moved]

    # -- the state of a training

    def check(self, names: Sequence[str] = ()) -> CheckTable:
        """Compare variables across ranks, and find common mistakes in distributed training.

        Parameters
        ----------
        names
            Variables of the ranks. Default: all.

        Raises
        ------
        BadInput
            If no rank has one of the variables.
        GroupError
            If a rank is lost or busy.
        """
        with self.lifecycle.turn:
            self.lifecycle.ensure_ready_for_cell()
            return self._parts.differences.check(names)

    def sync(self, names: Sequence[str] = (), source: int = 0) -> list[str]:
        """Copy the state of one rank into the objects of the other ranks, in place, and clear gradients.

        Parameters
        ----------
        names
            Variables of the ranks. Default: all that a fault left different, and all that differ now but did not
            after the last successful cell. Objects that differ by design are not changed.
        source
            Rank whose state is copied.

        Returns
        -------
        list[str]
            Paths of the copied objects.

        Raises
        ------
        BadInput
            For sharded objects, and for a rank outside the group; nothing has changed then.
        GroupError
            If a rank is lost or busy; nothing has changed then.
        """
        (rank,) = placement.check_ranks([source], self.world_size, "source")
        with self.lifecycle.turn:
            self.lifecycle.ensure_ready_for_cell(needs_group=True)
            copied, refused = self._parts.differences.sync(names, rank)
            if not names:
                self._parts.differences.report_missing(self.new_ranks, rank)
        if copied:
            self.history.changes.append(Change(f"%dipsync copied state of rank {rank}"))
        for path, why in refused.items():
            notify(f"{path} was not copied: {why}")
        return copied

    def save(self, folder: str, names: Sequence[str] = (), *, background: bool = False) -> SaveReport:
        """Save variables of all ranks, with the complete training state, to a folder.

        Parameters
        ----------
        folder
            Folder to create, or of an earlier save, which is replaced when the new one is complete.
        names
            Variables of the ranks. Default: all.
        background
            True to copy the tensors to the CPU, and to return while threads of the ranks write them.

        Returns
        -------
        SaveReport
            Size, the saved variables, and the reasons for those that could not be saved.

        Raises
        ------
        TransferError
            If nothing was saved, such as on a full disk; an earlier save stays.
        GroupError
            If a rank is lost or busy.
        RequestInterrupted
            If the user pressed the stop button; an earlier save stays.
        """
        return self.saves.save(folder, names, background)

    def load(self, folder: str, names: Sequence[str] = (), *, anyway: bool = False) -> LoadReport:
        """Load saved variables into all ranks. Loading runs code that the files contain.

        Modules, optimizers, schedulers and scalers that exist with the same structure are filled in place. Other
        variables are replaced.

        Parameters
        ----------
        folder
            Folder of `save`.
        names
            Variables to load. Default: all. Random number generators are only loaded with all.
        anyway
            True to load what another release of Python or torch has saved, and to leave out variables that cannot be
            unpickled.

        Returns
        -------
        LoadReport
            The loaded variables, and the reasons for those that were not loaded.

        Raises
        ------
        TransferError
            If nothing was loaded: there is no save, a variable is missing or cannot be unpickled, or files belong to
            another user. Nothing has changed then.
        GroupError
            If a rank is lost or busy.
        RequestInterrupted
            If the user pressed the stop button.
        """
        report = self.saves.load(folder, names, anyway)
        self.history.changes.append(Change(f"%dipload loaded {folder}"))
        return report

    def save_every(self, seconds: float | None, folder: str = "", names: Sequence[str] = ()) -> None:
        """Save the variables regularly at the points that later cells mark with ``ddip.save_point``.

        `save_if_due` does so between cells.

        Parameters
        ----------
        seconds
            Least time between two saves. None: no more saves.
        folder, names
            As for `save`.
        """
        self.saves.save_every(seconds, folder, names)

    def save_if_due(self) -> SaveReport | None:
        """Save in the background between two cells if `save_every` asks for it, and no cell runs.

        Returns
        -------
        SaveReport | None
            Result of the save; None if none was due.

        Raises
        ------
        TransferError, GroupError, RequestInterrupted
            As for `save`.
        """
        return self.saves.save_if_due()

    def save_before_end(self, seconds: float) -> bool:
        """Save at the next point of the running cell, as `save_every` asks for; at once if none runs.

        For schedulers that announce the end of a job. May be called in any thread.

        Parameters
        ----------
        seconds
            Longest wait for a point.

        Returns
        -------
        bool
            True if the save is complete.
        """
        return self.saves.save_before_end(seconds)

    def report_faults(self) -> None:
        """Rebuild the process group after a fault, and print which variables differ, if all ranks are free.

        Otherwise the next cell does so. Never raises.
        """
        with contextlib.suppress(GroupError, RequestInterrupted), self.lifecycle.turn:
            if self.alive and self._parts.differences.pending and not (self.ranks.ended or self._parts.cells.stuck):
                self.lifecycle.ensure_ready_for_cell()

    # -- the notebook's modules

    def push_modules(
        self, names: str | Sequence[str], *, reload: bool = False, progress: Report = ignore_progress
    ) -> ModulesPushed:
        """Send the user's own modules to other hosts, so that ranks there can import them.

        Parameters
        ----------
        names
            Names of modules or packages, as ``"utils, models"`` or a list. Their source files are sent once per host,
            and again after a change. Ranks find them before any other module of the same name.
        reload
            True to reload modules that a rank has already imported, as IPython's autoreload does. Otherwise the rank
            continues to use the imported version.

        Returns
        -------
        ModulesPushed
            Names of the modules and hosts, and ranks that have not reloaded a module.

        Raises
        ------
        BadInput
            If a module does not exist, is installed or compiled, or is too large.
        TransferError, GroupError, RequestInterrupted
            As for `push`.
        """
        sources = modules.find_sources(names)
        with self.lifecycle.turn, self.lifecycle.progress.reported_to(progress):
            self.lifecycle.ensure_ready(needs_group=False)
            pushed = self._modules.push(self.ranks, sources, reload, progress)
            self.history.changes.append(Change("%dipush --modules sent modules to other hosts"))
            return pushed

    # -- status

    @property
    def notices(self) -> list[str]:
        """The remarks to the user on how the ranks are placed on devices and hosts."""
        return self.lifecycle.place.notices(self.spec, self.cluster.hosts)

    def remarks(self) -> list[str]:
        """Return lines to show below the table of ranks.

        They describe the network between hosts, suspended processes, and the time left of the Slurm job.
        """
        hosts, networks = self.cluster.hosts, self._parts.manager.networks()
        ways = [f"{hosts[number].name or 'this machine'} {its}" for number, its in networks.items()]
        between = f"between the hosts: {', '.join(ways)}" if ways else ""
        return [*filter(None, (between, self.cluster.stopped(), self.lifecycle.place.text()))]

    def shards(self, name: str) -> ShardsTable:
        """Return a table of how a model is divided among the ranks.

        Parameters
        ----------
        name
            Variable of the ranks, or a part of it, such as ``model.encoder``.

        Raises
        ------
        BadInput
            If a rank has no such model.
        GroupError
            If a rank is lost or busy.
        RequestInterrupted
            If the user pressed the stop button.
        """
        with self.lifecycle.turn:
            self.lifecycle.ensure_free()
            return shards.fetch_layout(self.ranks, name)

    def info(self) -> list[tables.RankInfo]:
        """Return process, device, memory and activity of each rank, in rank order, even during a cell.

        Raises
        ------
        RequestInterrupted
            If the stop button was pressed.
        """
        with stopping.note_presses(ASKING) as button:
            return status.rank_infos(self.ranks, self.spec, button)

    def status(self, cells: int = status.LISTED) -> Status:
        """Return the state of ranks, devices and cells as data that JSON can represent, even during a cell.

        It does not wait for running cells. If the group has ended, the result still has its cells.

        Parameters
        ----------
        cells
            Number of cells to list, in addition to earlier cells that have not ended.
        """
        kept = status.last_cells(self.cells, cells)
        with contextlib.suppress(GroupError):  # it has ended, or another thread ends it just now
            parts = self._parts
            infos = self.info()
            group = status.describe_group(self.spec, parts.app.name, parts.manager.healthy, infos)
            return status.group_status(kept, group, infos, parts.cells.stuck)
        return status.group_status(kept)

    def vitals(self, seconds: float = PERIOD) -> list[RankVitals]:
        """Return state, cell, position, rates, CPU time, memory and GPU of each rank, even during a cell.

        If a rank is busy, ddip takes a second sample after `seconds`, because a rate needs two samples.

        Raises
        ------
        RequestInterrupted
            If the stop button was pressed.
        """
        return vitals.sample_ranks(self.lifecycle, seconds)
