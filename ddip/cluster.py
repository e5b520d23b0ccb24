"""Start and stop an ipyparallel cluster on this host, one engine at a time; nothing here is about torch's group.

    notebook (client)  --zmq-->  controller (ddip.controller)  --zmq-->  engine (ddip.rank.engine), one a rank
         |                             |                                    |
         owner.json: pids ------------ watches its parent ---------------- dies with its parent

Both are forked from the warm process, which dies with the notebook, or spawned: then the notebook is their parent.
All of ipyparallel's cluster code runs on one thread with an event loop of its own, which lives as long as the cluster:
exits of processes are then noticed at once, and the parent-death signal of spawned engines, which is bound to the
thread that started them, means the notebook.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
from ipyparallel import Cluster as IppCluster

from ddip import ipp_private, owner, registry, warming
from ddip.deaths import exit_text, log_end
from ddip.errors import GroupError
from ddip.ipp_private import RankClient
from ddip.launchers import ControllerLauncher, EngineSetLauncher, Launcher

T = TypeVar("T")

HEARTBEAT_MS = 1000
MISSED_BEATS = 30
"""After which the Hub takes an engine for dead: one that a debugger has stopped for a while is not."""
LOG_LINES = 12
"""Lines of an engine's log that an error shows."""


class Cluster:
    """A controller, a client, and engines that are started and stopped one by one; owned by this process."""

    def __init__(self, log: logging.Logger, *, fork: bool) -> None:
        self._fork = fork and warming.possible()
        if self._fork:
            warming.begin()
        self.spawned = ""
        """Why engines were not forked, though they should be."""
        self._client: RankClient | None = None
        self.exits: dict[int, int | None] = {}
        """Exit codes of the engines that ended (negative: the signal; None: unknown)."""
        self._wanted: set[int] = set()
        """Engines that nobody has ended."""
        self._logs: dict[int, Path] = {}
        self._last_words: dict[int, str] = {}
        self._processes: dict[int, owner.Proc] = {}
        self._engines_started = 0
        self._starting: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._stopping = False
        self._controller_exit: list[int | None] = []
        self._warm: warming.WarmProcess | None = None
        self.run_folder = owner.make_run_folder()
        self._files: tuple[str, ...] = ()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ddip-cluster", daemon=True)
        self._thread.start()
        self._environment = {
            "DDIP_RUN_FOLDER": str(self.run_folder),
            "DDIP_NOTEBOOK": warming.notebook(),
            "SPT_NOENV": "1",
            **warming.python_path(),
        }
        try:
            self._ipp: IppCluster = self._on_loop(self._make(log))
            profile = Path(self._ipp.profile_dir)
            name = self._ipp.cluster_id
            self._files = (
                self._ipp.cluster_file,
                str(profile / "security" / f"ipcontroller-{name}-*.json"),
                str(profile / "log" / f"*{name}*"),
            )
            self._record()
        except BaseException:
            self._end_loop()
            raise

    async def _make(self, log: logging.Logger) -> IppCluster:
        return IppCluster(
            log=log,
            controller_launcher_class=ControllerLauncher,
            engine_launcher_class=EngineSetLauncher,
            cluster_id=f"ddip-{os.getpid()}-{os.urandom(3).hex()}",
            controller_ip="127.0.0.1",
            controller_location="127.0.0.1",
            send_engines_connection_env=False,  # the engines import torch while the controller starts
            shutdown_atexit=False,
            delay=0,
        )

    def _on_loop(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    @property
    def connected(self) -> bool:
        """Is there a controller, with a client connected to it?"""
        return self._client is not None

    @property
    def client(self) -> RankClient:
        """An ``ipyparallel.Client``; there is one from `connect` on."""
        assert self._client is not None
        return self._client

    def require_controller(self) -> None:
        """Raise GroupError if the controller process is gone, and with it every way to the engines."""
        if self._controller_exit:
            warm = self._warm is not None and self._warm.ended
            what = "warm process, from which the ranks were forked, ended" if warm else "controller process ended"
            raise GroupError(f"the {what}; %makedip -r starts the group afresh")

    def _controller_ended(self, data: dict[str, Any]) -> None:
        """Nothing can reach the engines any more: let them not hold memory and GPUs."""
        self._controller_exit.append(data.get("exit_code"))
        if not self._stopping:
            engines = _processes(self._launchers(self._ipp.engines))
            threading.Thread(target=owner.end_processes, args=(engines,), name="ddip-end").start()

    # -- start

    def start_controller(self, timeout: float) -> None:
        """Start the controller process; returns before it is ready, for which `timeout` seconds are allowed."""
        arguments = [
            "--IPController.log_level=WARN",
            "--IPController.use_threads=True",  # two processes instead of nine
            "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # else the Hub keeps what passes
            f"--HeartMonitor.period={HEARTBEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={MISSED_BEATS}",
        ]
        starting = self._ipp.start_controller(
            controller_cmd=[sys.executable, "-m", "ddip.controller"],
            controller_args=arguments,
            connection_info_timeout=timeout,
            environment=self._environment,
            fork=self._fork,
        )
        try:
            self._on_loop(starting, timeout)
        except concurrent.futures.TimeoutError:
            warming.give_up()
            raise GroupError("the controller did not start in time; -t SECONDS waits longer") from None
        self._warm = self._ipp.controller.warm
        self._ipp.controller.on_stop(self._controller_ended)
        self._record()

    def start_engines(
        self, count: int, environment: Mapping[str, str], also: Sequence[str], timeout: float
    ) -> list[int]:
        """Have `count` engines started, with `environment` added to that of this process; returns their ids at once.

        Modules `also` are imported before, once for all, where engines are forked.
        """
        engines = list(range(self._engines_started, self._engines_started + count))
        self._engines_started += count
        self._wanted.update(engines)
        environment = {**self._environment, **environment}
        starting = (self._start_engine(engine, environment, also, timeout) for engine in engines)
        self._starting = asyncio.run_coroutine_threadsafe(_all(starting), self._loop)
        return engines

    async def _start_engine(
        self, engine: int, environment: dict[str, str], also: Sequence[str], timeout: float
    ) -> None:
        arguments = [
            f"--IPEngine.id={engine}",
            "--IPEngine.log_level=ERROR",  # what it warns of is no news
            "--IPEngine.enable_nanny=False",
            "--HistoryManager.enabled=False",  # it keeps a database and a thread
            "--IPEngine.max_heartbeat_misses=0",  # it dies with its parent instead
            f"--IPEngine.wait_for_url_file={timeout}",
            f"--IPEngine.timeout={timeout}",
        ]
        await self._ipp.start_engines(
            1,
            engine_set_id=_set_name(engine),
            engine_cmd=[sys.executable, "-m", "ddip.rank.engine"],
            engine_args=arguments,
            environment=environment,
            fork=self._fork,
            also=list(also),
        )
        launched = self._ipp.engines[_set_name(engine)]
        for launcher in launched.launchers.values():  # none if it has ended already
            self._logs[engine] = Path(launcher.output_file)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes[engine] = owner.Proc.of(launcher.pid)
            self.spawned = launcher.why_spawned or self.spawned
        launched.on_stop(lambda data: self._engine_ended(engine, data, "".join(launched.outputs.values())))

    def connect(self, deadline: float) -> None:
        """Wait for the controller and connect the client; `deadline` on ``time.monotonic``."""
        timeout = max(0.1, deadline - time.monotonic())
        try:
            self._client = self._on_loop(self._connect(timeout), timeout)
        except (concurrent.futures.TimeoutError, TimeoutError):
            raise GroupError("the controller did not answer in time; -t SECONDS waits longer") from None
        except RuntimeError as error:
            log = "\n  ".join(self._ipp.controller.get_output().splitlines()[-LOG_LINES:])
            raise GroupError(f"the controller did not start: {error}\nend of its log:\n  {log}") from None

    async def _connect(self, timeout: float) -> RankClient:
        """What ``ipyparallel.Cluster.connect_client`` does, with a client of our own."""
        info = self._ipp.controller.get_connection_info()
        files = await info if inspect.isawaitable(info) else info
        return RankClient(files["client"], cluster=self._ipp, timeout=timeout)

    def wait_for(self, engines: list[int], deadline: float, on_ready: Callable[[int], None]) -> list[dict[str, Any]]:
        """Wait until every one of `engines` answers on all its channels; `on_ready` is told how many do.

        Returns what they tell of themselves (``ddip.rank.housekeeping.hello``).

        Raises GroupError, with the log of an engine that ended or is missing.
        """
        try:
            self._starting.result(max(0.1, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            warming.give_up()
        self._record()
        missing = set(engines)
        asked = 0.0
        while missing:
            here = missing.intersection(self.client.ids)
            if here:
                missing -= here
                on_ready(len(engines) - len(missing))
            elif time.monotonic() > asked + 0.1:
                asked = time.monotonic()
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    ipp_private.refresh(self.client, 0.1)
            else:
                time.sleep(0.01)
            self._check_start(engines, missing, deadline)
        return self._greet(engines, deadline)

    def _greet(self, engines: list[int], deadline: float) -> list[dict[str, Any]]:
        """Use every channel of every engine: a router drops what it gets before the engine has connected to it."""
        hellos: dict[int, dict[str, Any]] = {}
        listening: set[int] = set()
        patience = 0.05
        while len(hellos) < len(engines) or len(listening) < len(engines):
            asked = {self._hello(engine): engine for engine in engines if engine not in hellos}
            tried = {self._nothing(engine): engine for engine in engines if engine not in listening}
            done, _ = concurrent.futures.wait([*asked, *tried], timeout=patience)
            hellos.update((asked[answer], answer.result()["content"]["ok"]) for answer in done if answer in asked)
            listening.update(tried[answer] for answer in done if answer in tried)
            self._check_start(engines, {*engines} - ({*hellos} & listening), deadline)
            patience = min(2 * patience, 1)
        return [hellos[engine] for engine in engines]

    def _hello(self, engine: int) -> concurrent.futures.Future[Any]:
        """What `engine` tells of itself on its control channel."""
        return ipp_private.control(self.client, engine, "ddip_request", {"target": "housekeeping.hello", "args": []})

    def _nothing(self, engine: int) -> concurrent.futures.Future[Any]:
        """Done when an empty cell has come back on the other channels."""
        ping = ipp_private.execute(self.client, engine, "", lambda message: None, silent=True)
        return ping.output  # type: ignore[no-any-return]

    def _check_start(self, engines: list[int], waiting: set[int], deadline: float) -> None:
        ended = [engine for engine in engines if engine in self.exits]
        if ended:
            code = self.exits[ended[0]]
            raise GroupError(f"an engine ended while it started ({exit_text(code)}){self._log_text(ended[0])}")
        self.require_controller()
        if waiting and time.monotonic() > deadline:
            count = f"{len(engines) - len(waiting)} of {len(engines)} engines"
            raise GroupError(f"only {count} came in time; -t SECONDS waits longer{self._log_text(min(waiting))}")

    def _log_text(self, engine: int) -> str:
        lines = self.log_tail(engine)
        return "\nend of an engine's log:\n  " + "\n  ".join(lines) if lines else "; its log is empty"

    def log_tail(self, engine: int) -> list[str]:
        """The last lines that `engine` wrote to its log; of a crash, those that tell where it was."""
        try:
            text = self._logs[engine].read_text(errors="replace")
        except (KeyError, OSError):  # not started, or ended
            text = self._last_words.get(engine, "")
        return log_end(text, LOG_LINES)

    # -- running

    def _engine_ended(self, engine: int, data: dict[str, Any], log: str) -> None:
        self._last_words[engine] = log  # ipyparallel has removed the file
        self.exits[engine] = data.get("exit_code")
        if engine in self._wanted and self.connected and not self._stopping:
            ipp_private.unregister(self.client, engine)
            gone = self._processes.get(engine)
            if gone is not None:  # what it had forked holds its connections, and the other ranks would wait for them
                threading.Thread(target=owner.end_processes, args=([gone],), name="ddip-end").start()

    def _record(self) -> None:
        """Write down what to clear up if this process dies."""
        if not self.run_folder.exists():
            return  # the controller has lost its parent, and has tidied up
        launchers = self._launchers(self._ipp.engines)
        processes = _processes([self._ipp.controller, *launchers] if self._ipp.controller else launchers)
        me = owner.Proc.of(os.getpid())
        owner.Record(me, tuple(processes), self._files).write(self.run_folder)

    def _launchers(self, names: Iterable[str]) -> list[Launcher]:
        """The launchers of the live engines in the engine sets `names`."""
        return [launcher for name in list(names) for launcher in list(self._ipp.engines[name].launchers.values())]

    # -- stop

    def stop_engines_but(self, keep: Collection[int]) -> None:
        """End all engines but those in `keep`, and wait until they are gone."""
        self._give_up_starting()
        going = self._on_loop(self._engines_but(keep))
        self._wanted.difference_update(going)
        _end(self._launchers(going.values()))
        for engine, name in going.items():
            self._on_loop(self._ipp.stop_engines(name))
            if self.connected:
                ipp_private.unregister(self.client, engine)
        self._record()

    def _give_up_starting(self) -> None:
        """Of engines whose start was interrupted, none may start later."""
        if self._starting.cancel():
            self._on_loop(_others_end())

    async def _engines_but(self, keep: Collection[int]) -> dict[int, str]:
        """The engine sets of all other engines, also of one whose start was interrupted."""
        started = {engine: _set_name(engine) for engine in range(self._engines_started)}
        return {e: name for e, name in started.items() if e not in keep and name in self._ipp.engines}

    def stop(self) -> None:
        """End everything and leave no process, file or thread behind."""
        self._stopping = True
        self._give_up_starting()
        self._record()
        if self.connected:
            registry.remove_parallel_magics(self.client)
            self.client.close(linger=0)
        launchers = self._launchers(self._ipp.engines)
        _end([self._ipp.controller, *launchers] if self._ipp.controller else launchers)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self._on_loop(self._ipp.stop_cluster(), timeout=10)
        self._end_loop()

    def _end_loop(self) -> None:
        owner.remove_files(self.run_folder, self._files)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*work)


async def _others_end() -> None:
    """Wait until every other task of this loop has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _set_name(engine: int) -> str:
    return f"engine{engine}"


def _processes(launchers: Iterable[Launcher]) -> list[owner.Proc]:
    """Their processes that live."""
    found = []
    for launcher in launchers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(owner.Proc.of(launcher.pid))
    return found


def _end(launchers: Iterable[Launcher]) -> None:
    """End their processes side by side; ipyparallel would do it in turns, and wait 5 s for a busy one."""
    owner.end_processes(_processes(launchers))
    for launcher in launchers:
        launcher.ended()
