"""ipyparallel's launchers on this host, with processes that are forked from the warm process instead of spawned.

``Cluster`` chooses them by ipyparallel's own settings. Where a fork cannot be, they spawn: the same, only slower.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster import launcher
from traitlets import Bool, List, Unicode

from ddip.cluster import preload_client
from ddip.cluster.processes import Proc, end_processes

POLL_SECONDS = 0.005
GONE_SECONDS = 0.25
"""How long a start that is given up waits until the process is gone. The warm process may import something meanwhile:
then none has been forked, or it has been told of and killed by then."""


class _Forked:
    """What a launcher uses of ``psutil.Process``, for a child of the warm process, which tells its end."""

    def __init__(self, child: preload_client.Child) -> None:
        self.pid = child.pid.result()
        self.forget = child.end
        self._exit = child.exit

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            return self._exit.result(timeout)
        except concurrent.futures.TimeoutError:
            raise psutil.TimeoutExpired(timeout, self.pid) from None

    def is_running(self) -> bool:
        return not self._exit.done()

    def send_signal(self, number: int) -> None:
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


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
        pid = asyncio.wrap_future(child.pid)
        pid.add_done_callback(lambda done: done.exception())  # nobody asks for it when the start is given up
        try:
            self.pid = await asyncio.shield(pid)  # only `end` may cancel it
        except preload_client.CannotFork as error:
            self.why_spawned = str(error)
            return False
        except BaseException:  # the start is given up
            await asyncio.wait([asyncio.wrap_future(child.end())], timeout=GONE_SECONDS)
            raise
        self.warm = warm
        self.process = _Forked(child)
        self.notify_start(self.pid)
        self._start_waiting()
        return True

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


class EngineSetLauncher(launcher.LocalEngineSetLauncher):  # type: ignore[misc]
    """Starts engines side by side."""

    entrypoint_name = "ddip.cluster.launchers.EngineSetLauncher"
    launcher_class = EngineLauncher
    fork = Bool(True)
    also = List(Unicode())

    async def start(self, n: int) -> list[None]:
        return list(await asyncio.gather(*super().start(n)))


def processes_of(launchers: Iterable[Launcher]) -> list[Proc]:
    """Their processes that live."""
    found = []
    for one in launchers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(Proc.of(one.pid))
    return found


def end_launched(launchers: Iterable[Launcher]) -> None:
    """End their processes side by side; ipyparallel would do it in turns, and wait 5 s for a busy one."""
    end_processes(processes_of(launchers))
    for one in launchers:
        one.ended()
