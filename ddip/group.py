"""Group: all ranks as one object.

    Group.run("loss = step()")                        main thread of the notebook
        execute_request  -> engine of each rank       (ipyparallel: client, controller, engine)
        stream, display  <- each rank, live           client's IO thread -> one queue -> CellOutput on the main thread
        execute_reply    <- each rank                 the cell ends when every rank has answered and fallen silent
        errors           -> one CellError, by rank

Requests of ddip itself (join the group, take objects, tell figures) are calls of functions in ``ddip.rank``;
``ranks.py`` sends them. ``cells.py`` runs the cells, ``formation.py`` forms the process group and mends it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from ddip import apps, devices, owner, placement, tables, transfer
from ddip.cells import Cells, Limits
from ddip.cluster import Cluster
from ddip.comms import Comms
from ddip.engines import Engines
from ddip.errors import BadInput, GroupError, TransferError, ranks_text
from ddip.formation import Formation
from ddip.look import Look
from ddip.outputs import CellOutput
from ddip.page import tell
from ddip.placement import Request, Wish
from ddip.progress import Report
from ddip.rank.place import Place, Stack
from ddip.ranks import Member, Ranks

log = logging.getLogger("ddip")
log.addHandler(logging.NullHandler())
ipp_log = log.getChild("ipyparallel")
ipp_log.setLevel(logging.ERROR)  # it warns of every engine that we end

SAME = Request()
"""Asks for nothing new."""
STACK_SECONDS = 1.0
"""How long ``stacks`` waits for a rank's answer."""
INFO_SECONDS = 2.0
"""How long ``info`` waits for a rank's figures."""


