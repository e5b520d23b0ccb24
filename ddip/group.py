"""Group: all ranks as one object.

    Group.run("loss = step()")                        main thread of the notebook
        execute_request  -> engine of each rank       (ipyparallel: client, controller, engine)
        stream, display  <- each rank, live           client's IO thread -> one queue -> CellOutput on the main thread
        execute_reply    <- each rank                 the cell ends when every rank has answered and fallen silent
        errors           -> one CellError, by rank

Requests of ddip itself (join the group, take objects, tell figures) are calls of functions in ``ddip.rank``.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import logging
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeAlias

from ipyparallel.error import EngineError, RemoteError

from ddip import apps, devices, ipp_private, outputs, owner, placement, transfer
from ddip.cluster import Cluster
from ddip.errors import BadInput, CellError, CellInterrupted, RankError, StartError, TransferError, ranks_text
from ddip.placement import Berth, Request, Wish
from ddip.rank import call
from ddip.rank.seat import Seat

log = logging.getLogger("ddip")
log.addHandler(logging.NullHandler())
ipp_log = log.getChild("ipyparallel")
ipp_log.setLevel(logging.ERROR)  # it warns of every engine that we end

SAME = Request()
"""Asks for nothing new."""
PATIENCE_SECONDS = 2.0
"""How long an interrupted cell may take to end before the user is told what else can be done."""
GRACE_SECONDS = 1.0
"""How long the others may take to answer when one rank has failed."""
INFO_SECONDS = 2.0
"""How long ``info`` waits for a rank's figures."""

Events: TypeAlias = "queue.SimpleQueue[tuple[int, outputs.Message | None]]"
"""What arrives from the ranks while a cell runs: a rank's message, or None for one of its two ends."""


@dataclass(frozen=True)
class Member:
    """One rank: the engine it lives in, and what that engine was started for."""

    engine: int
    pid: int
    host: str
    berth: Berth


