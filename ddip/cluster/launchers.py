"""ipyparallel's launchers on this host, with processes that are forked from the warm process instead of spawned.

``Cluster`` chooses them by ipyparallel's own settings. Where a fork cannot be, they spawn: the same, only slower.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster import launcher
from traitlets import Any as AnyTrait
from traitlets import Bool, List, Unicode

from ddip.cluster import agent, on_host, preload_client
from ddip.cluster.children import CannotFork, Child
from ddip.cluster.host import Host, HostLost
from ddip.cluster.processes import Proc, end_processes, existing
from ddip.errors import GroupError

POLL_SECONDS = 0.005
GONE_SECONDS = 0.25
"""How long a start that is given up waits until the process is gone. The warm process may import something meanwhile:
then none has been forked, or it has been told of and killed by then."""
END_SECONDS = 5.0
"""How long another host may take to end its ranks."""


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


class Launcher(launcher.LocalProcessLauncher):  # type: ignore[misc]
    """Starts what `preload_client.command` gives, or has the warm process fork what that would become."""

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

    def ended(self) -> None:
        """Somebody has seen that the process is gone: do not wait for word of it."""
        if isinstance(self.process, _Forked):
            self.process.forget()


class ControllerLauncher(Launcher, launcher.LocalControllerLauncher):  # type: ignore[misc]
    """Starts ``ddip.cluster.controller``."""

    entrypoint_name = "ddip.cluster.launchers.ControllerLauncher"  # as which ``ipcluster`` finds it
    needs = preload_client.CONTROLLER

    async def get_connection_info(self, timeout: float | None = None) -> Any:
        """As ipyparallel's own, but it looks more often."""
        files = [Path(file) for file in self.connection_files.values()]
        deadline = time.monotonic() + (self.connection_info_timeout if timeout is None else timeout)
        while self.process.is_running() and not all(file.exists() for file in files) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return await super().get_connection_info(0.2)  # which tells what is wrong, if they are not there


class EngineLauncher(Launcher, launcher.LocalEngineLauncher):  # type: ignore[misc]
    """Starts one ``ddip.rank.engine``."""

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


class EngineSetLauncher(launcher.LocalEngineSetLauncher):  # type: ignore[misc]
    """Starts engines side by side, on this host or on another."""

    entrypoint_name = "ddip.cluster.launchers.EngineSetLauncher"
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