def _ignore(text: str, share: float | None = None) -> None:
    pass


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
    timeout
        Seconds to wait for the group to form.
    collect
        Collect garbage on every rank after each cell, once its answer has been sent.
    spawn
        Start each engine as a process of its own. Otherwise, on Linux, they are forked from one process that has
        imported torch: quicker, and in less memory.
    grace
        Seconds that the other ranks get to end a cell by themselves when one has failed; then those that wait in a
        collective are released.
    patience
        Seconds without progress after which a cell says which rank waits where.
    look
        How cells are shown.
    progress
        Told what is under way while the group forms, or objects travel.

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
        timeout: float = 60,
        collect: bool = True,
        spawn: bool = False,
        grace: float = 1.0,
        patience: float = 10.0,
        look: Look | None = None,
        progress: Report = _ignore,
    ) -> None:
        self.timeout = timeout
        self.collect = collect
        self.spawn = spawn
        self.grace = grace
        self.patience = patience
        self.look = look or Look()
        self.progress: Report = progress
        self.seconds = 0.0
        self._ranks: Ranks | None = None
        self._pid = os.getpid()
        self._app: str | None = None
        self._unprepared: set[int] = set()
        """Ranks on which the app has still to be prepared."""
        if gpus == "all":
            gpus = placement.parse_gpus(["all"], len(devices.gpu_names()))
        self.request = Request(n, None if gpus is None else tuple(gpus), backend, app)
        self.wish = self._wish(self.request)
        self._start(self.wish)

    # -- life cycle

    def _wish(self, request: Request) -> Wish:
        """The group that `request` describes; raises BadInput before anything is touched."""
        apps.find(request.app)
        return placement.wish(request, len(devices.gpu_names()))

    def _start(self, wish: Wish) -> None:
        atexit.register(self.shutdown)
        try:
            owner.clear_up_orphans()
            self._ranks = Ranks(Cluster(ipp_log, fork=not self.spawn))
            self._engines = Engines(self._ranks, lambda text, share=None: self.progress(text, share))
            self._formation = Formation(self._ranks)
            self._cells = Cells(self._ranks, self._formation)
            self._comms = Comms(self._ranks)
            self._form(wish, self.request)
        except BaseException:
            self.shutdown()
            raise

    def change(self, request: Request) -> bool:
        """Make it the group that `request` asks for; returns False if it is that already.

        The engines that can stay do, with their variables. Raises as ``Group`` does; if the new ranks do not come, the
        group stays as it was.
        """
        self.require()
        request = request.after(self.request)
        wish = self._wish(request)
        if wish == self.wish and request.app == self._app:
            return False
        self._form(wish, request)
        return True

    def restart(self, request: Request = SAME) -> None:
        """End every engine and start afresh, without any variables: the same group, or the one that is asked for."""
        request = request.after(self.request)
        wish = self._wish(request)
        if self.alive:
            self._engines.check_torch(wish)
        self.shutdown()
        self.request = request
        self._start(wish)

    def shutdown(self) -> None:
        """End all processes and remove all files; the group is empty then. May be called twice."""
        if os.getpid() != self._pid:
            return  # a fork of the owner: the group is not its to end
        atexit.unregister(self.shutdown)
        ranks, self._ranks = self._ranks, None
        self._app = None
        self._unprepared = set()
        if ranks is not None:
            with _undisturbed():
                ranks.cluster.stop()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

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
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def cluster(self) -> Cluster:
        """The ipyparallel cluster below; its ``client`` is an ``ipyparallel.Client``."""
        return self.ranks.cluster

    def require(self) -> None:
        """Have every rank there, free, and in a good group; raises GroupError if that cannot be."""
        self.cluster.require_controller()
        self.ranks.require_all()
        self._cells.require_idle()
        if not self._formation.sound:
            self._form_again()
        if self._unprepared:
            self._prepare(self._app, sorted(self._unprepared))

    # -- forming

    def _form(self, wish: Wish, request: Request) -> None:
        """Bring the ranks into the group of `wish`; until the old group is left, a failure changes nothing."""
        began = time.monotonic()
        deadline = began + self.timeout
        try:
            members = self._engines.complete(wish, request.app, deadline)
            self.progress(f"ddip: forming a group of {wish.size} ranks", 0.9)
            if self.members:
                self._leave(members, deadline)
            self.request, self.wish, self.ranks.members = request, wish, members
            self._unprepared &= set(range(wish.size))
            self._formation.join(wish, self.collect, deadline)
            self._prepare(request.app, range(wish.size))
        except BaseException:
            if self.members:  # else everything goes
                with _undisturbed():
                    self.cluster.stop_engines_but([member.engine for member in self.members])
            raise
        self.seconds = time.monotonic() - began

    def _prepare(self, app: str | None, ranks: Sequence[int]) -> None:
        if app is not None:
            self.progress(f"ddip: preparing {app}", 0.95)
            self.ranks.ask(ranks, "apps.prepare", apps.find(app))
        self._app = app
        self._unprepared -= set(ranks)

    def _form_again(self) -> None:
        """The same ranks in a new group: the former was released, or left by a cell."""
        deadline = time.monotonic() + self.timeout
        try:
            going = self._formation.leave(deadline)
            self._formation.join(self.wish, self.collect, deadline)
        except GroupError as error:
            hint = "" if "--repair" in str(error) else "; %makedip -r starts it afresh"
            raise GroupError(f"the group could not be formed again: {error}{hint}") from None
        _tell_going(going)

    def repair(self, names: Sequence[str] = (), source: int | None = None) -> list[int]:
        """Put new processes in place of the ranks that ended, or that still run a cell that was given up.

        The others keep their variables. `names` are copied from the rank `source` to the new ones. Returns the ranks
        that were replaced. Raises GroupError or TransferError; if a name cannot be pickled, or the new processes do not
        come, nothing has changed.
        """
        self.cluster.require_controller()
        began = time.monotonic()
        deadline = began + self.timeout
        gone = sorted({*self.ranks.ended, *self._cells.stuck})
        packed: dict[str, bytes | bytearray] = {}
        if names:
            packed = self._pack_for_repair(names, 0 if source is None else source, gone)
        if not gone:
            self.require()
            return []
        try:
            self.progress(f"ddip: starting {ranks_text(gone)}", 0.0)
            members = self._engines.replace(gone, self.wish, self._app, deadline)
        except BaseException:
            with _undisturbed():
                self.cluster.stop_engines_but([member.engine for member in self.members])
            raise
        with _undisturbed():
            self._formation.release()
            self.cluster.stop_engines_but([member.engine for member in members])
            self.ranks.members = members
            self._cells.forget(gone)
            self._unprepared.update(gone)
        self._form_again()
        self._prepare(self._app, gone)
        if packed:
            self._unpack(packed, gone)
        self.seconds = time.monotonic() - began
        return gone

    def _unpack(self, packed: Mapping[str, bytes | bytearray], ranks: Sequence[int]) -> None:
        try:
            transfer.deliver(self.ranks, packed, ranks, self.progress)
        except TransferError as error:
            raise TransferError(f"{ranks_text(ranks)} replaced, but {error}") from None

    def _pack_for_repair(self, names: Sequence[str], source: int, gone: Sequence[int]) -> dict[str, bytes | bytearray]:
        what = f"--from {source} {' '.join(names)}"
        if not gone:
            raise BadInput(f"{what}: every rank is there, so nothing was copied; %dipull and %dipush copy variables")
        if source in gone:
            here = [rank for rank in range(self.world_size) if rank not in gone]
            raise BadInput(f"{what}: {ranks_text([source])} is gone itself; copy from one of {ranks_text(here)}")
        (reply,) = transfer.fetch(self.ranks, names, [source], self.progress)
        return transfer.forward(source, reply, "repaired")

    def _leave(self, staying: Sequence[Member], deadline: float) -> None:
        """All ranks leave the old group; those that are not `staying` end."""
        if self._app is not None:
            self.ranks.ask(range(self.world_size), "apps.release", apps.find(self._app))
            self._unprepared = set(range(self.world_size))
        _tell_going(self._formation.leave(deadline))
        self.cluster.stop_engines_but([member.engine for member in staying])

    def describe(self) -> str:
        """Ranks, devices and backend in one line."""
        count = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        gpus = [str(gpu) for gpu in self.wish.gpus]
        where = "GPU " + ", ".join(gpus) if self.wish.on_gpus else "the CPU"
        return f"ddip: {count} on {where}, {self.wish.backend}"

    # -- cells

    def run(
        self,
        code: str,
        ranks: Sequence[int] | None = None,
        *,
        see: Sequence[int] = (0,),
        quiet: bool = False,
        timeout: float | None = None,
        tell: bool = False,
    ) -> None:
        """Run `code` as a cell on `ranks` (default: all), and show what the ranks in `see` write and display.

        With `tell` it is said at the end where it ran and how long it took, however short that was.

        Returns when every rank has finished. Raises CellError if it failed on any rank, seen or not; CellTimeout if it
        took longer than `timeout` seconds; CellInterrupted if the user interrupted it. Whatever waited in a collective
        was released then, the variables are there, and the group is formed again before it is used.
        """
        self.require()
        limits = Limits(self.grace, self.patience, timeout)
        look = replace(self.look, tell_after=0.0) if tell else self.look
        show = CellOutput(see, look, quiet=quiet, comms=self._comms)
        self._cells.run(code, self._all_or(ranks), show, limits)

    def _all_or(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.world_size) if ranks is None else ranks

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Send SIGINT to `ranks` (default: all): a cell in Python code ends there with KeyboardInterrupt."""
        self.ranks.signal(self._all_or(ranks))

    def stacks(self) -> dict[int, Stack | None]:
        """Where each rank is, and the stacks of all its threads; None: it does not answer. Works while a cell runs."""
        ended = self.ranks.ended
        answers = self.ranks.ask_beside(range(self.world_size), "stacks.whole", seconds=STACK_SECONDS)
        stacks: dict[int, Stack | None] = {}
        for rank, answer in answers.items():
            if answer is not None:
                stacks[rank] = tables.stack_of(answer)
            else:
                place = Place(state="ended") if rank in ended else self.ranks.place_from_outside(rank)
                stacks[rank] = None if place is None else Stack(place, {"main": str(place)})
        return stacks

    def set_collect(self, collect: bool) -> None:
        """Turn the collection of garbage after each cell on or off."""
        self.collect = collect
        self.ranks.ask_beside(self.ranks.live, "housekeeping.set_collect", collect, seconds=INFO_SECONDS)

    def command(self, text: str) -> str | None:
        """Give `text` to the app on every rank; returns what it answers on rank 0."""
        if self._app is None:
            raise BadInput(f"%%dip -a {text}: this group has no app; start it with %makedip -a NAME")
        self.require()
        answers: list[str | None] = self.ranks.ask(range(self.world_size), "apps.command", apps.find(self._app), text)
        return answers[0]

    # -- names

    def ask_soon(self, target: str, *args: Any, seconds: float) -> Any:
        """What rank 0 answers on its main thread; None if it is busy, or takes longer than `seconds`."""
        if 0 in self._cells.stuck:
            return None
        return self.ranks.ask_soon(0, target, *args, seconds=seconds)

    def has_name(self, name: str) -> bool:
        """Is `name` a variable of rank 0?"""
        return bool(self.ranks.ask_beside([0], "names.has", name)[0])

    # -- objects

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None = None) -> list[str]:
        """Put `values` into the namespaces of `ranks` (default: all); returns the names whose tensors moved to the CPU.

        Raises TransferError, and changes nothing on any rank, if one of them cannot be carried.
        """
        self.require()
        return transfer.push(self.ranks, values, self._all_or(ranks), self.progress)

    def pull(self, names: Sequence[str], rank: int = 0) -> dict[str, Any]:
        """The objects `names` of `rank`, with tensors on the CPU; raises TransferError if one of them cannot be had."""
        return self.pull_all(names, [rank])[0][0]

    def pull_all(self, names: Sequence[str], ranks: Sequence[int]) -> tuple[list[dict[str, Any]], list[str]]:
        """The objects `names` of each of `ranks`, in order, and the names whose tensors moved to the CPU."""
        self.require()
        return transfer.pull(self.ranks, names, ranks, self.progress)

    # -- figures

    def info(self) -> list[tables.RankInfo]:
        """Each rank: where it lives, its memory, and what it is doing; also while a cell runs."""
        ended = self.ranks.ended
        answers = self.ranks.ask_beside(range(self.world_size), "housekeeping.figures", seconds=INFO_SECONDS)
        infos = []
        for rank, member in enumerate(self.members):
            figures = answers[rank] or {}
            state = "ended" if rank in ended else "no answer"
            if figures:
                state = "busy" if figures["busy"] else "idle"
            gpu = figures.get("gpu") or {}
            infos.append(
                tables.RankInfo(
                    rank=rank,
                    host=member.host,
                    pid=member.pid,
                    device=self.wish.device_name(rank),
                    memory=figures.get("memory"),
                    gpu_allocated=gpu.get("allocated"),
                    gpu_reserved=gpu.get("reserved"),
                    gpu_total=gpu.get("total"),
                    state=state,
                    seconds=figures.get("seconds"),
                )
            )
        return infos


def _tell_going(going: int) -> None:
    """Say what the ranks have lost with their former group."""
    if going:
        tell("the group was formed again; DDP(...) wrappers and subgroups that were made before must be made again")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Finish what must not be left half done, and be interrupted then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        raise KeyboardInterrupt