def _ignore(text: str) -> None:
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
    progress
        Told what is under way while the group forms.

    Raises
    ------
    BadInput
        for a group that cannot be on this machine.
    StartError
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
        progress: Callable[[str], None] = _ignore,
    ) -> None:
        self.timeout = timeout
        self.collect = collect
        self.progress = progress
        self.seconds = 0.0
        self.members: list[Member] = []
        self._lost: dict[int, int | None] = {}
        self._stores = 0
        self._broken = False
        self._cluster: Cluster | None = None
        self._app: str | None = None
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
            self._cluster = Cluster(ipp_log)
            self._cluster.on_exit = self._engine_ended
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
        self.shutdown()
        self.request = request
        self._start(wish)

    def shutdown(self) -> None:
        """End all processes and remove all files; the group is empty then. May be called twice."""
        atexit.unregister(self.shutdown)
        cluster, self._cluster = self._cluster, None
        self.members = []
        self._lost = {}
        self._broken = False
        if cluster is not None:
            cluster.stop()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def alive(self) -> bool:
        """False after ``shutdown``."""
        return self._cluster is not None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def cluster(self) -> Cluster:
        """The ipyparallel cluster below; its ``client`` is an ``ipyparallel.Client``."""
        if self._cluster is None:
            raise StartError("this group has ended; start one with %makedip, or ddip.Group()")
        return self._cluster

    # -- forming

    def _form(self, wish: Wish, request: Request) -> None:
        """Bring the ranks into the group of `wish`; until the old group is left, a failure changes nothing."""
        began = time.monotonic()
        deadline = began + self.timeout
        members = self._complete(wish, deadline)
        self.progress(f"ddip: forming a group of {wish.size} ranks")
        if self.members:
            self._leave(members)
        self.request, self.wish, self.members = request, wish, members
        self._broken = True
        self._join(deadline)
        if request.app is not None:
            self.progress(f"ddip: preparing {request.app}")
            self._ask(members, "apps.prepare", apps.find(request.app))
        self._app = request.app
        self._broken = False
        self.seconds = time.monotonic() - began

    def _complete(self, wish: Wish, deadline: float) -> list[Member]:
        """All members of the new group in rank order: engines that can stay, and new ones where there is none."""
        kept = placement.keep([member.berth for member in self.members], wish)
        new = [rank for rank, index in enumerate(kept) if index is None]
        engines = self._start_engines(wish, len(new), deadline)
        members = []
        for rank, index in enumerate(kept):
            if index is not None:
                members.append(self.members[index])
            else:
                engine, hello = engines.pop(0)
                members.append(Member(engine, hello["pid"], hello["host"], Berth(wish.visible, wish.gpus[rank])))
        return members

    def _start_engines(self, wish: Wish, count: int, deadline: float) -> list[tuple[int, dict[str, Any]]]:
        """Start `count` engines for the ranks of `wish`; returns their ids and what they tell of themselves."""
        cluster = self.cluster
        first = not cluster.connected
        started: list[int] = []
        try:
            if first:
                self.progress("ddip: starting the controller")
                cluster.start_controller()
            for _ in range(count):
                started.append(cluster.start_engine(self._engine_environment(wish), self.timeout))
            if first:
                cluster.connect(deadline)
            here = wish.size - count
            cluster.wait_for(
                started, deadline, lambda up: self.progress(f"ddip: {here + up} of {wish.size} engines are up")
            )
            hellos = [self._control(engine, "housekeeping.hello", deadline) for engine in started]
            witness = hellos[0] if hellos else self._control(self.members[0].engine, "housekeeping.hello", deadline)
            self._check_torch(wish, witness)
        except BaseException:
            if self.members:  # else everything goes
                cluster.stop_engines(started)
            raise
        return list(zip(started, hellos, strict=True))

    def _engine_environment(self, wish: Wish) -> dict[str, str]:
        """What must be set before torch loads: threads, and the GPUs that the rank sees."""
        environment = {}
        if "OMP_NUM_THREADS" not in os.environ:
            environment = {name: str(_threads(wish.size)) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if wish.on_gpus:
            names = devices.gpu_names()
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in wish.visible)
        return environment

    def _check_torch(self, wish: Wish, hello: Mapping[str, Any]) -> None:
        wanted = [part.rpartition(":")[2] for part in wish.backend.split(",")]
        for backend in wanted:
            if backend not in hello["backends"]:
                has = ", ".join(hello["backends"])
                raise BadInput(f"-b {wish.backend}: torch {hello['torch']} has no backend {backend!r}; it has {has}")
        if wish.on_gpus and not hello["cuda"]:
            raise BadInput(
                f"torch {hello['torch']} was built without CUDA; install a CUDA build, or type -n {wish.size}"
            )

    def _leave(self, staying: Sequence[Member]) -> None:
        """All ranks leave the old group; those that are not `staying` end."""
        if self._app is not None:
            self._ask(self.members, "apps.release", apps.find(self._app))
            self._app = None
        self._ask(self.members, "process_group.leave")
        going = [member for member in self.members if member not in staying]
        if going:
            self.cluster.stop_engines([member.engine for member in going])

    def _join(self, deadline: float) -> None:
        self._stores += 1
        store = self.cluster.run_folder / f"store-{self._stores}"
        port = _free_port()
        seats = [
            Seat(
                rank=rank,
                world_size=self.world_size,
                local_rank=rank,
                local_world_size=self.world_size,
                group_rank=0,
                master_addr="127.0.0.1",
                master_port=port,
                device=self.wish.device(rank),
                backend=self.wish.backend,
                store=str(store),
                interface=_loopback(),
                threads=None if "OMP_NUM_THREADS" in os.environ else _threads(self.world_size),
                directory=os.getcwd(),
                path=tuple(sys.path),
            )
            for rank in range(self.world_size)
        ]
        self._ask_each(
            [(member, "process_group.join", (seat,)) for member, seat in zip(self.members, seats, strict=True)],
            deadline,
        )
        for old in self.cluster.run_folder.glob("store-*"):
            if old != store:
                old.unlink(missing_ok=True)
        self._ask(self.members, "housekeeping.set_collect", self.collect)

    def describe(self) -> str:
        """Ranks, devices and backend in one line."""
        count = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        gpus = [str(gpu) for gpu in self.wish.gpus]
        where = "GPU " + ", ".join(gpus) if self.wish.on_gpus else "the CPU"
        return f"ddip: {count} on {where}, {self.wish.backend}"

    # -- asking ranks

    def _ask(self, members: Sequence[Member], target: str, *args: Any) -> list[Any]:
        """Call ``ddip.rank.<target>(*args)`` on the main thread of each of `members`; returns the results in order."""
        return self._ask_each([(member, target, args) for member in members])

    def _ask_each(
        self, requests: Sequence[tuple[Member, str, tuple[Any, ...]]], deadline: float | None = None
    ) -> list[Any]:
        client = self.cluster.client
        answers = {
            self.members.index(member): client.direct_view(member.engine).apply_async(call, target, *args)
            for member, target, args in requests
        }
        self._await(answers, deadline)
        what = requests[0][1]
        problems: dict[int, RankError] = {}
        for rank, answer in answers.items():
            reply = answer.get(return_exceptions=True) if answer.done() else {}
            if isinstance(reply, BaseException):
                problems[rank] = self._error(rank, reply) or RankError(type(reply).__name__, str(reply), "")
            elif "error" in reply:
                problems[rank] = RankError(reply["error"], reply["message"], reply["traceback"])
        if problems:
            log.debug("%s", "\n".join(problem.traceback for problem in problems.values()))
            raise StartError(f"{what} failed: {CellError(problems)}")
        late = [rank for rank, answer in answers.items() if not answer.done()]
        if late:
            raise StartError(f"{ranks_text(late)} did not finish {what} in time; -t SECONDS waits longer")
        return [answer.get()["ok"] for answer in answers.values()]

    def _await(self, answers: Mapping[int, Any], deadline: float | None) -> None:
        """Wait until all `answers` are there; not for those that wait in vain, since another rank failed or ended."""
        failed_at: float | None = None
        while not all(answer.done() for answer in answers.values()):
            now = time.monotonic()
            if (deadline is not None and now > deadline) or (failed_at is not None and now > failed_at + GRACE_SECONDS):
                return
            next(answer for answer in answers.values() if not answer.done()).wait(0.05)
            done = [answer.get(return_exceptions=True) for answer in answers.values() if answer.done()]
            if failed_at is None and any(isinstance(reply, BaseException) or "error" in reply for reply in done):
                failed_at = now

    def _control(self, engine: int, target: str, deadline: float) -> Any:
        """Call ``ddip.rank.<target>()`` on the control thread of `engine`, which answers while a cell runs."""
        future = ipp_private.control(self.cluster.client, engine, "ddip_request", {"target": target, "args": []})
        content = future.result(max(0.1, deadline - time.monotonic()))["content"]
        if "error" in content:
            raise StartError(f"{target} failed: {content['error']}: {content['message']}")
        return content["ok"]

    def _engine_ended(self, engine: int) -> None:
        for rank, member in enumerate(self.members):
            if member.engine == engine:
                self._lost[rank] = self.cluster.exits.get(engine)

    def require(self) -> None:
        """Raise StartError unless every rank is there."""
        _ = self.cluster
        if self._lost:
            raise StartError(f"{self._lost_text(sorted(self._lost))}; %makedip -r starts the group afresh")
        if self._broken:
            raise StartError("the group did not form when it was last changed; %makedip -r starts it afresh")

    def _lost_text(self, ranks: list[int]) -> str:
        codes = [self._lost.get(rank) for rank in ranks]
        text = ", ".join("unknown" if code is None else str(code) for code in codes)
        return f"{ranks_text(ranks)} ended (exit code {text})"

    # -- cells

    def run(
        self, code: str, ranks: Sequence[int] | None = None, *, see: Sequence[int] = (0,), quiet: bool = False
    ) -> None:
        """Run `code` as a cell on `ranks` (default: all), and show what the ranks in `see` write and display.

        Returns when every rank has finished. Raises CellError if it failed on any rank, seen or not; CellInterrupted if
        the user interrupted it.
        """
        self.require()
        ranks = range(self.world_size) if ranks is None else ranks
        events: Events = queue.SimpleQueue()
        show = outputs.CellOutput(see, quiet=quiet)
        replies = {rank: self._send_cell(rank, code, events) for rank in ranks}
        interrupted = self._follow(replies, events, show)
        show.finish()
        errors = {rank: self._error(rank, future.result()) for rank, future in replies.items()}
        failed = {rank: error for rank, error in errors.items() if error is not None}
        if interrupted:
            raise CellInterrupted(f"the cell was interrupted on {ranks_text(list(failed) or list(replies))}")
        if failed:
            raise CellError(failed)

    def _send_cell(self, rank: int, code: str, events: Events) -> concurrent.futures.Future[Any]:
        """Send a cell to `rank`: `events` gets its messages, and a None each for its answer and its last message."""

        def on_message(message: outputs.Message) -> None:
            events.put((rank, message))

        def on_end(_: concurrent.futures.Future[Any]) -> None:
            events.put((rank, None))

        future = ipp_private.execute(self.cluster.client, self.members[rank].engine, code, False, on_message)
        future.add_done_callback(on_end)
        future.output.add_done_callback(on_end)
        return future  # type: ignore[no-any-return]

    def _error(self, rank: int, reply: Any) -> RankError | None:
        """What `rank` raised, out of ipyparallel's reply to a cell."""
        if not isinstance(reply, BaseException):
            return None
        if not isinstance(reply, RemoteError):
            return RankError(type(reply).__name__, str(reply), "")
        if reply.ename == EngineError.__name__:
            return RankError("RankEnded", f"{self._lost_text([rank])}; %makedip -r starts the group afresh", "")
        return RankError(reply.ename, reply.evalue, reply.traceback)

    def _follow(
        self, replies: Mapping[int, concurrent.futures.Future[Any]], events: Events, show: outputs.CellOutput
    ) -> bool:
        """Show messages until every rank has answered and fallen silent; returns whether the user interrupted."""
        open_ends = 2 * len(replies)
        interrupted = patient = False
        while open_ends:
            try:
                if events.empty():
                    outputs.flush()
                rank, message = events.get(timeout=PATIENCE_SECONDS if patient else None)
                if message is None:
                    open_ends -= 1
                else:
                    show.receive(rank, message)
            except queue.Empty:
                waiting = [rank for rank, future in replies.items() if not future.done()]
                outputs.tell(f"{ranks_text(waiting)} did not stop yet; a second interrupt gives up waiting")
                patient = False
            except KeyboardInterrupt:
                waiting = [rank for rank, future in replies.items() if not future.done()]
                if interrupted:
                    text = f"{ranks_text(waiting)} did not stop; %makedip -i shows them, %makedip -r starts afresh"
                    raise CellInterrupted(text) from None
                interrupted = patient = True
                self.interrupt(waiting)
        return interrupted

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Send SIGINT to `ranks` (default: all): a cell in Python code ends there with KeyboardInterrupt."""
        engines = [self.members[rank].engine for rank in (range(self.world_size) if ranks is None else ranks)]
        if engines:
            self.cluster.client.send_signal("SIGINT", engines, block=False)

    def command(self, text: str) -> None:
        """Give `text` to the app on every rank."""
        if self._app is None:
            raise BadInput(f"%%dip -a {text}: this group has no app; start it with %makedip -a NAME")
        self._ask(self.members, "apps.command", apps.find(self._app), text)

    # -- objects

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None = None) -> list[str]:
        """Put `values` into the namespaces of `ranks` (default: all); returns the names whose tensors moved to the CPU.

        Raises TransferError, and changes nothing on any rank, if one of them cannot be carried.
        """
        self.require()
        ranks = range(self.world_size) if ranks is None else ranks
        members = [self.members[rank] for rank in ranks]
        packed = transfer.pack(values)
        errors = self._ask(members, "transfer.stage", packed.values)
        try:
            transfer.staged(dict(zip(ranks, errors, strict=True)))
        except TransferError:
            self._ask(members, "transfer.drop")
            raise
        self._ask(members, "transfer.commit")
        return packed.moved

    def pull(self, names: Sequence[str], rank: int = 0) -> dict[str, Any]:
        """The objects `names` of `rank`, with tensors on the CPU; raises TransferError if one of them cannot be had."""
        return self.pull_all(names, [rank])[0][0]

    def pull_all(self, names: Sequence[str], ranks: Sequence[int]) -> tuple[list[dict[str, Any]], list[str]]:
        """The objects `names` of each of `ranks`, in order, and the names whose tensors moved to the CPU."""
        self.require()
        replies = self._ask([self.members[rank] for rank in ranks], "transfer.pack", list(names))
        values = [transfer.unpack(rank, reply) for rank, reply in zip(ranks, replies, strict=True)]
        return values, [name for name in names if any(name in reply["moved"] for reply in replies)]

    # -- figures

    def info(self) -> list[outputs.RankInfo]:
        """Each rank: where it lives, its memory, and what it is doing; also while a cell runs."""
        deadline = time.monotonic() + INFO_SECONDS
        infos = []
        for rank, member in enumerate(self.members):
            figures: dict[str, Any] = {}
            state = "ended"
            if rank not in self._lost:
                state = "no answer"
                with contextlib.suppress(concurrent.futures.TimeoutError, StartError):
                    figures = self._control(member.engine, "housekeeping.figures", deadline)
                    state = "busy" if figures["busy"] else "idle"
            gpu = figures.get("gpu") or {}
            infos.append(
                outputs.RankInfo(
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


def _threads(ranks: int) -> int:
    """CPU threads for each of `ranks` on this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _loopback() -> str:
    """Name of the loopback interface."""
    return "lo" if sys.platform == "linux" else "lo0"


def _free_port() -> int:
    """A TCP port that is free on loopback, for programs that want a MASTER_PORT; the group itself needs none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
