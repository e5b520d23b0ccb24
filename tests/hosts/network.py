"""The hosts nb, h1, h2 and h3 on a bridge, in namespaces of their own: no packet leaves them.

    python -m tests.hosts.network run -- pytest tests/hosts     runs a command in nb, as root on Linux

All of it lives in one pid namespace, whose end is the end of everything in it, whatever ends this program.
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
from .host import NUMBERS, PATH, REPO, STATE, Host, ip, wait_for
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
PATIENCE = 30  # seconds, for a command that was told to end


class Network(dict[str, Host]):
    """The hosts by their names, for a process that runs in nb."""

    def __init__(self) -> None:
        super().__init__({name: Host(name) for name in NUMBERS})

    def sniffed(self) -> contextlib.AbstractContextManager[Frames]:
        return sniffed()

    def contents(self) -> dict[tuple[str, object], str]:
        """Every process, file and TCP socket beyond what belongs to the hosts, by host and pid, path or socket."""
        found: dict[tuple[str, object], str] = {}
        for name, host in self.items():
            found |= {(name, pid): f"{name}: process {pid} {line}" for pid, line in host.processes()}
            found |= {(name, thing): f"{name}: {thing}" for thing in [*host.files(), *host.sockets()]}
        return found

    def reset(self) -> None:
        """Every link is mended, and every host has power."""
        for host in self.values():
            if host.is_up():
                host.mend()
            else:
                host.boot()

    def close(self) -> None:
        """What this process has booted ends before it."""
        for host in self.values():
            if host._started and host.is_up():
                host.lose_power()


def not_possible() -> str | None:
    """Why there can be no such network on this machine."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid():
        return "network namespaces need root"
    if packages := missing_packages():
        return f"not installed: {', '.join(packages)}"
    trial = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    return f"root may not make namespaces here: {trial.stderr.strip()}" if trial.returncode else None


def can_install() -> bool:
    """Then no package may be missing. Others are told why nothing is tested, and that is no failure."""
    return sys.platform == "linux" and not os.geteuid() and bool(shutil.which("apt-get"))


def missing_packages() -> list[str]:
    """Debian's packages that are needed, and not installed."""
    return sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=PATH)})


def not_here() -> str | None:
    """Why this process does not run in nb."""
    with contextlib.suppress(PermissionError):
        if STATE.is_dir():
            return None
    return not_possible() or "not in the network of hosts: make test-hosts"


def run(command: list[str]) -> int:
    """Set everything up, run `command` in nb, end everything; returns its exit status. Fails if something is left."""
    here, there = socket.socketpair()
    first = [sys.executable, "-m", "tests.hosts.network", "switch", str(there.fileno()), str(Path.cwd()), *command]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, *first],
        cwd=REPO,
        pass_fds=[there.fileno()],
        start_new_session=True,  # the terminal's Ctrl-C comes here alone, and is told once
    )
    there.close()
    told = _forward_signals(lambda: [child.pid for child in psutil.Process(process.pid).children()])
    while not select.select([here], [], [], PATIENCE)[0]:
        if told:
            print(f"the command did not end in {PATIENCE} s", file=sys.stderr)
            process.kill()  # and with it all others
    return _end(process, here) or int(here.recv(16) or 1)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> int:
    """End everything, with the proof; returns 1 if something is left."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    spaces = {space for member in family for space in _namespaces(member.pid)} - set(_namespaces(os.getpid()))
    connection.shutdown(socket.SHUT_WR)  # pid 1 there ends, and takes all others with it
    process.wait()

    def left() -> list[str]:
        lives = [f"process {member.pid}" for member in family if member.is_running()]
        held = [f"{space} of {pid}" for pid in psutil.pids() for space in _namespaces(pid) if space in spaces]
        mounts = Path("/proc/self/mountinfo").read_text()
        links = [name for _, name in socket.if_nameindex() if name.partition("-")[0] in NUMBERS]
        return lives + held + [space for space in spaces if space in mounts] + links

    try:
        wait_for(lambda: not left(), "the end of all processes and namespaces")
    except AssertionError as error:
        print(error, *left(), sep="\n", file=sys.stderr)
        return 1
    return 0


def _namespaces(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS]
    return []


def switch(connection: socket.socket, folder: str, command: list[str]) -> None:
    """What pid 1 does: the bridges, the hosts, the command; it tells its status, and ends when everything may end."""
    pids: list[int] = []
    _forward_signals(lambda: pids)
    connection.set_inheritable(False)
    first_process.mount("tmpfs", "/run", "tmpfs", data="mode=755")  # ends with this namespace
    STATE.mkdir(mode=0o700)
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(STATE / name)], check=True)
    Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")  # the switch has no address
    ip("".join(f"link add {bridge} type bridge\nlink set {bridge} up\n" for bridge in ("br0", "br1")))
    hosts = Network()
    for host in hosts.values():
        host.begin_boot()
    for host in hosts.values():
        host.end_boot()
    started = subprocess.Popen(hosts["nb"].command(command, folder), env=_environment())
    pids.append(started.pid)
    pid, status = os.wait()
    while pid != started.pid:  # an orphan: pid 1 is the parent of all of them
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    connection.send(str(code if code >= 0 else 128 - code).encode())
    connection.recv(1)


def _environment() -> dict[str, str]:
    """That of the caller, without what leads to other places of this machine."""
    dropped = ("TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "HOME": first_process.HOME, "PATH": f"{PATH}:{os.environ.get('PATH', '')}"}


def _forward_signals(pids: Callable[[], list[int]]) -> list[int]:
    """Signals that end a program go on to the processes that `pids()` gives, and end this one where there are none yet;
    returns those that have come, as a list."""
    come: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        come.append(number)
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            for pid in pids() or sys.exit(128 + number):
                os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    return come


def main(arguments: list[str]) -> int:
    match arguments:
        case ["run", "--", *command] if command:
            if reason := not_possible():
                print(f"tests/hosts: not run: {reason}", file=sys.stderr)
                return int(can_install())
            return run(command)
        case ["missing"]:
            print(*missing_packages() if can_install() else [])
            return 0
        case ["switch", descriptor, folder, *command]:
            switch(socket.socket(fileno=int(descriptor)), folder, command)
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
