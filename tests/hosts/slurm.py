"""Slurm on the hosts: the controller on nb, and two nodes; each daemon is a child of the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence

import psutil

from .host import PATH, Host, wait_for
from .network import Network

CONFIGURATION = """
ClusterName=ddip
SlurmctldHost=nb({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
SlurmdTimeout=10
SchedulerParameters=sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=8 RealMemory=2000 Gres=gpu:2\n"
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"  # both are unused
GPUS = "Name=gpu File=/run/slurm/gpu[0-1]\n"  # copies of /dev/null
MUNGED = ["munged", "--foreground", "--force", "--key-file=/run/munge.key", "--seed-file=/run/munge/seed"]
MUNGED += ["--log-file=/run/munge/log", "--pid-file=/run/munge/pid"]


def keepers() -> list[int]:
    """Return the PIDs of ddip's processes that hold a job, or make sure that it is cancelled."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if "ddip.cluster.hosts.slurm_keeper" in (process.info["cmdline"] or ())]


class Slurm:
    """A Slurm installation whose commands work on nb and in jobs; `stop` reboots the nodes."""

    def __init__(self, hosts: Network, nodes: Sequence[str] = ("h1", "h2")) -> None:
        self._hosts = hosts
        self._nodes = nodes
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._key = os.urandom(1024)

    def start(self) -> None:
        self._configure(self._hosts["nb"])
        self._run(self._hosts["nb"], "slurmctld", "-D")
        for name in self._nodes:
            self.start_node(name)
        self.wait(lambda: self.states() == dict.fromkeys(self._nodes, "idle"), "idle nodes")

    def start_node(self, name: str) -> None:
        """Start the daemons of a node, or start them again after the host has booted."""
        self._configure(self._hosts[name])
        self._run(self._hosts[name], "slurmd", "-D", "-N", name)

    def states(self) -> dict[str, str]:
        """Return the state of each node as Slurm reports it: idle, allocated, mixed, down."""
        found = self._hosts["nb"].run(["sinfo", "--noheader", "--Node", "--format=%N %T"], check=False).stdout
        return {name: state.rstrip("*") for name, state in (line.split() for line in found.splitlines())}

    def jobs(self) -> dict[int, str]:
        """Return the state of each job in the queue, by ID: PENDING, RUNNING, COMPLETING."""
        found = self._hosts["nb"].run(["squeue", "--noheader", "--format=%A %T"]).stdout
        return {int(job): state for job, state in (line.split() for line in found.splitlines())}

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition, and fail if a daemon ends meanwhile."""

        def is_fulfilled() -> object:
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"{ended} ended"
            return condition()

        try:
            wait_for(is_fulfilled, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """Return the end of each daemon's log."""
        up = [host for host in self._hosts.values() if host.is_up()]
        logs = {f"{h.name} {path.name}": path for h in up for path in sorted(h.path("/run/slurm").glob("*.log"))}
        return "\n".join(f"--- {name}\n{path.read_text()[-3000:]}" for name, path in logs.items())

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Suspend slurmctld during the block; requests that arrive meanwhile are handled afterwards."""
        (controller,) = [daemon for daemon in self._daemons if "slurmctld" in daemon.args]  # type: ignore[operator]
        controller.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            controller.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop all daemons, after ddip's keepers, which ask them."""
        wait_for(lambda: not keepers(), "the end of the keepers")
        for name in self._nodes:
            self._hosts[name].boot()
        for daemon in reversed(self._daemons):
            daemon.terminate()  # processes of the nodes have ended with them
            daemon.wait()
        nb = self._hosts["nb"]
        for path in ("/run/slurm", "/run/munge"):
            shutil.rmtree(nb.path(path))
        for path in ("/run/munge.key", *(f"/etc/slurm/{name}.conf" for name in ("slurm", "cgroup", "gres"))):
            nb.path(path).unlink()

    def _configure(self, host: Host) -> None:
        nodes = "".join(NODE.format(name=name, address=self._hosts[name].address) for name in self._nodes)
        address = self._hosts["nb"].address
        configuration = CONFIGURATION.format(address=address, nodes=nodes, names=",".join(self._nodes))
        for name, text in (("slurm", configuration), ("cgroup", CGROUP), ("gres", GPUS)):
            host.path(f"/etc/slurm/{name}.conf").write_text(text)
        for folder in ("/run/munge", "/run/slurm/state", "/run/slurm/spool"):
            host.path(folder).mkdir(parents=True)
        for number in (0, 1):
            os.mknod(host.path(f"/run/slurm/gpu{number}"), stat.S_IFCHR | 0o666, os.makedev(1, 3))
        key = host.path("/run/munge.key")
        key.touch(0o600)
        key.write_bytes(self._key)
        self._run(host, *MUNGED)
        wait_for(host.path("/run/munge/munge.socket.2").exists, f"munged of {host.name}")

    def _run(self, host: Host, *command: str) -> None:
        with host.path(f"/run/slurm/{command[0]}.log").open("ab") as log:
            variables = {"PATH": PATH}
            self._daemons.append(subprocess.Popen(host.command(command), stdout=log, stderr=log, env=variables))
