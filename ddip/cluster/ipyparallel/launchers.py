"""ipyparallel's launchers on this host, with processes that are forked from the warm process instead of spawned.

``Cluster`` chooses them by ipyparallel's own settings. Where a fork cannot be, they spawn: the same, only slower.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
from ipyparallel import Cluster as IppCluster
from ipyparallel.cluster import launcher
from traitlets import Any as AnyTrait
from traitlets import Bool, List, Unicode
from traitlets.log import get_logger

from ddip.cluster.hosts import agent
from ddip.cluster.ipp_private import RankClient
from ddip.cluster.processes import on_host, preload_client
from ddip.cluster.processes.children import CannotFork, Child
from ddip.cluster.processes.host import Host, HostLost
from ddip.cluster.processes.processes import Proc, end_processes, existing
from ddip.errors import GroupError
from ddip.guard import Guard

POLL_SECONDS = 0.005
GONE_SECONDS = 0.25
"""How long a start that is given up waits until the process is gone. The warm process may import something meanwhile:
then none has been forked, or it has been told of and killed by then."""
END_SECONDS = 5.0
"""How long another host may take to end its ranks."""
PAUSE_SECONDS = 0.1
"""After a failure of a thread that waits for a process to end."""


def log_text(path: str | Path) -> str:
    """Read a log, in which processes may write any bytes; empty if there is none."""
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


class _Noticing:
    """Of a launcher: who is told of an end is told whatever the others do with that."""

    _guard: Guard

    def on_stop(self, function: Callable[[Any], object]) -> Any:
        return super().on_stop(self._guard.around(function))  # type: ignore[misc]

    def _log_output(self, stop_data: Any = None) -> None:
        with self._guard:
            super()._log_output(stop_data)  # type: ignore[misc]


class _Forked:
    """What a launcher uses of ``psutil.Process``, for a child of a warm process, which tells its end."""

    def __init__(self, child: Child, signal: Callable[[int, int], object]) -> None:
        self.pid = child.pid.result()
        self.forget = child.end
        self._exit = child.exit
        self._signal = signal

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            return self._exit.result(timeout)
        except concurrent.futures.TimeoutError:
            raise psutil.TimeoutExpired(timeout, self.pid) from None

    def is_running(self) -> bool:
        return not self._exit.done()

    def send_signal(self, number: int) -> None:
        if self.is_running():
            self._signal(self.pid, number)


class Launcher(_Noticing, launcher.LocalProcessLauncher):  # type: ignore[misc]
    """Starts what `preload_client.command` gives, or has the warm process fork what that would become."""

    _output: str | None = None
    _guard = Guard("the end of a process of the group was not noticed as it should be", pause_seconds=PAUSE_SECONDS)

    fork = Bool(True, help="Fork from the warm process; False: spawn.")
    also = List(Unicode(), help="Modules to import before the fork, besides those that are always needed.")
    needs: tuple[str, ...] = ()
    """Modules that are always needed."""
    warm: preload_client.WarmProcess | None = None
    """The process that it was forked from."""
    why_spawned = ""
    """Why it was not forked."""
    output_file: str
    """Its log."""

    async def start(self) -> None:
        log = Path(self.environment["DDIP_RUN_FOLDER"], Path(self.output_file).name)  # it goes with that folder
        log.touch(0o600)  # a cell may print secrets
        self.output_file = str(log)
        if not (self.fork and preload_client.possible() and await self._fork()):
            self.environment.update(DDIP_OWNER=str(os.getpid()))
            super().start()

    async def _fork(self) -> bool:
        warm = preload_client.begin()
        module, *arguments = self.args[len(preload_client.START) :]
        environment = {**os.environ, **self.get_env(), "DDIP_OWNER": str(warm.pid)}
        child = warm.fork(
            module, needs=self.needs, imports=self.also, argv=arguments, env=environment, log=self.output_file
        )
        try:
            await self._take(child, on_host.send_signal)
        except CannotFork as error:
            self.why_spawned = str(error)
            return False
        self.warm = warm
        return True

    async def _take(self, child: Child, signal: Callable[[int, int], object]) -> None:
        """Wait until `child` is there, and then for its end. Raises CannotFork."""
        pid = asyncio.wrap_future(child.pid)
        pid.add_done_callback(lambda done: done.exception())  # nobody asks for it when the start is given up
        try:
            self.pid = await asyncio.shield(pid)  # only `end` may cancel it
        except CannotFork:
            raise
        except BaseException:  # the start is given up
            await asyncio.wait([asyncio.wrap_future(child.end())], timeout=GONE_SECONDS)
            raise
        self.process = _Forked(child, signal)
        self.notify_start(self.pid)
        self._start_waiting()

    def _wait(self) -> None:
        """In a thread of ipyparallel: wait for the end of the process, however often that fails."""
        while not self._stop_waiting.is_set() and self.state == "running":
            with self._guard:
                super()._wait()
                return

    def _start_streaming(self) -> None:
        """Do not copy the log to stderr, as ipyparallel does for its own debug messages: it reads text, not bytes."""

    def get_output(self, remove: bool = False) -> str:
        """What is in its log; `remove` the file then. ipyparallel's own fails if a byte is not UTF-8."""
        if self._output is None:
            self._output = log_text(self.output_file) if self.output_file else ""
        if remove:
            on_host.remove(self.output_file)
        return self._output

    def ended(self) -> None:
        """Somebody has seen that the process is gone: do not wait for word of it."""
        if isinstance(self.process, _Forked):
            self.process.forget()


