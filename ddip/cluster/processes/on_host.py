"""Inspect and control a rank's process, its run folder and its network from outside, on the rank's host.

The notebook calls these functions for ranks on its own host, and a host's agent calls them for ranks on other hosts.
So arguments and results must fit into JSON.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import psutil

from ddip.cluster import devices
from ddip.cluster.processes import processes
from ddip.cluster.processes.exit_diagnosis import HostMemory
from ddip.cluster.processes.processes import end_processes, find_existing
from ddip.protocol import dump
from ddip.protocol.old_versions import tcp_connections

MOST_TRIES = 4096
"""Number of connections that the kernel accepts at an open port."""
SIGNAL_SECONDS = 0.3
"""Time that a rank that does not answer may take to dump its stack."""
TRY_SECONDS = 1.0
"""Time limit of one attempt to connect to another host, since the kernel repeats it only after 1 s, 3 s and 7 s."""
PAUSE_SECONDS = 0.1
"""Pause between two such attempts."""
NO_ADDRESS = "that host has lost the address"
"""Error of a connection to a host that could not open a port."""
ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737), so that its route is the default route."""


class Facts(TypedDict):
    """Name, hardware and software of a host, as far as the placement of ranks needs them."""

    hostname: str
    cores: int
    """Number of cores that a process may use."""
    gpus: list[str]
    """GPU names as in ``CUDA_VISIBLE_DEVICES``."""
    directory: str
    """Working directory of its ranks."""
    path: list[str]
    """``sys.path`` of its ranks."""
    python: str
    """Python version."""
    torch: str
    """torch version; empty if there is no torch."""
    ddip: str
    """ddip version."""


def collect_facts() -> Facts:
    """Return the facts of this host and of this process's environment."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {
        "hostname": socket.gethostname(),
        "cores": count_cores(),
        "gpus": devices.gpu_names(),
        "directory": working_directory(),
        "path": list(sys.path),
        "python": platform.python_version(),
        "torch": torch,
        "ddip": sys.modules["ddip"].__version__,
    }


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def working_directory() -> str:
    """Return this process's working directory, where new ranks begin; ``/`` if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


# -- a rank's process


def list_connections(pids: Sequence[int]) -> list[list[list[Any]]]:
    """Return the TCP connections of each process, in order: own address and port, then the other's.

    The list of a process that has ended is empty.
    """
    return [_connections_of(pid) for pid in pids]


def _connections_of(pid: int) -> list[list[Any]]:
    with contextlib.suppress(psutil.Error):
        pairs = [(c.laddr, c.raddr) for c in tcp_connections(psutil.Process(pid)) if c.raddr]
        # an IPv6 socket may have IPv4 addresses
        return [[part for end in pair for part in (end.ip.removeprefix("::ffff:"), end.port)] for pair in pairs]
    return []


def ports_of(pid: int) -> list[tuple[int, int]]:
    """Return the local and the remote port of each TCP connection of a process and its descendants.

    Empty if the process has ended.
    """
    found: list[tuple[int, int]] = []
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)]:
            found += [(ours, theirs) for _, ours, _, theirs in _connections_of(process.pid)]
    return found


def stack_location(pid: int, run_folder: str) -> dict[str, Any] | None:
    """Return the fields of the `StackLocation` of a rank that cannot answer.

    The rank dumps its stack on a signal, and this function waits up to SIGNAL_SECONDS for that. None if the rank does
    not react to that either, or has ended.
    """
    stopped = processes.stopped_text(pid)
    if stopped:
        return {"inner": stopped, "state": "stopped"}
    if dump.SIGNAL is None:
        return None
    path = dump.file_of(Path(run_folder), pid)
    try:
        before = path.stat().st_size
        os.kill(pid, dump.SIGNAL)
        deadline = time.monotonic() + SIGNAL_SECONDS
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            former, text = text, path.read_bytes()[before:].decode(errors="replace")
            if text and text == former:  # the dump is written in pieces, and is now complete
                return asdict(dump.place_in(text))
    except OSError:
        pass  # the rank has just ended, or has not opened its dump file
    return None


def stopped_text(pid: int) -> str:
    """Describe a process that a signal or a debugger has stopped, with a remedy; empty for others."""
    return processes.stopped_text(pid)


def carry_on(pids: Sequence[int]) -> None:
    """Continue the processes among `pids` that are stopped."""
    for pid in pids:
        if processes.stopped_text(pid):
            send_signal(pid, signal.SIGCONT)


