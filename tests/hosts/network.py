"""The hosts nb, h1, h2 and h3 on a bridge, in separate namespaces: no packet leaves them.

    python -m tests.hosts.network run -- pytest tests/hosts     runs a command on nb, as root on Linux

All processes live in one PID namespace, so everything ends with it, however this program ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

from . import first_process
from .host import NUMBERS, PATH, REPO, STATE, Host, run_ip_commands, wait_for
from .sniffing import Frames, sniffed

KINDS = ("net", "mnt", "uts", "ipc", "pid")
NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--net", "--uts", "--ipc")
PACKAGES = {
    "ip": "iproute2",
    "nft": "nftables",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
}
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 30  # seconds that a command has to end after a signal


class Network(dict[str, Host]):
    """The hosts by name, for a process that runs on nb."""

    def __init__(self) -> None:
        super().__init__({name: Host(name) for name in NUMBERS})

    def sniffed(self) -> contextlib.AbstractContextManager[Frames]:
        return sniffed()

    def contents(self) -> dict[tuple[str, object], str]:
        """Return every process, file and TCP socket that tests have created, by host and PID, path or socket."""
        found: dict[tuple[str, object], str] = {}
        for name, host in self.items():
            found |= {(name, pid): f"{name}: process {pid} {line}" for pid, line in host.processes()}
            found |= {(name, thing): f"{name}: {thing}" for thing in [*host.files(), *host.sockets()]}
        return found

    def restore_hosts(self) -> None:
        """Restore every link, and power on every host."""
        for host in self.values():
            if host.is_up():
                host.mend()
            else:
                host.boot()
                # the kernel remembers for a while that it did not reach the host
                wait_for(lambda host=host: can_connect(host.address, 22), f"sshd of {host.name}")

    def close(self) -> None:
        """Power off the hosts that this process has booted."""
        for host in self.values():
            if host._started and host.is_up():
                host.lose_power()


def can_connect(address: str, port: int) -> bool:
    """Return True if something listens at this port, seen from this process's host."""
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True


def why_not_possible() -> str | None:
    """Return why this machine cannot run such a network, or None."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid():
        return "network namespaces need root"
    if packages := missing_packages():
        return f"not installed: {', '.join(packages)}"
    trial = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    return f"root may not make namespaces here: {trial.stderr.strip()}" if trial.returncode else None


def can_install() -> bool:
    """Return True if missing packages can be installed, so that a missing one is an error.

    Elsewhere the tests are skipped with a reason, which is not a failure.
    """
    return sys.platform == "linux" and not os.geteuid() and bool(shutil.which("apt-get"))


def missing_packages() -> list[str]:
    """Return the required Debian packages that are not installed."""
    return sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=PATH)})


def why_not_on_nb() -> str | None:
    """Return why this process does not run on nb, or None."""
    with contextlib.suppress(PermissionError):
        if STATE.is_dir():
            return None
    return why_not_possible() or "not in the network of hosts: make test-hosts"


def run_on_nb(command: list[str]) -> int:
    """Boot everything, run `command` on nb, and end everything; return the command's exit status.

    Fails if anything is left.
    """
    own_end, switch_end = socket.socketpair()
    first = [sys.executable, "-m", "tests.hosts.network", "switch", str(switch_end.fileno()), str(Path.cwd()), *command]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, *first],
        cwd=REPO,
        pass_fds=[switch_end.fileno()],
        start_new_session=True,  # Ctrl-C of the terminal reaches only this process, which forwards it once
    )
    switch_end.close()
    received = _forward_signals(lambda: [child.pid for child in psutil.Process(process.pid).children()])
    while not select.select([own_end], [], [], PATIENCE)[0]:
        if received:
            print(f"the command did not end in {PATIENCE} s", file=sys.stderr)
            process.kill()  # ends all other processes as well
    return _end_everything(process, own_end) or int(own_end.recv(16) or 1)


def _end_everything(process: subprocess.Popen[bytes], connection: socket.socket) -> int:
    """End everything and prove it; return 1 if anything is left."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    spaces = {space for member in family for space in _namespaces(member.pid)} - set(_namespaces(os.getpid()))
    connection.shutdown(socket.SHUT_WR)  # the namespace's PID 1 ends, and all others with it
    process.wait()

    def leftovers() -> list[str]:
        live_processes = [f"process {member.pid}" for member in family if member.is_running()]
        held = [f"{space} of {pid}" for pid in psutil.pids() for space in _namespaces(pid) if space in spaces]
        mounts = Path("/proc/self/mountinfo").read_text()
        links = [name for _, name in socket.if_nameindex() if name.partition("-")[0] in NUMBERS]
        return live_processes + held + [space for space in spaces if space in mounts] + links

    try:
        wait_for(lambda: not leftovers(), "the end of all processes and namespaces")
    except AssertionError as error:
        print(error, *leftovers(), sep="\n", file=sys.stderr)
        return 1
    return 0


def _namespaces(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS]
    return []


def run_switch(connection: socket.socket, folder: str, command: list[str]) -> None:
    """Run PID 1 of the network: create bridges and hosts, run the command, and report its status.

    It ends when everything may end.
    """
    pids: list[int] = []
    _forward_signals(lambda: pids)
    connection.set_inheritable(False)
    first_process.mount("tmpfs", "/run", "tmpfs", data="mode=755")  # ends with this namespace
    STATE.mkdir(mode=0o700)
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(STATE / name)], check=True)
    Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")  # the switch needs no address
    run_ip_commands("".join(f"link add {bridge} type bridge\nlink set {bridge} up\n" for bridge in ("br0", "br1")))
    hosts = Network()
    for host in hosts.values():
        host.begin_boot()
    for host in hosts.values():
        host.end_boot()
    started = subprocess.Popen(hosts["nb"].command(command, folder), env=_environment_for_nb())
    pids.append(started.pid)
    pid, status = os.wait()
    while pid != started.pid:  # an orphan, of which PID 1 is the parent
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    connection.send(str(code if code >= 0 else 128 - code).encode())
    connection.recv(1)


def _environment_for_nb() -> dict[str, str]:
    """Return the caller's environment without variables that point to other folders of this machine."""
    dropped = ("TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "HOME": first_process.HOME, "PATH": f"{PATH}:{os.environ.get('PATH', '')}"}


def _forward_signals(pids: Callable[[], list[int]]) -> list[int]:
    """Forward signals that end a program to `pids()`; return the list that records them.

    If `pids()` is empty, the signal ends this program.
    """
    signals_received: list[int] = []

    def forward_signal(number: int, frame: FrameType | None) -> None:
        signals_received.append(number)
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            for pid in pids() or sys.exit(128 + number):
                os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward_signal)
    return signals_received


def main(arguments: list[str]) -> int:
    match arguments:
        case ["run", "--", *command] if command:
            if reason := why_not_possible():
                print(f"tests/hosts: not run: {reason}", file=sys.stderr)
                return int(can_install())
            return run_on_nb(command)
        case ["missing"]:
            print(*missing_packages() if can_install() else [])
            return 0
        case ["switch", descriptor, folder, *command]:
            run_switch(socket.socket(fileno=int(descriptor)), folder, command)
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
