"""The hosts of a cluster: reached all at once, compared with the notebook, and given the way to its controller."""

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
from ddip.cluster.reach import Reach
from ddip.errors import GroupError

HERE = ("localhost", "127.0.0.1", "::1")
"""Names of the machine that the notebook is on, which needs no ssh."""


class Hosts:
    """Those of one cluster, by number, in the order given; without names, this machine alone."""

    def __init__(self, names: Sequence[str], reach: Reach, run_folder: Path) -> None:
        self._go_by(reach)
        self._run_folder = run_folder
        self._lock = threading.Lock()
        self._connected: dict[int, str] = {}
        """What engines of a host are told of the controller, where they are not beside it."""
        self.all: list[Host] = [self._open(number, name) for number, name in enumerate(names or [HERE[0]])]

    def _open(self, number: int, name: str) -> Host:
        if name in HERE and not self.reach.cluster:
            return LocalHost(self._run_folder)
        directory = on_host.directory() if self.reach.directory is None else self.reach.directory
        return RemoteHost(name, self._way.command(number, name), directory)

    @property
    def remote(self) -> list[RemoteHost]:
        """Those that are not this machine."""
        return [host for host in self.all if isinstance(host, RemoteHost)]

    def wait(self, deadline: float, progress: Callable[[str], None]) -> None:
        """Until every one has told what it is, or `deadline` on ``time.monotonic``.

        Raises GroupError, which says of each host that cannot be used why, and what to do.
        """
        faults, remote = [], self.remote
        for count, host in enumerate(remote):
            progress(f"ddip: {count} of {len(remote)} hosts are reached")
            faults += self._faults(host, deadline)
        if faults:
            raise GroupError("\n".join(faults))

    def _faults(self, host: RemoteHost, deadline: float) -> list[str]:
        """Wait for a host; returns why it cannot be used, or nothing."""
        try:
            host.wait(max(0.1, deadline - time.monotonic()))
        except HostLost:
            return [self._way.why_lost(host.name, host.said)]
        except concurrent.futures.TimeoutError:
            return [f"{host.name}: it has not answered in time; -t SECONDS waits longer"]
        fault = compare(on_host.facts(), host.facts) or self._folder_fault(host)
        return [f"{host.name}: {fault}"] if fault else []

    def _folder_fault(self, host: RemoteHost) -> str:
        """What to say where the folder that was asked for is not on a host; another than that is no fault."""
        if self.reach.directory is None or not host.missing:
            return ""
        return f"{host.missing}; make that folder there, or name another with --cd"

    def reopen(self, number: int, name: str, reach: Reach, deadline: float) -> None:
        """Reach a host that was lost once more, or another one in its place; all are reached as `reach` says then.

        Raises GroupError; nothing has changed then.
        """
        former, before = self.all[number], self.reach
        self._go_by(reach)
        host = self._open(number, name)
        try:
            faults = self._faults(host, deadline) if isinstance(host, RemoteHost) else []
            if faults:
                raise GroupError("\n".join(faults))
        except BaseException:
            self._go_by(before)
            if isinstance(host, RemoteHost):
                host.kill()
            raise
        self.all[number] = host
        self._connected.pop(number, None)
        if isinstance(former, RemoteHost):
            former.kill()

    def _go_by(self, reach: Reach) -> None:
        self.reach, self._way = reach, ways.of(reach)

    def connect(self, number: int, engine_file: Path) -> str:
        """Let the engines of a host reach the controller; returns what they are told of it.

        It is a secret: with it, anybody can have the ranks run code. Raises GroupError.
        """
        with self._lock:
            return self._connect(number, engine_file)

    def _connect(self, number: int, engine_file: Path) -> str:
        host = self.all[number]
        assert isinstance(host, RemoteHost)
        if number not in self._connected:
            self._connected[number] = json.dumps(ways.relayed(host, engine_file))
        return self._connected[number]

    def close(self) -> None:
        """Have each host end everything; returns when they have."""
        for host in self.remote:
            host.hang_up()
        for host in self.remote:
            host.close()


class OnHosts:
    """The part of a cluster that says where its engines are."""

    def __init__(self) -> None:
        super().__init__()
        self._hosts: Hosts
        self._places: dict[int, int] = {}
        """Number of each engine's host."""

    def _record(self) -> None:
        """Write down what to clear up if this process dies."""
        raise NotImplementedError

    @property
    def hosts(self) -> Sequence[Host]:
        """Where engines can be."""
        return self._hosts.all

    def host_of(self, engine: int) -> Host:
        """Where `engine` is, or was."""
        return self.hosts[self._places[engine]]

    def wait_for_hosts(self, deadline: float, progress: Callable[[str], None]) -> None:
        """Until each has told what it is."""
        self._hosts.wait(deadline, progress)
        self._record()

    def replace_host(self, number: int, name: str, reach: Reach, deadline: float) -> None:
        """Have another host in place of one that was lost."""
        self._hosts.reopen(number, name, reach, deadline)
        self._record()


def compare(ours: Facts, theirs: Facts) -> str:
    """Why ranks of a host cannot be in a group with a notebook of `ours`; empty if they can."""
    if not theirs["torch"]:
        return (
            f"its Python {theirs['python']} has no torch; install torch {ours['torch']} there, or name another --python"
        )
    if ours["torch"] and _release(theirs["torch"]) != _release(ours["torch"]):
        return f"it has torch {theirs['torch']}, the notebook {ours['torch']}; install the same torch on both"
    if theirs["ddip"] != ours["ddip"]:
        return f"it has ddip {theirs['ddip']}, the notebook {ours['ddip']}; install the same ddip on both"
    if theirs["python"].split(".")[:2] != ours["python"].split(".")[:2]:
        return (
            f"it has Python {theirs['python']}, the notebook {ours['python']}: what travels between them is pickled by "
            "one and read by the other; name the same Python with --python"
        )
    return ""


def _release(version: str) -> str:
    """Without the build: ``2.15.0+cpu`` and ``2.15.0+cu130`` can be in one group."""
    return version.partition("+")[0]