def send_signal(pid: int, number: int) -> None:
    """Send the signal `number` to a process, if it has not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def resident_memory(pids: Sequence[int]) -> list[int | None]:
    """Return the resident memory of each process in bytes; None for one that has ended."""
    found: list[int | None] = []
    for pid in pids:
        held = None
        with contextlib.suppress(psutil.Error):
            held = int(psutil.Process(pid).memory_info().rss) or None  # 0 for a zombie
        found.append(held)
    return found


def host_memory() -> list[int]:
    """Return the current fields of `HostMemory`: total, available, kills."""
    now = HostMemory.now()
    return [now.total, now.available, now.kills]


def end_sessions(pids: Sequence[int]) -> None:
    """End processes, each the leader of a session, and all processes that they started.

    Waits until they have ended.
    """
    end_processes(find_existing(pids))


def cpu_usage(pids: Sequence[int]) -> list[tuple[float, bool] | None]:
    """Return the CPU seconds of each process with its descendants, and whether any of these is running.

    None for a process that has ended.
    """
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    found: list[tuple[float, bool] | None] = []
    for pid in pids:
        use = None
        with contextlib.suppress(psutil.Error):
            family = list(_with_descendants(psutil.Process(pid), children))
            use = sum(map(_cpu_seconds, family)), any(map(_is_running, family))
        found.append(use)
    return found


def _with_descendants(process: psutil.Process, children: dict[int, list[psutil.Process]]) -> Iterator[psutil.Process]:
    yield process
    for child in children.get(process.pid, ()):
        yield from _with_descendants(child, children)


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    return False


# -- its run folder


WithFile: TypeAlias = "Callable[[str], None]"


def modules_folder(run_folder: Path) -> Path:
    """Return the folder for copies of the notebook's modules on another host.

    It comes first on ``sys.path`` of the ranks there.
    """
    return run_folder / "modules"


def ensure_private(folder: str) -> None:
    """Create `folder` if it is missing, and let only this user enter it."""
    path = Path(folder)
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o700)


def poison_store(store: str) -> None:
    """Replace the file `store` with a link to itself, so that waits for a key in it fail.

    They fail with "too many links". If the file were missing, torch's ``FileStore`` would wait for it, and no thread
    can interrupt that wait.
    """
    path = Path(store)
    loop = path.with_name(f"{path.name}-broken")
    with contextlib.suppress(OSError):  # the run folder was removed, and every rank has ended
        loop.unlink(missing_ok=True)
        loop.symlink_to(path)
        loop.replace(path)


def remove_file(file: str) -> None:
    """Remove a file of the run folder, if it exists."""
    with contextlib.suppress(OSError):
        Path(file).unlink(missing_ok=True)


# -- its network


def find_route(address: str) -> tuple[str, str]:
    """Return this host's own address on the route to `address`, and its interface.

    Both are empty if there is no route. Nothing is sent: the kernel looks up the route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            ours = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    names = [
        name for name, all_ in psutil.net_if_addrs().items() if any(_without_interface(a.address) == ours for a in all_)
    ]
    return ours, names[0] if names else ""


def try_connections(targets: Sequence[tuple[str, int]], seconds: float) -> list[str]:
    """Connect in parallel to `targets`, addresses and ports of other hosts; return the errors in order.

    The error is empty if the connection succeeded. Each is tried for up to `seconds`.
    """
    if not targets:
        return []
    with ThreadPoolExecutor(len(targets)) as pool:
        return list(pool.map(lambda target: _try_connection(target[0], target[1], seconds), targets))


def _try_connection(address: str, port: int, seconds: float) -> str:
    if not port:
        return NO_ADDRESS
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), min(TRY_SECONDS, max(0.1, deadline - time.monotonic()))).close()
            return ""
        except ConnectionRefusedError as error:  # by a firewall: the host has been reached
            return str(error.strerror)
        except OSError as error:
            if time.monotonic() + PAUSE_SECONDS > deadline:
                return "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)
        time.sleep(PAUSE_SECONDS)


def _without_interface(address: str) -> str:
    """Strip the interface that an IPv6 address may name."""
    return address.partition("%")[0]


_held_ports: dict[int, int] = {}
"""Descriptors of the bound sockets, by port, until the ports are released."""


def hold_port(former: int = 0) -> int:
    """Reserve and return a free TCP port for programs that need a MASTER_PORT; release the `former` one.

    The port is bound but not listened on. So the kernel assigns it to no other socket, but a listener with
    ``SO_REUSEADDR``, such as a torch rendezvous, can use it. The group itself needs no port.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))  # all addresses: a rendezvous listens on all of them
    number = int(holder.getsockname()[1])
    _held_ports[number] = holder.detach()
    release_port(former)
    return number


def open_port(address: str) -> int:
    """Listen at a free port of `address` for the connections of `try_connections`, and return the port.

    It is open until `release_port`. Returns 0 if this host has lost the address; raises other OSErrors.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=MOST_TRIES)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return 0
    number = int(listener.getsockname()[1])
    _held_ports[number] = listener.detach()
    return number


def release_port(number: int) -> None:
    """Release a reserved port; do nothing if it is not reserved."""
    holder = _held_ports.pop(number, None)
    if holder is not None:
        os.close(holder)
