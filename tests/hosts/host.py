"""One host: its own namespaces, with sshd as first process, and links to the bridges of the network.

network's first process (pid 1), in the namespaces of the switch: br0, br1, and each host's end of its links
|-- unshare -> h1's sshd, pid 1 there: own pid, mount, uts, ipc and net namespaces
|-- unshare -> h2's sshd ...
`-- nb's sshd: own mount, uts, ipc and net namespaces; the tests run beside it, and see the processes of all hosts
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import first_process

REPO = Path(__file__).parents[2]
FIRST = 1
"""PID of the network's first process, as the tests see it."""
PATH = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
BARE = "/run/bare/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # this Python has neither torch nor ddip
NUMBERS = {"nb": 10, "h1": 11, "h2": 12, "h3": 13}
PER_USER_FILES = ("/tmp/pytest-of-", "/tmp/torchinductor_", "/var/tmp/torchinductor_", f"{first_process.HOME}/.ipython")
"""Per-user files of pytest, torch and IPython."""


def seen_by(pid: int, path: str) -> str:
    """Return the path by which this process reaches `path` of the process `pid`."""
    return f"/proc/{pid}/root{path}"


STATE = Path(seen_by(FIRST, "/run/ddip-hosts"))
SWITCH = ("nsenter", f"--target={FIRST}", "--net", "--mount", "--uts", "--ipc", f"--wd={seen_by(FIRST, '/')}")


@dataclass(frozen=True)
class Interface:
    """An additional link of a host; without a bridge it leads nowhere, like Docker's."""

    name: str
    address: str  # with prefix length: 10.79.0.11/24
    bridge: str | None = None


DOCKER = Interface("docker0", "172.17.0.1/16")  # the same address on every host


@dataclass(frozen=True)
class Options:
    """Settings in which a host differs from the default."""

    hostname: str = ""  # the name it gives itself; other hosts still know it as h1
    names: Mapping[str, str | None] = field(default_factory=dict)  # entries of its /etc/hosts; None removes the name
    interface: str = "eth0"
    interfaces: Sequence[Interface] = ()
    sshd: Sequence[str] = ()  # lines for sshd_config
    bashrc: str = ""
    path: str = PATH  # PATH of processes that sshd starts
    environment: Mapping[str, str] = field(default_factory=dict)  # also for processes that sshd starts
    files: Mapping[str, str] = field(default_factory=dict)  # path -> text; ~ is its home folder


@dataclass(frozen=True)
class Socket:
    state: str
    local: tuple[str, int]
    remote: tuple[str, int]


