"""The ways to reach hosts: the commands that start their agents, and the relay from their engines to the controller.

    Ssh       one ssh per host                         --hosts h1:4,h2:4
    Srun      one step per node, in Slurm jobs         --slurm "nodes=2", --here
    Attached  an engine of an existing cluster         --cluster NAME

The code above `Hosts` does not know which one is used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

from ddip.cluster import ssh
from ddip.cluster.attach.attached import GONE
from ddip.cluster.hosts import slurm
from ddip.cluster.hosts.remote_host import RemoteHost
from ddip.cluster.processes.host import HostLost
from ddip.cluster.reach import Attachment, Reach
from ddip.errors import GroupError

SSH_FAILED = 255
"""Exit code of ssh if it failed itself, rather than the command that it ran."""


class Way(Protocol):
    """A way to reach the hosts of one cluster."""

    def command(self, number: int, name: str) -> list[str]:
        """Return the command that starts the agent of host `number`, and connects stdin and stdout to it.

        `name`: the user's or the scheduler's name for the host.
        """

    def is_relayed(self, name: str) -> bool:
        """Return True if a relay stands between this machine and host `name`.

        A relay hides a lost connection, so both ends need beats.
        """
        return False  # srun and ipyparallel notice a lost host themselves

    def explain_failure(self, host: RemoteHost) -> str:
        """Explain why the agent of `host` did not start, or has not started yet."""


class Ssh(Way):
    """Start agents by ssh, one ssh per host, as children of this process."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def command(self, number: int, name: str) -> list[str]:
        """Return the ssh command that starts the agent of the host `name`."""
        return ssh.agent_command(name, self._reach.python, self._reach.setup)

    def is_relayed(self, name: str) -> bool:
        """Return True if ssh reaches host `name` through a ProxyJump or ProxyCommand."""
        return ssh.has_proxy(name)

    def explain_failure(self, host: RemoteHost) -> str:
        """Explain why the agent of `host` did not start, or has not started yet, from the output of ssh."""
        if not host.shell_has_run and host.exit_code not in (SSH_FAILED, -signal.SIGKILL):  # a cut link: ddip kills ssh
            last = host.output_text.rpartition("\n")[2]
            why = ssh.NOT_BEGUN.format(host=host.name) if host.exit_code is None else ssh.NOT_RUN
            return f"{host.name}: {why}" + (f" (its last output: {last!r})" if last else "")
        return _explain_output(host, self._reach.python, self._reach.setup)


class Srun(Way):
    """Start agents by srun, one step per node in the node's Slurm job."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def command(self, number: int, name: str) -> list[str]:
        """Return the srun command that starts the agent of node `number`, called `name`.

        Asks Slurm for the GPUs of the node. Raises GroupError or SlurmUnavailable.
        """
        unset = [word for variable in slurm.step_variables(os.environ) for word in ("-u", variable)]
        line = ssh.agent_line(self._reach.python, self._reach.setup)
        return ["env", *unset, *slurm.step_command(self._reach.jobs[number], name), "sh", "-c", line]

    def explain_failure(self, host: RemoteHost) -> str:
        """Explain why the agent of the node `host` has not started, from the output of srun."""
        return _explain_output(host, self._reach.python, self._reach.setup, "srun has ended; its job may be over")


class Attached(Way):
    """Start agents through engines of an ipyparallel cluster.

    One local process per host talks to one engine (``near_end.py``).
    """

    def __init__(self, attachment: Attachment, python: str, setup: str) -> None:
        self._attachment, self._python, self._setup = attachment, python, setup

    def command(self, number: int, name: str) -> list[str]:
        """Return the command of the local process that starts the agent of host `number` (``near_end.py``)."""
        seat = self._attachment.seats[number]
        python = self._python or ("" if self._setup else seat.python)
        engines = json.dumps(seat.engines)
        ours = [sys.executable, "-P", "-m", "ddip.cluster.attach.near_end"]
        return [*ours, self._attachment.file, engines, python, self._setup]

    def explain_failure(self, host: RemoteHost) -> str:
        """Explain the output of the local process, and name the engines' Python if the user chose none."""
        if GONE in host.output_text:
            last = host.output_text.strip().rpartition("\n")[2]
            return f"{host.name}: {last}; start that cluster again, then type %makedip -r"
        python = next((seat.python for seat in self._attachment.seats if seat.name == host.name), "")
        reason = _explain_output(host, self._python, self._setup)
        return reason if self._python or self._setup else f"{reason} (the Python of its engines is {python})"


def _explain_output(host: RemoteHost, python: str, setup: str, without_output: str = "") -> str:
    """Explain why the agent of `host` has not started, from the output of its command.

    `without_output` is the explanation if there is none. The other arguments are those of ``ssh.agent_command``.
    """
    if host.exit_code is None:
        return f"{host.name}: it has not answered in time; -t SECONDS waits longer"
    return ssh.explain_failure(host.name, host.output_text or without_output, python, setup)


def choose_way(reach: Reach) -> Way:
    """Return the way to the hosts of `reach`."""
    if reach.attached is not None:
        return Attached(reach.attached, reach.python, reach.setup)
    return Srun(reach) if reach.jobs else Ssh(reach)


def relay_controller(host: RemoteHost, engine_file: Path) -> dict[str, Any]:
    """Relay the controller's sockets to `host`, and return the connection information for engines there.

    `engine_file`: the controller's connection file for engines. Raises GroupError.
    """
    info: dict[str, Any] = json.loads(engine_file.read_text())
    local_path = info["interface"].removeprefix("ipc://")
    remote_path = f"{host.run_folder}/{Path(local_path).name}"
    try:
        host.relay({f"{remote_path}:{port}": f"{local_path}:{port}" for port in _port_numbers(info)})
    except (HostLost, RuntimeError) as error:
        raise GroupError(f"{host.name}: the controller's sockets cannot be created there: {error}") from None
    return {**info, "interface": f"ipc://{remote_path}"}


def _port_numbers(connection_info: dict[str, Any]) -> list[int]:
    """Return the port numbers in the controller's connection information: values, or items of a list."""
    entries = [entry if isinstance(entry, list) else [entry] for entry in connection_info.values()]
    return [number for entry in entries for number in entry if isinstance(number, int)]
