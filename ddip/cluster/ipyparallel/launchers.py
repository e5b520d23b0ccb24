"""Launchers for ipyparallel that fork processes from the preload process instead of spawning them.

``OwnCluster`` selects them by ipyparallel's settings. If forking is not possible, they spawn, which is only slower.
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
from ddip.cluster.processes.host import Host, HostLost, ensure_reachable
from ddip.cluster.processes.processes import Proc, end_processes, find_existing
from ddip.errors import GroupError
from ddip.guard import Guard

POLL_SECONDS = 0.005
GONE_SECONDS = 0.25
"""Time that a cancelled start waits until its process has ended.

The preload process may be busy importing: then either no process was forked, or it was reported and killed by then.
"""
END_SECONDS = 5.0
"""Time that another host may take to end its ranks."""
PAUSE_SECONDS = 0.1
"""Pause after a failure of a thread that waits for the end of a process."""


def log_text(path: str | Path) -> str:
    """Read the log at `path`, in which processes may write any bytes; empty if there is none."""
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


class _GuardedCallbacks:
    """A mixin for launchers: a stop callback that raises does not keep the others from being called."""

    _guard: Guard

    def on_stop(self, function: Callable[[Any], object]) -> Any:
        return super().on_stop(self._guard.around(function))  # type: ignore[misc]


class _ForkedProcess:
    """The methods of ``psutil.Process`` that a launcher uses, for a forked child whose exit is reported."""

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


class Launcher(_GuardedCallbacks, launcher.LocalProcessLauncher):  # type: ignore[misc]
    """A launcher that forks from the preload process, or spawns if forking is not possible.

    Its command must come from `preload_client.module_command`.
    """

    _output: str | None = None
    _guard = Guard("the end of a process of the group was not noticed as it should be", pause_seconds=PAUSE_SECONDS)

    fork = Bool(True, help="Fork from the preload process; False: spawn.")
    also = List(Unicode(), help="Modules to import before the fork, besides those that are always needed.")
    needs: tuple[str, ...] = ()
    """Modules that are always needed."""
    warm: preload_client.PreloadProcess | None = None
    """The preload process that forked the process; None if it was spawned."""
    why_spawned = ""
    """Reason why the process could not be forked; empty if there is none."""
    output_file: str
    """Path of the process's log."""

    async def start(self) -> None:
        log = Path(self.environment["DDIP_RUN_FOLDER"], Path(self.output_file).name)  # it is removed with that folder
        log.touch(0o600)  # a cell may print secrets
        self.output_file = str(log)
        if not (self.fork and preload_client.can_fork() and await self._fork()):
            self.environment.update(DDIP_OWNER=str(os.getpid()))
            super().start()

    async def _fork(self) -> bool:
        warm = preload_client.ensure_process()
        module, *arguments = self.args[len(preload_client.START) :]
        environment = {**os.environ, **self.get_env(), "DDIP_OWNER": str(warm.pid)}
        child = warm.fork(
            module, needs=self.needs, imports=self.also, argv=arguments, env=environment, log=self.output_file
        )
        try:
            await self._follow_child(child, on_host.send_signal)
        except CannotFork as error:
            self.why_spawned = str(error)
            return False
        self.warm = warm
        return True

    async def _follow_child(self, child: Child, signal: Callable[[int, int], object]) -> None:
        """Wait until `child` is forked, and start waiting for its end in a thread. Raises CannotFork.

        `signal` sends a signal to a PID. If the start is cancelled, the child is ended.
        """
        pid = asyncio.wrap_future(child.pid)
        pid.add_done_callback(lambda done: done.exception())  # after a cancelled start, no one else retrieves it
        try:
            self.pid = await asyncio.shield(pid)  # only `end` may cancel it
        except CannotFork:
            raise
        except BaseException:  # the start is cancelled
            await asyncio.wait([asyncio.wrap_future(child.end())], timeout=GONE_SECONDS)
            raise
        self.process = _ForkedProcess(child, signal)
        self.notify_start(self.pid)
        self._start_waiting()

    def _wait(self) -> None:
        """Wait for the end of the process, even if that fails repeatedly; runs in an ipyparallel thread."""
        while not self._stop_waiting.is_set() and self.state == "running":
            with self._guard:
                super()._wait()
                return

    def get_output(self, remove: bool = False) -> str:
        """Return the log, and then `remove` its file; ipyparallel's method fails on bytes that are not UTF-8."""
        if self._output is None:
            self._output = log_text(self.output_file) if self.output_file else ""
        if remove:
            on_host.remove_file(self.output_file)
        return self._output

    def ended(self) -> None:
        """Stop waiting for the report of the process's end, since the caller has seen that it ended."""
        if isinstance(self.process, _ForkedProcess):
            self.process.forget()


class ControllerLauncher(Launcher, launcher.LocalControllerLauncher):  # type: ignore[misc]
    """A launcher of ``ddip.cluster.processes.controller``."""

    needs = preload_client.CONTROLLER

    async def get_connection_info(self, timeout: float | None = None) -> Any:
        """Return the connection information once its files exist; polls more often than ipyparallel does."""
        files = [Path(file) for file in self.connection_files.values()]
        deadline = time.monotonic() + (self.connection_info_timeout if timeout is None else timeout)
        while self.process.is_running() and not all(file.exists() for file in files) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return await super().get_connection_info(0.2)  # raises the right error if they do not exist