class Host:
    """A host as seen from outside by the tests. Paths are paths on the host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = f"10.78.0.{NUMBERS[name]}"
        self._started: subprocess.Popen[str] | None = None
        self._others: set[int] = set()  # processes that the tests have not started

    def __repr__(self) -> str:
        return f"<host {self.name}: {'up' if self.is_up() else 'down'}>"

    # Power

    def boot(self, **options: Any) -> None:
        """Power on with new folders; `options` are those of `Options`. A running host first loses its power."""
        self.begin_boot(**options)
        self.end_boot()

    def begin_boot(self, **options: Any) -> None:
        if self.is_up():
            self.lose_power()
        self._options = Options(**options)
        kinds = ["--net", "--mount", "--uts", "--ipc"]
        if self.name != "nb":
            kinds += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*SWITCH, "unshare", *kinds, sys.executable, str(Path(first_process.__file__))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._started = subprocess.Popen(command, **pipes, text=True, env={"PATH": PATH}, start_new_session=True)

    def end_boot(self) -> None:
        started = self._started
        assert started and started.stdin and started.stdout and started.stderr
        assert started.stdout.readline(), f"{self.name} did not boot: {started.stderr.read()}"
        for interface in self._all_interfaces():
            self._plug_in(interface, started.pid)
        started.stdin.write(json.dumps(self._configuration()))
        started.stdin.close()
        pid = started.pid
        if self.name != "nb":
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        names = [interface.name for interface in self._all_interfaces()]
        self._write_state({"first": pid, "top": started.pid, "interfaces": names})
        wait_for(lambda: started.poll() is not None or self._all_sockets(), f"sshd of {self.name}")
        assert started.poll() is None, f"{self.name} did not boot: {started.stderr.read()}"
        started.stdout.close()
        started.stderr.close()
        self._write_state(
            {**self._state, "files": self._all_files(), "sockets": [asdict(found) for found in self._all_sockets()]}
        )

    def lose_power(self) -> None:
        """Kill all its processes at once; the link is cut first, so no other host is notified."""
        assert self.name != "nb", "the tests run in nb"
        state = self._state
        self.cut()
        descriptor = os.pidfd_open(state["top"])
        os.kill(state["first"], signal.SIGKILL)
        assert select.select([descriptor], [], [], 10)[0], f"{self.name} still has power"
        os.close(descriptor)
        if self._started:  # otherwise the network's first process started it
            self._started.wait()
            self._started = None
        wait_for(lambda: not self._remove_links(), f"the end of the links of {self.name}")
        self._state_file.unlink()

    def is_up(self) -> bool:
        return self._state_file.exists() and Path(f"/proc/{self.first}/ns/net").exists()

    @contextlib.contextmanager
    def booted(self, **options: Any) -> Iterator[Host]:
        """Boot with other options for the block, and with default options afterwards."""
        self.boot(**options)
        try:
            yield self
        finally:
            self.boot()

    # Links

    def cut(self) -> None:
        """Drop its frames at the switch; the host still sees its link as up."""
        run_ip_commands("".join(f"link set {link} nomaster\n" for link in self._links()))

    def mend(self) -> None:
        run_ip_commands(
            "".join(f"link set {self.name}-{i.name} master {i.bridge}\n" for i in self._all_interfaces() if i.bridge)
        )

    @contextlib.contextmanager
    def blocks(self, other: Host, ports: str = "1-65535", answer: str = "drop") -> Iterator[None]:
        """Drop new TCP connections from `other` to `ports` (nft syntax).

        With `answer="reject with tcp reset"` the other host is notified.
        """
        rule = f"ip saddr {other.address} tcp dport {{ {ports} }} tcp flags & (syn | ack) == syn {answer}"
        chain = f"chain input {{ type filter hook input priority 0; {rule}; }};"
        self.run(["nft", f"table inet from-{other.name} {{ {chain} }}"])
        try:
            yield
        finally:
            if self.is_up():
                self.run(["nft", f"delete table inet from-{other.name}"])

    @contextlib.contextmanager
    def parted_from(self, other: Host) -> Iterator[None]:
        """Drop all packets between this host and `other` during the block; both still reach all others."""
        chains = (
            f"chain {hook} {{ type filter hook {hook} priority 0; ip {end} {other.address} drop; }};"
            for hook, end in (("input", "saddr"), ("output", "daddr"))
        )
        self.run(["nft", f"table inet parted-from-{other.name} {{ {' '.join(chains)} }}"])
        try:
            yield
        finally:
            self.run(["nft", f"delete table inet parted-from-{other.name}"])

    @contextlib.contextmanager
    def slowed_to(self, rate: str) -> Iterator[None]:
        """Limit both directions of its link to `rate` (tc syntax) during the block, with a queue of 0.4 s."""
        shape = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "400ms"]
        ends = ([*SWITCH, "tc"], f"{self.name}-eth0"), (self.command(["tc"]), "eth0")
        for tc, link in ends:
            subprocess.run([*tc, "qdisc", "add", "dev", link, *shape], check=True)
        try:
            yield
        finally:
            for tc, link in ends if self.is_up() else ():
                subprocess.run([*tc, "qdisc", "del", "dev", link, "root"], check=True)

    @contextlib.contextmanager
    def losing(self, percent: int) -> Iterator[None]:
        """Drop `percent` of the packets that it receives and sends during the block."""
        chains = (
            f"chain {hook} {{ type filter hook {hook} priority 0; numgen random mod 100 < {percent} drop; }};"
            for hook in ("input", "output")
        )
        self.run(["nft", f"table inet loss {{ {' '.join(chains)} }}"])
        try:
            yield
        finally:
            if self.is_up():
                self.run(["nft", "delete table inet loss"])

    # What it runs

    def command(self, arguments: Sequence[str], folder: str = first_process.HOME) -> list[str]:
        """Return the command that runs `arguments` on this host."""
        kinds = ["--net", "--mount", "--uts", "--ipc", *(["--pid"] if self.name != "nb" else [])]
        return ["nsenter", f"--target={self.first}", *kinds, f"--wd={seen_by(self.first, folder)}", *arguments]

    def run(self, arguments: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the host as subprocess.run does, with text output; raise if it fails."""
        more = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **more}
        more["env"] = {"PATH": PATH, "HOME": first_process.HOME, **more.get("env", {})}
        check = more.pop("check", True)
        done = subprocess.run(self.command(arguments), **more)
        assert not check or not done.returncode, f"{arguments} on {self.name}: {done.returncode}\n{done.stderr}"
        return done

    def processes(self) -> list[tuple[int, str]]:
        """Return PID, as the tests see it, and command line of each process, without zombies and sshd.

        On nb, also without the process of the tests and its parents.
        """
        found = []
        for pid in self._pids():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append((pid, line))
        return found

    def _pids(self) -> list[int]:
        if not self.is_up():
            return []
        kind = "net" if self.name == "nb" else "pid"
        mine = os.readlink(f"/proc/{self.first}/ns/{kind}")
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns" / kind) == mine:
                    pids.append(int(path.name))
        return sorted({*pids} - {self.first} - (_own_and_parent_pids() if self.name == "nb" else set()))

    # What it holds

    def path(self, path: str) -> Path:
        """Return a path at which the tests can open a file of the host."""
        return Path(seen_by(self.first, path.replace("~", first_process.HOME)))

    def files(self) -> list[str]:
        """Return the files in its private folders that did not exist right after boot."""
        return sorted({*self._all_files()} - {*self._state["files"]}) if self.is_up() else []

    def sockets(self) -> list[Socket]:
        """Return TCP sockets of its processes, listening or connected, that did not exist right after boot."""
        before = [Socket(s["state"], tuple(s["local"]), tuple(s["remote"])) for s in self._state.get("sockets", ())]
        return [found for found in self._all_sockets() if found not in before] if self.is_up() else []

    def _all_files(self) -> list[str]:
        found = []
        for private in first_process.PRIVATE:
            top = self.path(private)
            device = top.stat().st_dev
            for folder, folders, files in os.walk(top):
                # Skip mounts: the Python environment, this checkout.
                folders[:] = [name for name in folders if (Path(folder) / name).lstat().st_dev == device]
                found += [os.path.join(folder, name) for name in folders + files]
        root = len(seen_by(self.first, ""))
        return [name[root:] for name in found if not name[root:].startswith(PER_USER_FILES)]

    def _all_sockets(self) -> list[Socket]:
        found = []
        for kind in ("tcp", "tcp6"):
            table = ""
            with contextlib.suppress(OSError):  # the host may just have lost its power
                table = Path(f"/proc/{self.first}/net/{kind}").read_text()
            for line in table.splitlines()[1:]:
                words = line.split()
                state = {"01": "ESTABLISHED", "02": "SYN_SENT", "08": "CLOSE_WAIT", "0A": "LISTEN"}.get(words[3])
                if state and words[9] != "0":  # a process holds it
                    found.append(Socket(state, _parse_address(words[1]), _parse_address(words[2])))
        return found

    # What is known of it by all who look at the network

    @property
    def first(self) -> int:
        """Return the PID of its first process, as the tests see it."""
        return int(self._state["first"])

    @property
    def _state_file(self) -> Path:
        return STATE / f"{self.name}.json"

    @property
    def _state(self) -> dict[str, Any]:
        assert self._state_file.exists(), f"{self.name} is down"
        return json.loads(self._state_file.read_text())  # type: ignore[no-any-return]

    def _write_state(self, state: dict[str, Any]) -> None:
        self._state_file.write_text(json.dumps(state))

    # Its start

    def _all_interfaces(self) -> list[Interface]:
        options = getattr(self, "_options", Options())
        return [Interface(options.interface, f"{self.address}/24", "br0"), *options.interfaces]

    def _links(self) -> list[str]:
        return [f"{self.name}-{name}" for name in self._state["interfaces"]]

    def _remove_links(self) -> list[str]:
        """Remove links that still exist, and return them.

        They also end with the host's namespace, some time after its processes.
        """
        present = Path("/proc/1/net/dev").read_text()
        links = [link for link in self._links() if f"{link}:" in present]
        for link in links:
            subprocess.run([*SWITCH, "ip", "link", "del", link], capture_output=True)
        return links

    def _plug_in(self, interface: Interface, pid: int) -> None:
        link = f"{self.name}-{interface.name}"
        master = f"link set {link} master {interface.bridge}\n" if interface.bridge else ""
        # The same after each boot, because other hosts cache it.
        name = "main" if interface.name == self._options.interface else interface.name
        mac = bytes([2, 0, NUMBERS[self.name], *name.encode()[-3:]]).hex(":")
        link_add = f"link add {link} type veth peer name {interface.name} address {mac} netns {pid}\n"
        run_ip_commands(f"{link_add}{master}link set {link} up\n")

    def _configuration(self) -> dict[str, Any]:
        options = self._options
        hostname = options.hostname or self.name
        names: dict[str, str | None] = {"localhost": "127.0.0.1"}
        names |= {name: f"10.78.0.{number}" for name, number in NUMBERS.items()} | dict(options.names)
        key, host_key, known = ((STATE / name).read_text() for name in ("key", "host_key", "host_key.pub"))
        files = {
            "/run/host_key": host_key,
            "~/.ssh/authorized_keys": (STATE / "key.pub").read_text(),
            "~/.ssh/known_hosts": f"* {known}",
            "~/.bashrc": options.bashrc,
            **options.files,
        }
        if self.name == "nb":
            files["~/.ssh/id_ed25519"] = key
        also = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        return {
            "hostname": hostname,
            "hosts": "".join(f"{address} {name}\n" for name, address in names.items() if address),
            "interfaces": {i.name: i.address for i in self._all_interfaces()},
            "sshd": list(options.sshd),
            "files": files,
            "environment": {**also, "PATH": options.path, **options.environment},
            "kept": sorted({str(REPO), sys.prefix, sys.base_prefix}),
            "base_python": str(Path(sys.base_prefix) / "bin"),
        }


def run_ip_commands(commands: str) -> None:
    """Run iproute2 commands, one per line, at the switch."""
    subprocess.run([*SWITCH, "ip", "-batch", "-"], input=commands, text=True, check=True)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.005)


def _own_and_parent_pids() -> set[int]:
    pids = set()
    pid = os.getpid()
    while pid:
        pids.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pids


def _parse_address(text: str) -> tuple[str, int]:
    """Parse an address of /proc/net/tcp: 32-bit words in host byte order."""
    words, _, port = text.partition(":")
    packed = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    address = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return address.removeprefix("::ffff:"), int(port, 16)
