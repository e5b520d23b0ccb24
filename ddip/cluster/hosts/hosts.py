"""The hosts of a cluster: connect to all at once, compare them with the notebook, and relay the controller to them."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ddip.cluster.hosts import ways
from ddip.cluster.hosts.remote_host import RemoteHost
from ddip.cluster.processes import on_host
from ddip.cluster.processes.host import Host, HostLost, LocalHost
from ddip.cluster.processes.on_host import Facts
from ddip.cluster.reach import THIS_MACHINE, Reach
from ddip.errors import GroupError

SILENT_SECONDS = 12.0
"""Time without an answer after which the start says why a host may not have answered: just above ssh's own limit."""


class Hosts:
    """The hosts of one cluster, numbered in the given order; without names, only this machine.

    The constructor begins to connect to them, and `wait` waits for that.
    """

    def __init__(self, names: Sequence[str], reach: Reach, run_folder: Path) -> None:
        self._set_reach(reach)
        self._run_folder = run_folder
        self._lock = threading.Lock()
        self._connection_infos: dict[int, str] = {}
        """The controller's connection information for engines of each remote host, as JSON by host number."""
        self.all: list[Host] = []
        try:
            for number, name in enumerate(names or [THIS_MACHINE[0]]):
                self.all.append(self._open(number, name))
        except BaseException:
            for host in self.remote:
                host.kill()
            raise

    def _open(self, number: int, name: str) -> Host:
        if name in THIS_MACHINE and not self.reach.cluster:
            return LocalHost(self._run_folder)
        directory = on_host.working_directory() if self.reach.directory is None else self.reach.directory
        return RemoteHost(name, self._way.command(number, name), directory, self._way.is_relayed(name))

    @property
    def remote(self) -> list[RemoteHost]:
        """The hosts other than this machine."""
        return [host for host in self.all if isinstance(host, RemoteHost)]

    def wait(self, deadline: float, progress: Callable[[str], None]) -> None:
        """Wait until every host has reported its facts, or until `deadline` on ``time.monotonic``.

        `progress` gets the number of hosts reached, as a line. Raises GroupError with the reason and a remedy for each
        host that cannot be used.
        """
        faults, remote = [], self.remote
        for count, host in enumerate(remote):
            progress(f"ddip: {count} of {len(remote)} hosts reached")
            faults += self._wait_for_host(host, deadline, progress)
        if faults:
            raise GroupError("\n".join(faults))

    def _wait_for_host(
        self, host: RemoteHost, deadline: float, progress: Callable[[str], None] = lambda text: None
    ) -> list[str]:
        """Wait for a host until `deadline`, and return the reasons why it cannot be used; empty if it can.

        `progress` gets the reason for the wait once the host is silent for SILENT_SECONDS.
        """
        try:
            try:
                host.wait(min(SILENT_SECONDS, max(0.1, deadline - time.monotonic())))
            except concurrent.futures.TimeoutError:
                progress(f"ddip: waiting for {self._way.explain_failure(host)}")
                host.wait(max(0.1, deadline - time.monotonic()))
        except (HostLost, concurrent.futures.TimeoutError):
            return [self._way.explain_failure(host)]
        fault = explain_mismatch(on_host.collect_facts(), host.facts)
        if not fault and host.missing and self.reach.directory is not None:  # the default folder may be missing
            fault = f"{host.missing}; create it there, or choose another folder with --cd"
        return [f"{host.name}: {fault}"] if fault else []

    def reopen(self, number: int, name: str, reach: Reach, deadline: float) -> None:
        """Reconnect to the lost host `number`, or connect to the host `name` in its place; wait for it.

        `reach` applies to all hosts afterwards. Raises GroupError, and changes nothing, if the host has not answered at
        `deadline`, on ``time.monotonic``, or cannot be used.
        """
        former, before = self.all[number], self.reach
        self._set_reach(reach)
        host = self._open(number, name)
        try:
            faults = self._wait_for_host(host, deadline) if isinstance(host, RemoteHost) else []
            if faults:
                raise GroupError("\n".join(faults))
        except BaseException:
            self._set_reach(before)
            if isinstance(host, RemoteHost):
                host.kill()
            raise
        self.all[number] = host
        self._connection_infos.pop(number, None)
        if isinstance(former, RemoteHost):
            former.kill()

    def _set_reach(self, reach: Reach) -> None:
        self.reach, self._way = reach, ways.choose_way(reach)

    def connect(self, number: int, engine_file: Path) -> str:
        """Relay the controller to the remote host `number`; return the connection information for engines.

        `engine_file`: the controller's connection file for engines. The result is JSON, and secret: whoever has it can
        run code on the ranks. It is made once per host. Raises GroupError.
        """
        with self._lock:
            host = self.all[number]
            assert isinstance(host, RemoteHost)
            if number not in self._connection_infos:
                self._connection_infos[number] = json.dumps(ways.relay_controller(host, engine_file))
            return self._connection_infos[number]

    def close(self) -> None:
        """Make each host end all its processes, and wait until they have ended."""
        for host in self.remote:
            host.hang_up()
        for host in self.remote:
            host.close()


def explain_mismatch(local: Facts, remote: Facts) -> str:
    """Return the reason why ranks of a host cannot join the notebook's group; empty if they can.

    `local` are the notebook's facts, `remote` the host's.
    """
    if not remote["torch"]:
        advice = f"install torch {local['torch']} there, or name another --python"
        return f"its Python {remote['python']} has no torch; {advice}"
    if local["torch"] and _release_number(remote["torch"]) != _release_number(local["torch"]):
        return f"it has torch {remote['torch']}, the notebook {local['torch']}; install the same torch on both"
    if remote["ddip"] != local["ddip"]:
        return f"it has ddip {remote['ddip']}, the notebook {local['ddip']}; install the same ddip on both"
    if remote["python"].split(".")[:2] != local["python"].split(".")[:2]:
        return (
            f"it has Python {remote['python']}, the notebook {local['python']}: one unpickles what the other has "
            "pickled; choose the same Python version with --python"
        )
    return ""


def _release_number(version: str) -> str:
    """Strip the build from a torch version: ``2.15.0+cpu`` and ``2.15.0+cu130`` can be in one group."""
    return version.partition("+")[0]
