"""How hosts are reached: what starts their agents, and how their engines get to the controller.

A way speaks of hosts by their number and name. `Hosts` asks it; nothing above knows which one it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddip.cluster import ssh
from ddip.cluster.host import Host


@dataclass(frozen=True)
class Reach:
    """How hosts are reached, and what their ranks begin with."""

    directory: str | None = None
    """Where ranks begin, on every host; None: where the notebook is, if the host has that folder, else at home."""
    python: str = ""
    """Which Python the hosts take; empty: the notebook's, where they have it, else ``python3``."""
    setup: str = ""
    """A line of bash that prepares each host: ``module load cuda; source env/bin/activate``."""


class Way(Protocol):
    """To the hosts of one cluster."""

    def command(self, number: int, name: str) -> list[str]:
        """What starts the agent of host `number`, and talks with it on stdin and stdout."""

    def why_lost(self, name: str, said: str) -> str:
        """What to tell the user of a host whose agent did not start, but `said` something."""

    def connect(self, number: int, host: Host, engine_file: Path) -> dict[str, Any]:
        """Let engines of `host` reach the controller, which has written `engine_file`; returns what they are told
        of it instead. Raises GroupError."""

    def close(self) -> None:
        """Give back what was taken to reach the hosts, once their agents have ended."""


class Ssh:
    """One ssh a host, started by this process; the controller's sockets, which are files, go with it."""

    def __init__(self, reach: Reach, run_folder: Path) -> None:
        self._reach = reach
        self._run_folder = run_folder

    def command(self, number: int, name: str) -> list[str]:
        """What starts the agent of host `number`."""
        self._control(number).unlink(missing_ok=True)  # of a host that was lost
        return ssh.command(name, self._control(number), self._reach.python, self._reach.setup)

    def why_lost(self, name: str, said: str) -> str:
        """What to tell the user."""
        return ssh.reason(name, said, self._reach.python)

    def connect(self, number: int, host: Host, engine_file: Path) -> dict[str, Any]:
        """Forward the controller's sockets into the run folder of `host`."""
        told: dict[str, Any] = json.loads(engine_file.read_text())
        here = Path(told["interface"].removeprefix("ipc://"))
        there = host.run_folder / here.name
        sockets = {Path(f"{there}:{port}"): Path(f"{here}:{port}") for port in sorted(ports(told))}
        ssh.forward(host.name, self._control(number), sockets)
        return {**told, "interface": f"ipc://{there}"}

    def close(self) -> None:
        """There is nothing to give back."""

    def _control(self, number: int) -> Path:
        return self._run_folder / f"ssh-{number}"


def of(reach: Reach, run_folder: Path) -> Way:
    """The way that `reach` means."""
    return Ssh(reach, run_folder)


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
