"""How hosts are reached: what starts their agents, and how their engines get to the controller.

    Ssh     one ssh a host                         --hosts h1:4,h2:4
    Srun    one step a node, in jobs of Slurm's    --slurm "nodes=2", --here
    Attached  an engine of somebody else's cluster   --cluster NAME

Nothing above `Hosts` knows which one it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ddip.cluster import ssh
from ddip.cluster.attach.attached import GONE
from ddip.cluster.hosts import slurm
from ddip.cluster.hosts.remote_host import RemoteHost
from ddip.cluster.processes.host import HostLost
from ddip.cluster.reach import Attachment, Reach
from ddip.errors import GroupError


class Way(Protocol):
    """To the hosts of one cluster."""

    def command(self, number: int, name: str) -> list[str]:
        """What starts the agent of host `number`, and talks with it on stdin and stdout."""

    def why_lost(self, name: str, said: str) -> str:
        """What to tell the user of a host whose agent did not start, but `said` something."""


class Ssh:
    """One ssh a host, started by this process."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def command(self, number: int, name: str) -> list[str]:
        """What starts the agent of host `number`."""
        return ssh.command(name, self._reach.python, self._reach.setup)

    def why_lost(self, name: str, said: str) -> str:
        """What to tell the user."""
        return ssh.reason(name, said, self._reach.python, self._reach.setup)


class Srun:
    """One step a node, in the job of Slurm's that it is in."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def command(self, number: int, name: str) -> list[str]:
        """What starts the agent of node `number`."""
        without = [word for variable in slurm.environment(os.environ) for word in ("-u", variable)]
        line = ssh.agent_line(self._reach.python, self._reach.setup)
        return ["env", *without, *slurm.step(self._reach.jobs[number], name), "sh", "-c", line]

    def why_lost(self, name: str, said: str) -> str:
        """What to tell the user."""
        said = said or "srun has ended; its job may be over"
        return ssh.reason(name, said, self._reach.python, self._reach.setup)


class Attached:
    """Start agents through engines of an ipyparallel cluster: one process here per host talks to one engine."""

    def __init__(self, attachment: Attachment, python: str, setup: str) -> None:
        self._attachment, self._python, self._setup = attachment, python, setup

    def command(self, number: int, name: str) -> list[str]:
        """What starts the agent of host `number`."""
        seat = self._attachment.seats[number]
        python = self._python or ("" if self._setup else seat.python)
        engines = json.dumps(seat.engines)
        ours = [sys.executable, "-P", "-m", "ddip.cluster.attach.near_end"]
        return [*ours, self._attachment.file, engines, python, self._setup]

    def why_lost(self, name: str, said: str) -> str:
        """What to tell the user."""
        if GONE in said:
            last = said.strip().rpartition("\n")[2]
            return f"{name}: {last}; start that cluster again, then type %makedip -r"
        python = next((seat.python for seat in self._attachment.seats if seat.name == name), "")
        reason = ssh.reason(name, said, self._python, self._setup)
        return reason if self._python or self._setup else f"{reason} (the Python of its engines is {python})"


def of(reach: Reach) -> Way:
    """The way that `reach` means."""
    if reach.attached is not None:
        return Attached(reach.attached, reach.python, reach.setup)
    return Srun(reach) if reach.jobs else Ssh(reach)


def relayed(host: RemoteHost, engine_file: Path) -> dict[str, Any]:
    """Let engines of `host` reach the controller, which has written `engine_file`; returns what they are told of it.

    Raises GroupError.
    """
    told: dict[str, Any] = json.loads(engine_file.read_text())
    here = told["interface"].removeprefix("ipc://")
    there = f"{host.run_folder}/{Path(here).name}"
    try:
        host.relay({f"{there}:{port}": f"{here}:{port}" for port in sorted(ports(told))})
    except (HostLost, RuntimeError) as error:
        raise GroupError(f"{host.name}: the controller's sockets cannot be had there: {error}") from None
    return {**told, "interface": f"ipc://{there}"}


def ports(told: Mapping[str, Any]) -> set[int]:
    """All numbers of ports in what engines are told of the controller."""
    return set(_numbers(told.values()))


def _numbers(values: Any) -> set[int]:
    """All numbers in `values`, and in lists and tables of them."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            found.add(value)
        elif isinstance(value, list):
            found |= _numbers(value)
        elif isinstance(value, dict):
            found |= _numbers(value.values())
    return found
