"""ddip's ipyparallel cluster: start and stop engines one by one, here or on other hosts; no torch is involved.

    notebook (client)  --zmq-->  controller (processes/controller.py)  --zmq-->  engine (rank/kernel/engine.py) per rank
         |                             |                                    |
         owner.json: pids ------------ watches its parent ---------------- dies with its parent

Controller and engines are forked from the preload process, which dies with the notebook, or spawned by the notebook.
All of ipyparallel's cluster code runs on one thread with an event loop, which lives as long as the cluster. So exits
are noticed at once, and the parent-death signal of spawned engines, which is bound to the thread that started them,
comes only when the notebook dies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ipyparallel import Cluster as IppCluster

from ddip.cluster import ipp_private
from ddip.cluster.cluster_api import EngineSpec
from ddip.cluster.hosts.hosts import Hosts
from ddip.cluster.hosts.remote_host import RemoteHost
from ddip.cluster.ipyparallel import greeting, registry
from ddip.cluster.ipyparallel.channels import Channels
from ddip.cluster.ipyparallel.launchers import (
    ControllerLauncher,
    EngineSetLauncher,
    Launcher,
    controller_arguments,
    end_launched,
    engine_arguments,
    make_client,
    processes_of,
)
from ddip.cluster.ipyparallel.loop import Loop, all_of, others_end
from ddip.cluster.processes import on_host, ownership, preload_client, processes
from ddip.cluster.processes.exit_diagnosis import LOG_LINES, exit_text
from ddip.cluster.processes.host import Host, ensure_reachable, has_ipython_folder, process_environment
from ddip.cluster.reach import Reach
from ddip.errors import GroupError
from ddip.guard import Guard
from ddip.protocol import compat, compat_ipyparallel
from ddip.protocol.reports import Hello

T = TypeVar("T")
NO_SPACE = "no space is left in {folder}; free some there, and type the same line again"
IMPORT_FAILED = re.compile(r"^\s*((?:ModuleNotFound|Import)Error: .*)$", re.MULTILINE)


class OwnCluster(Channels):
    """A controller, a client, and engines that are started and stopped one by one; owned by this process.

    `ddip.cluster.cluster_api.Cluster` documents the public methods. The constructor begins to connect to `hosts`
    (default: this machine), and starts no engine. `fork`: fork the processes from the preload process. Raises
    GroupError.
    """

    def __init__(self, log: logging.Logger, fork: bool, hosts: Sequence[str] = (), reach: Reach | None = None) -> None:
        super().__init__()
        if refusal := compat_ipyparallel.NOTEBOOK.find_refusal():
            raise GroupError(refusal)
        self.off = compat.find_off(compat_ipyparallel.NOTEBOOK)
        self._fork = fork and preload_client.can_fork()
        if self._fork:
            preload_client.ensure_process()
        self.spawned = ""
        self._host_numbers: dict[int, int] = {}
        """Host number by engine."""
        self._expected: set[int] = set()
        """Engines that were started and not ended by this process."""
        self._processes: dict[int, list[processes.Proc]] = {}
        self._engines_started = 0
        self._starting: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._stopping = False
        self._guard = Guard("processes of the group may be left")
        self._controller_exit: list[int | None] = []
        self._warm: preload_client.PreloadProcess | None = None
        try:
            self.run_folder = ownership.make_run_folder()
        except OSError as error:
            raise GroupError(
                f"cannot create a folder for the group's sockets that only you can enter "
                f"({error}); set TMPDIR to a folder of yours with a short path"
            ) from None
        self._profile = self._name = ""
        try:
            self._hosts = Hosts(hosts, reach or Reach(), self.run_folder)
        except BaseException:
            ownership.remove_files(self.run_folder, self._profile, self._name)
            raise
        self._loop = Loop("ddip-cluster")
        mark = {processes.MARKED: processes.MARK}
        self._environment = process_environment(self.run_folder, preload_client.notebook_name(), mark)
        try:
            self._ipp: IppCluster = self._run_on_loop(self._make_ipp_cluster(log))
            self._record()
        except BaseException:
            self._end_loop()
            raise

    async def _make_ipp_cluster(self, log: logging.Logger) -> IppCluster:
        profile = {} if has_ipython_folder() else {"profile_dir": str(self.run_folder / "ipython")}
        try:
            cluster = IppCluster(
                **profile,
                log=log,
                controller_launcher_class=ControllerLauncher,
                engine_launcher_class=EngineSetLauncher,
                cluster_file="",  # no file of the whole cluster
                cluster_id=f"ddip-{os.getpid()}-{os.urandom(3).hex()}",
                controller_ip=str(self.run_folder / ownership.SOCKETS),
                controller_location="127.0.0.1",
                load_profile=False,  # a mistake in ipython_config.py would end the start
                send_engines_connection_env=False,  # engines do not wait for the controller: they import torch
                shutdown_atexit=False,
                delay=0,
            )
            self._profile, self._name = cluster.profile_dir, cluster.cluster_id
        except OSError as error:
            where = "check this folder, or set IPYTHONDIR"
            raise GroupError(f"IPython cannot use its profile: {error}; {where}") from None
        return cluster

    def _run_on_loop(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        return self._loop.run(work, timeout)

    # -- hosts

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts that engines can run on."""
        return self._hosts.all

    def host_of(self, engine: int) -> Host:
        """Return the host on which `engine` runs or ran."""
        return self.hosts[self._host_numbers[engine]]

    def wait_for_hosts(self, deadline: float, progress: Callable[[str], None]) -> None:
        """Wait as `Hosts.wait` does, and record the hosts' processes for a cleanup. Raises GroupError."""
        self._hosts.wait(deadline, progress)
        self._record()

    def replace_host(self, number: int, name: str, reach: Reach, deadline: float) -> None:
        """Replace the lost host `number` as `Hosts.reopen` does, and record its processes. Raises GroupError."""
        self._hosts.reopen(number, name, reach, deadline)
        self._record()

    # -- processes between notebook and engines

    def ensure_controller(self) -> None:
        """Raise GroupError if the controller process has ended, so that no engine can be reached.

        It ends with the preload process that has forked it, though ipyparallel may report that later.
        """
        warm = self._warm is not None and self._warm.died
        if warm or self._controller_exit:
            what = "preload process, from which the ranks were forked, ended" if warm else "controller process ended"
            raise GroupError(f"the {what}; %makedip -r restarts the group")

    def stopped(self) -> str:
        """Describe what keeps the engines' answers back: stopped processes, and silent hosts; empty if nothing does."""
        own = [(name, processes.stopped_text(pid)) for name, pid in self._own_processes().items()]
        stopped = [f"{name} is {text}" for name, text in own if text]
        return "; ".join([*stopped, *(host.silent for host in self.hosts if host.silent)])

    def carry_on(self) -> None:
        """Resume any process between the notebook and the engines that a signal has stopped."""
        on_host.carry_on([*self._own_processes().values()])

    def _own_processes(self) -> dict[str, int]:
        """Return the PIDs, by name, of the controller and the preload process, as far as they are known."""
        controller = getattr(self._ipp.controller, "pid", None)
        found = {"the controller": controller, "the preload process": self._warm.pid if self._warm else None}
        return {name: pid for name, pid in found.items() if pid is not None}

    def _handle_controller_end(self, data: dict[str, Any]) -> None:
        """End the engines, which cannot be reached any more, so that they free memory and GPUs."""
        self._controller_exit.append(data.get("exit_code"))
        if not self._stopping:
            engines = self._launchers(self._ipp.engines)
            self._guard.start_thread("ddip-end", end_launched, engines, daemon=False)

    # -- start

    def start(
        self,
        engines: Sequence[EngineSpec],
        also: Sequence[str],
        deadline: float,
        on_up: Callable[[int], None],
    ) -> dict[int, Hello]:
        """Start `engines`, and the controller before the first ones; they import torch while it starts."""
        timeout = max(0.1, deadline - time.monotonic())
        first = not self.connected
        if first:
            self._start_controller(timeout)
        for number in sorted({engine.host for engine in engines}):
            if self.hosts[number].lost:
                self._hosts.reopen(number, self.hosts[number].name, self._hosts.reach, deadline)
        numbers = self._start_engines(engines, also, timeout)
        if first:
            ipp_private.import_numpy()  # while the processes start
            self._connect(deadline)
        return dict(zip(numbers, self._wait_for(numbers, deadline, on_up), strict=True))

    def _start_controller(self, timeout: float) -> None:
        """Start the controller process, but do not wait until it accepts connections.

        `timeout` limits this start, and later the wait for its connection files, in seconds. Raises GroupError if the
        start takes longer.
        """
        starting = self._ipp.start_controller(
            controller_cmd=preload_client.module_command("ddip.cluster.processes.controller"),
            controller_args=controller_arguments(encrypt=bool(self._hosts.remote)),
            connection_info_timeout=timeout,
            environment=self._environment,
            fork=self._fork,
        )
        try:
            self._run_on_loop(starting, timeout)
        except concurrent.futures.TimeoutError:
            preload_client.give_up()
            raise GroupError("the controller did not start in time; -t SECONDS waits longer") from None
        self._warm = self._ipp.controller.warm
        self._ipp.controller.on_stop(self._handle_controller_end)
        self._record()

    def _start_engines(self, specs: Sequence[EngineSpec], also: Sequence[str], timeout: float) -> list[int]:
        """Begin to start engines as in `specs`, and return their numbers at once.

        They must be ready within `timeout` seconds. Modules `also` are imported first; if engines are forked, once per
        host. Raises GroupError if the folder of the group's sockets was emptied.
        """
        if self.connected and not any(self.run_folder.glob(f"{ownership.SOCKETS}:*")):
            raise GroupError(
                f"no new rank can join: the folder of the group's sockets, {self.run_folder}, was emptied; the "
                "running ranks remain usable; %makedip -r restarts the group"
            )
        engines = list(range(self._engines_started, self._engines_started + len(specs)))
        self._engines_started += len(specs)
        self._expected.update(engines)
        self._host_numbers.update({engine: spec.host for engine, spec in zip(engines, specs, strict=True)})
        starting = (
            self._start_engine(engine, spec.environment, also, timeout)
            for engine, spec in zip(engines, specs, strict=True)
        )
        self._starting = self._loop.begin(all_of(starting))
        return engines

    async def _start_engine(
        self, engine: int, environment: Mapping[str, str], also: Sequence[str], timeout: float
    ) -> None:
        host = self.host_of(engine)
        remote = isinstance(host, RemoteHost)
        base = {"IPP_CONNECTION_INFO": await self._relayed_connection_info(engine)} if remote else self._environment
        await self._ipp.start_engines(
            1,
            engine_set_id=_set_name(engine),
            engine_cmd=preload_client.module_command("ddip.rank.kernel.engine"),
            engine_args=engine_arguments(engine, timeout),
            environment={**base, **environment},
            fork=self._fork,
            also=list(also),
            host=host if remote else None,
        )
        launched = self._ipp.engines[_set_name(engine)]
        for launcher in launched.launchers.values():  # none if the engine has ended already
            if not remote:
                self._logs.opened(engine, Path(launcher.output_file))
                self._processes[engine] = processes.find_existing([launcher.pid])
            else:
                self._logs.opened_elsewhere(engine, launcher.mark_log)
            self.spawned = launcher.why_spawned or self.spawned
        launched.on_stop(lambda data: self._handle_engine_end(engine, data, "".join(launched.outputs.values())))

    async def _relayed_connection_info(self, engine: int) -> str:
        """Wait for the controller, and return its connection information for an engine on another host."""
        await self._ipp.controller.get_connection_info()
        file = Path(self._ipp.controller.connection_files["engine"])
        return await asyncio.to_thread(self._hosts.connect, self._host_numbers[engine], file)

    def _connect(self, deadline: float) -> None:
        """Wait for the controller and connect the client; `deadline` on ``time.monotonic``."""
        timeout = max(0.1, deadline - time.monotonic())
        try:
            self._run_on_loop(self._make_client(timeout), timeout)
        except (concurrent.futures.TimeoutError, TimeoutError):
            raise GroupError("the controller did not answer in time; -t SECONDS waits longer") from None
        except RuntimeError as error:
            log = "\n  ".join(self._ipp.controller.get_output().splitlines()[-LOG_LINES:])
            _check_names(log)
            raise GroupError(f"the controller did not start: {error}\nend of its log:\n  {log}") from None

    async def _make_client(self, timeout: float) -> None:
        self._client = await make_client(self._ipp, timeout)  # kept even if the caller has timed out meanwhile

    def _disconnect(self) -> None:
        if self.connected:
            registry.remove_parallel_magics(self.client)
            self.client.close(linger=0)

    def _wait_for(self, engines: list[int], deadline: float, on_ready: Callable[[int], None]) -> list[Hello]:
        """Wait until each of `engines` answers on all its channels, and return their hellos.

        `on_ready` gets the number of engines that are known so far. Raises GroupError with the log of an engine that
        ended or is missing.
        """
        try:
            self._starting.result(max(0.1, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            preload_client.give_up()
        self._record()
        return greeting.wait_for(
            self.client, engines, on_ready, lambda waiting: self._check_start(engines, waiting, deadline)
        )

    def _check_start(self, engines: list[int], waiting: set[int], deadline: float) -> None:
        ended = [engine for engine in engines if engine in self.exits]
        if ended:
            code, log = self.exits[ended[0]], self._logs.text(ended[0])
            _check_names(log)
            host = self.host_of(ended[0])
            ensure_reachable(host)
            where = f" on {host.name}" if host.name else ""
            advice = _advise_on_packages(log) if host.name else ""
            raise GroupError(f"an engine ended while it started{where} ({exit_text(code)}){advice}{log}")
        self.ensure_controller()
        if waiting and time.monotonic() > deadline:
            count = f"{len(engines) - len(waiting)} of {len(engines)} engines"
            why = self.stopped() or "-t SECONDS waits longer"
            raise GroupError(f"timed out: {count} started; {why}{self._logs.text(min(waiting))}")

    # -- running

    def _handle_engine_end(self, engine: int, data: dict[str, Any], log: str) -> None:
        self._logs.closed(engine, log)
        self.exits[engine] = data.get("exit_code")
        if engine in self._expected and self.connected and not self._stopping:
            ipp_private.unregister_engine(self.client, engine)
            ended = self._processes.get(engine, [])
            if ended:  # its children hold its connections open, and the other ranks would wait for them
                self._guard.start_thread("ddip-end", processes.end_processes, ended, daemon=False)

    def _record(self) -> None:
        """Record the processes and files to clean up if this process dies."""
        launchers = self._launchers(self._ipp.engines)
        recorded = processes_of([self._ipp.controller, *launchers] if self._ipp.controller else launchers)
        recorded += processes.find_existing(host.pid for host in self._hosts.remote)
        me = processes.Proc.of(os.getpid())
        with contextlib.suppress(FileNotFoundError):  # the controller has lost its parent, and has cleaned up
            try:
                ownership.Record(me, tuple(recorded), self._profile, self._name).write(self.run_folder)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise GroupError(NO_SPACE.format(folder=self.run_folder.parent)) from None
                raise

    def _launchers(self, names: Iterable[str]) -> list[Launcher]:
        """Return the launchers of the live engines in the engine sets `names`."""
        return [launcher for name in list(names) for launcher in list(self._ipp.engines[name].launchers.values())]

    # -- stop

    def stop_engines_but(self, keep: Collection[int]) -> None:
        """End all engines except those in `keep`, and wait until they are gone."""
        self._cancel_starting()
        to_end = self._run_on_loop(self._engine_sets_except(keep))
        self._expected.difference_update(to_end)
        end_launched(self._launchers(to_end.values()))
        for engine, name in to_end.items():
            self._run_on_loop(self._ipp.stop_engines(name))
            if self.connected:
                ipp_private.unregister_engine(self.client, engine)
        self._record()

    def _cancel_starting(self) -> None:
        """Cancel an interrupted start, so that no engine starts later."""
        if self._starting.cancel():
            self._run_on_loop(others_end())

    async def _engine_sets_except(self, keep: Collection[int]) -> dict[int, str]:
        """Return the engine sets of all engines not in `keep`, including those of an interrupted start."""
        started = {engine: _set_name(engine) for engine in range(self._engines_started)}
        return {e: name for e, name in started.items() if e not in keep and name in self._ipp.engines}

    def stop(self) -> None:
        """End everything and leave no process, file or thread behind."""
        self._stopping = True
        self._cancel_starting()
        with contextlib.suppress(GroupError, OSError):  # only the death of this process would need the record
            self._record()
        self._disconnect()
        launchers = self._launchers(self._ipp.engines)
        end_launched([self._ipp.controller, *launchers] if self._ipp.controller else launchers)
        with contextlib.suppress(
            concurrent.futures.TimeoutError, RuntimeError
        ):  # RuntimeError: a thread could not be started
            self._run_on_loop(self._ipp.stop_cluster(), timeout=10)
        self._end_loop()

    def _end_loop(self) -> None:
        self._hosts.close()
        ownership.remove_files(self.run_folder, self._profile, self._name)
        self._loop.close()
        self._disconnect()  # until now, a late start may have connected the client


def _check_names(log: str) -> None:
    """Raise GroupError if the `log` of an ended process says that a library lacks a name that ddip needs."""
    if found := compat.REFUSAL.search(log):
        raise GroupError(found[0])


def _advise_on_packages(log: str) -> str:
    """Return advice if the `log` of an ended process has a failed import; empty otherwise."""
    errors = IMPORT_FAILED.findall(log)
    return f": {errors[-1]}; install there what the notebook's Python has, or name another --python" if errors else ""


def _set_name(engine: int) -> str:
    return f"engine{engine}"