class ControllerLauncher(Launcher, launcher.LocalControllerLauncher):  # type: ignore[misc]
    """Starts ``ddip.cluster.processes.controller``."""

    entrypoint_name = "ddip.cluster.ipyparallel.launchers.ControllerLauncher"  # as which ``ipcluster`` finds it
    needs = preload_client.CONTROLLER

    async def get_connection_info(self, timeout: float | None = None) -> Any:
        """As ipyparallel's own, but it looks more often."""
        files = [Path(file) for file in self.connection_files.values()]
        deadline = time.monotonic() + (self.connection_info_timeout if timeout is None else timeout)
        while self.process.is_running() and not all(file.exists() for file in files) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return await super().get_connection_info(0.2)  # which tells what is wrong, if they are not there


class EngineLauncher(Launcher, launcher.LocalEngineLauncher):  # type: ignore[misc]
    """Starts one ``ddip.rank.kernel.engine``."""

    needs = preload_client.ENGINE

    async def start(self) -> None:
        self.fork, self.also = self.parent.fork, self.parent.also
        await super().start()


class RemoteEngineLauncher(EngineLauncher):
    """Starts one on another host, by the agent there."""

    host: Host
    _child: Child

    async def start(self) -> None:
        self.host, self.also = self.parent.host, self.parent.also
        module, *arguments = self.args[len(preload_client.START) :]
        log = Path(self.output_file).name
        self.output_file = ""  # it is there
        profile = str(self.host.run_folder / agent.PROFILE)
        self._child = self.host.fork(
            module,
            needs=self.needs,
            imports=self.also,
            argv=arguments,
            env={**self.get_env(), "IPP_PROFILE_DIR": profile},
            log=log,
        )
        try:
            await self._take(self._child, lambda pid, number: self.host.begin(on_host.send_signal, pid, number))
        except CannotFork as error:
            raise GroupError(f"{self.host.name}: no rank can be there: {error}") from None

    def mark_log(self) -> None:
        """A cell is sent to it: what is in its log by now has nothing to do with how that ends."""
        self._child.mark_log()

    def get_output(self, remove: bool = False) -> str:
        """What it had logged when it ended, since the last mark."""
        return self._child.log


class EngineSetLauncher(_Noticing, launcher.LocalEngineSetLauncher):  # type: ignore[misc]
    """Starts engines side by side, on this host or on another."""

    _guard = Launcher._guard

    entrypoint_name = "ddip.cluster.ipyparallel.launchers.EngineSetLauncher"
    launcher_class = EngineLauncher
    fork = Bool(True)
    also = List(Unicode())
    host = AnyTrait(None, help="Another host; None: this one.")

    async def start(self, n: int) -> list[None]:
        if self.host is not None:
            self.launcher_class = RemoteEngineLauncher
        return list(await asyncio.gather(*super().start(n)))


