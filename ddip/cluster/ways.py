"""How hosts are reached: what starts their agents, and how their engines get to the controller.

    Ssh     one ssh a host                         --hosts h1:4,h2:4
    Srun    one step a node, in jobs of Slurm's    --slurm "nodes=2", --here
    Attached  an engine of somebody else's cluster   --cluster NAME

Nothing above `Hosts` knows which one it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ddip.cluster import slurm, ssh
from ddip.cluster.attached import Attached, Attachment
from ddip.cluster.host import HostLost
from ddip.cluster.remote_host import RemoteHost
from ddip.errors import GroupError


@dataclass(frozen=True)
class Reach:
    """How hosts are reached, and what their ranks begin with."""

    directory: str | None = None
    """Where ranks begin, on every host; None: where the notebook is, if the host has that folder, else at home."""
    python: str = ""
    """Which Python the hosts take; empty: the notebook's, where they have it, else ``python3``."""
    setup: str = ""
    """A line of bash that prepares each host: ``module load cuda; source env/bin/activate``."""
    slurm: str = ""
    """The hosts are the nodes of a job that is submitted: ``nodes=2 gpus=4 time=2:00:00``, with sbatch's options."""
    here: bool = False
    """The hosts are those of the allocation that this process is in."""
    jobs: tuple[int, ...] = ()
    """Slurm's id of the job that each host is in, in their order; found."""
    cluster: str = ""
    """The hosts are those of the engines of this ipyparallel cluster: its id, profile, or connection file."""
    engines: str = ""
    """The hosts are those of a cluster that is started for the group, with this launcher of ipyparallel's."""
    profile: str = ""
    """Whose profile of IPython configures that launcher."""
    attached: Attachment | None = None
    """That cluster, and who is where; found."""

    @property
    def asked(self) -> Reach:
        """Without what was found."""
        return replace(self, jobs=(), attached=None)

    def moved(self, number: int, job: int) -> Reach:
        """With host `number` in another `job`."""
        return replace(self, jobs=(*self.jobs[:number], job, *self.jobs[number + 1 :]))

    @property
    def finds(self) -> bool:
        """Does it say where the hosts come from, whose names are not known yet?"""
        return bool(self.slurm) or self.here or bool(self.cluster) or bool(self.engines)


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