class EngineLauncher(Launcher, launcher.LocalEngineLauncher):  # type: ignore[misc]
    """A launcher of one ``ddip.rank.kernel.engine``."""

    needs = preload_client.ENGINE

    async def start(self) -> None:
        self.fork, self.also = self.parent.fork, self.parent.also
        await super().start()


class RemoteEngineLauncher(EngineLauncher):
    """A launcher of one engine on another host, through the agent there."""

    host: Host
    _child: Child

    async def start(self) -> None:
        self.host, self.also = self.parent.host, self.parent.also
        module, *arguments = self.args[len(preload_client.START) :]
        log = Path(self.output_file).name
        self.output_file = ""  # the log is on the other host
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
            await self._follow_child(self._child, lambda pid, number: self.host.begin(on_host.send_signal, pid, number))
        except CannotFork as error:
            ensure_reachable(self.host)
            raise GroupError(f"{self.host.name}: no rank can start there: {error}") from None

    def mark_log(self) -> None:
        """Leave everything logged until now out of the engine's output, since a new cell is sent to it."""
        self._child.mark_log()

    def get_output(self, remove: bool = False) -> str:
        """Return what the engine has logged since the last cell was sent to it; empty until it has ended."""
        return self._child.log


class EngineSetLauncher(_GuardedCallbacks, launcher.LocalEngineSetLauncher):  # type: ignore[misc]
    """A launcher that starts several engines concurrently, on this host or on another."""

    _guard = Launcher._guard

    launcher_class = EngineLauncher
    fork = Bool(True)
    also = List(Unicode())
    host = AnyTrait(None, help="Another host; None: this one.")

    async def start(self, n: int) -> list[None]:
        if self.host is not None:
            self.launcher_class = RemoteEngineLauncher
        return list(await asyncio.gather(*super().start(n)))


def processes_of(launchers: Iterable[Launcher]) -> list[Proc]:
    """Return the live processes of `launchers` on this host."""
    return find_existing(launched.pid for launched in launchers if not isinstance(launched, RemoteEngineLauncher))


def end_launched(launchers: Iterable[Launcher]) -> None:
    """End the processes of `launchers` concurrently, and wait until they have ended.

    On other hosts, it waits at most END_SECONDS. ipyparallel would end them one by one, and wait 5 s for a busy one.
    """
    launchers = list(launchers)
    remote: dict[str, tuple[Host, list[int]]] = {}
    for launched in launchers:
        if isinstance(launched, RemoteEngineLauncher):
            remote.setdefault(launched.host.name, (launched.host, []))[1].append(launched.pid)
    ending: list[Future[None]] = [host.begin(on_host.end_sessions, pids) for host, pids in remote.values()]
    end_processes(processes_of(launchers))
    for end in ending:
        with contextlib.suppress(HostLost, concurrent.futures.TimeoutError):
            end.result(END_SECONDS)
    for launched in launchers:
        launched.ended()


HEARTBEAT_MS = 1000
MISSED_BEATS = 1_000_000_000
"""Missed heartbeats after which the Hub takes an engine for dead: in effect never, since its parent reports its end.

A process that was stopped for a while, by a debugger or with the whole machine, is alive and has its variables.
"""


def controller_arguments(encrypt: bool) -> list[str]:
    """Return the arguments of the controller.

    With `encrypt`, it encrypts all messages and refuses peers without the key.
    """
    return [
        "--IPController.transport=ipc",
        "--IPController.log_level=WARN",
        "--IPController.use_threads=True",  # two processes instead of nine
        "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # else the Hub keeps all messages
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={MISSED_BEATS}",
        *(["--IPController.enable_curve=True"] if encrypt else []),
    ]


def engine_arguments(engine: int, timeout: float) -> list[str]:
    """Return the arguments of the engine with this number, which must be ready within `timeout` seconds."""
    return [
        f"--IPEngine.id={engine}",
        "--IPEngine.log_level=ERROR",  # its warnings are known and harmless
        "--IPEngine.enable_nanny=False",
        "--HistoryManager.enabled=False",  # it would need a database and a thread
        "--IPEngine.max_heartbeat_misses=0",  # the engine dies with its parent instead
        f"--IPEngine.wait_for_url_file={timeout}",
        f"--IPEngine.timeout={timeout}",
    ]


async def make_client(cluster: IppCluster, timeout: float) -> RankClient:
    """Connect a `RankClient` to the cluster, and return it.

    Raises TimeoutError if the Hub does not answer within `timeout` seconds. Does what
    ``ipyparallel.Cluster.connect_client`` does for an ipyparallel client.
    """
    info: Any = cluster.controller.get_connection_info()
    files = await info if inspect.isawaitable(info) else info
    with _no_signing_warning():
        # ipython_dir is not needed, but ipyparallel would make a temporary one where it cannot write to the usual one
        folder = os.path.dirname(cluster.profile_dir)
        return RankClient(files["client"], cluster=cluster, timeout=timeout, ipython_dir=folder)


def _traitlets_log() -> logging.Logger:
    log = get_logger()
    return log if isinstance(log, logging.Logger) else log.logger


@contextlib.contextmanager
def _no_signing_warning() -> Iterator[None]:
    """Suppress the warning that signing is disabled: ipyparallel does not sign messages that it encrypts."""
    log, passes = _traitlets_log(), lambda record: "signing is disabled" not in record.getMessage()
    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)