def processes_of(launchers: Iterable[Launcher]) -> list[Proc]:
    """Their processes that live on this host."""
    return existing(one.pid for one in launchers if not isinstance(one, RemoteEngineLauncher))


def end_launched(launchers: Iterable[Launcher]) -> None:
    """End their processes side by side; ipyparallel would do it in turns, and wait 5 s for a busy one."""
    launchers = list(launchers)
    remote: dict[str, tuple[Host, list[int]]] = {}
    for one in launchers:
        if isinstance(one, RemoteEngineLauncher):
            remote.setdefault(one.host.name, (one.host, []))[1].append(one.pid)
    ending: list[Future[None]] = [host.begin(on_host.end, pids) for host, pids in remote.values()]
    end_processes(processes_of(launchers))
    for end in ending:
        with contextlib.suppress(HostLost, concurrent.futures.TimeoutError):
            end.result(END_SECONDS)
    for one in launchers:
        one.ended()


HEARTBEAT_MS = 1000
MISSED_BEATS = 1_000_000_000
"""After which the Hub takes an engine for dead: never, since its parent tells when it ends. A process that was stopped
for a while, by a debugger or with the whole machine, lives and has its variables."""
WRITTEN_SECONDS = 1.0
"""How long the file of a cluster may be out of date."""


class OwnIppCluster(IppCluster):  # type: ignore[misc]
    """An ``ipyparallel.Cluster`` that writes its file once for many engines that come or go together."""

    _writing: asyncio.TimerHandle | None = None

    def update_cluster_file(self) -> None:
        """Soon; called for each engine, and ipyparallel's own writes down all of them each time."""
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_later(WRITTEN_SECONDS, self._write)

    async def write_now(self) -> None:
        """What has still to be written."""
        if self._writing is not None:
            self._writing.cancel()
            self._write()

    async def write_no_more(self) -> None:
        """Its files are removed now."""
        if self._writing is not None:
            self._writing.cancel()
        self.cluster_file = ""

    def _write(self) -> None:
        self._writing = None
        super().update_cluster_file()


def controller_arguments(encrypt: bool) -> list[str]:
    """Of the controller; with `encrypt`, all that it sends and gets is, and who has no key is refused."""
    return [
        "--IPController.transport=ipc",
        "--IPController.log_level=WARN",
        "--IPController.use_threads=True",  # two processes instead of nine
        "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # else the Hub keeps what passes
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={MISSED_BEATS}",
        *(["--IPController.enable_curve=True"] if encrypt else []),
    ]


def engine_arguments(engine: int, timeout: float) -> list[str]:
    """Of an engine with this number, which is to be there within `timeout` seconds."""
    return [
        f"--IPEngine.id={engine}",
        "--IPEngine.log_level=ERROR",  # what it warns of is no news
        "--IPEngine.enable_nanny=False",
        "--HistoryManager.enabled=False",  # it keeps a database and a thread
        "--IPEngine.max_heartbeat_misses=0",  # it dies with its parent instead
        f"--IPEngine.wait_for_url_file={timeout}",
        f"--IPEngine.timeout={timeout}",
    ]


async def make_client(cluster: IppCluster, timeout: float) -> RankClient:
    """What ``ipyparallel.Cluster.connect_client`` does, with a client of our own."""
    info: Any = cluster.controller.get_connection_info()
    files = await info if inspect.isawaitable(info) else info
    with _unsigned():
        return RankClient(files["client"], cluster=cluster, timeout=timeout)


def _traitlets_log() -> logging.Logger:
    log = get_logger()
    return log if isinstance(log, logging.Logger) else log.logger


@contextlib.contextmanager
def _unsigned() -> Iterator[None]:
    """Let nobody be warned of messages that are not signed: ipyparallel signs none that are encrypted."""
    log, passes = _traitlets_log(), lambda record: "signing is disabled" not in record.getMessage()
    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)
