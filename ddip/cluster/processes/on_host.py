"""What can be known, and done, on the host of a rank from outside of the rank's process.

Called here for ranks that are beside the notebook, and by a host's agent for those of other hosts: what goes in and
comes out is JSON.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import psutil

from ddip.cluster import devices
from ddip.cluster.processes import processes, tcp_tables
from ddip.cluster.processes.exit_diagnosis import HostMemory
from ddip.cluster.processes.processes import end_processes, existing
from ddip.protocol import dump

SIGNAL_SECONDS = 0.3
"""How long a rank that does not answer may take to write down where it is."""
REACH_SECONDS = 4.0
"""For a TCP connection to another host, which the kernel tries again after 1 s and 3 s."""
ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way to it is the default route."""


class Facts(TypedDict):
    """What a host is, and has, when its ranks are to be placed."""

    hostname: str
    cores: int
    """That a process may use."""
    gpus: list[str]
    """As ``CUDA_VISIBLE_DEVICES`` would name them."""
    directory: str
    """Where its ranks begin."""
    path: list[str]
    """``sys.path`` of its ranks."""
    python: str
    """Version."""
    torch: str
    """Version; empty: it has none."""
    ddip: str
    """Version."""


def facts() -> Facts:
    """Of this host, and this process's environment."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {
        "hostname": socket.gethostname(),
        "cores": cores(),
        "gpus": devices.gpu_names(),
        "directory": directory(),
        "path": list(sys.path),
        "python": platform.python_version(),
        "torch": torch,
        "ddip": sys.modules["ddip"].__version__,
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def directory() -> str:
    """Where this process is, for new ranks."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        return "/"


# -- a rank's process


def connections(pids: Sequence[int]) -> list[list[list[Any]]]:
    """Both ends of each TCP connection of each process; none of one that has ended."""
    return tcp_tables.connections(pids)


def ports_of(pid: int) -> list[tuple[int, int]]:
    """Both ports, its own first, of each TCP connection of a process and its children."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)]:
            found += [(c.laddr.port, c.raddr.port) for c in process.net_connections("tcp") if c.raddr]
    return found


def place(pid: int, run_folder: str) -> dict[str, Any] | None:
    """The `StackLocation` of a rank that cannot answer; None if it does not even take a signal."""
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
            if text and text == former:  # it is written piece by piece
                return asdict(dump.place_in(text))
    except OSError:
        pass  # it has ended just now, or is on a system without such a signal
    return None


def stopped_text(pid: int) -> str:
    """What to say of a process that a signal or a debugger has stopped; empty for one that runs, or has ended."""
    return processes.stopped_text(pid)


def carry_on(pids: Sequence[int]) -> None:
    """Continue those that a signal has stopped."""
    for pid in pids:
        if processes.stopped_text(pid):
            send_signal(pid, signal.SIGCONT)


def send_signal(pid: int, number: int) -> None:
    """To a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def memory(pids: Sequence[int]) -> list[int | None]:
    """That each process holds, bytes; None if it has ended."""
    found: list[int | None] = []
    for pid in pids:
        held = None
        with contextlib.suppress(psutil.Error):
            held = int(psutil.Process(pid).memory_info().rss) or None  # of a zombie nothing is known
        found.append(held)
    return found


def host_memory() -> list[int]:
    """The fields of `HostMemory`, now."""
    now = HostMemory.now()
    return [now.total, now.available, now.kills]


def end(pids: Sequence[int]) -> None:
    """End processes, each the leader of a session, and all that they started."""
    end_processes(existing(pids))


def uses(pids: Sequence[int]) -> list[tuple[float, bool] | None]:
    """Seconds of CPU that each process and its children have used, and whether one of them runs; None: it ended."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    found: list[tuple[float, bool] | None] = []
    for pid in pids:
        use = None
        with contextlib.suppress(psutil.Error):
            family = list(_family(psutil.Process(pid), children))
            use = sum(map(_seconds, family)), any(map(_runs, family))
        found.append(use)
    return found


def _family(process: psutil.Process, children: dict[int, list[psutil.Process]]) -> Iterator[psutil.Process]:
    yield process
    for child in children.get(process.pid, ()):
        yield from _family(child, children)


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    return False


# -- its run folder


WithFile: TypeAlias = "Callable[[str], None]"


def modules(run_folder: Path) -> Path:
    """Where modules of the notebook lie, on other hosts; ranks there look for modules there first."""
    return run_folder / "modules"


def ensure_private(folder: str) -> None:
    """Make a folder that only this user can enter, or make it so."""
    path = Path(folder)
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o700)


def poison(store: str) -> None:
    """Replace the file `store` by a link to itself: whoever waits for a key in it fails with "too many links" now.

    ``FileStore`` would wait for a file that is missing, and no thread can interrupt it.
    """
    path = Path(store)
    loop = path.with_name(f"{path.name}-broken")
    with contextlib.suppress(OSError):  # the run folder is gone, and every rank with it
        loop.unlink(missing_ok=True)
        loop.symlink_to(path)
        loop.replace(path)


def remove(file: str) -> None:
    """Remove a file of the run folder, if it is there."""
    with contextlib.suppress(OSError):
        Path(file).unlink(missing_ok=True)


# -- its network


def route(address: str) -> tuple[str, str]:
    """The address by which this host talks to `address`, and the interface that has it; empty if there is no way.

    Nothing is sent: the kernel is asked for the route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            ours = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    names = [name for name, all_ in psutil.net_if_addrs().items() if any(_plain(a.address) == ours for a in all_)]
    return ours, names[0] if names else ""


def reach(address: str, port: int) -> str:
    """Why no TCP connection to a port of another host can be made; empty if it can."""
    try:
        socket.create_connection((address, port), REACH_SECONDS).close()
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)
    return ""


def _plain(address: str) -> str:
    """Without the interface that an IPv6 address may name."""
    return address.partition("%")[0]


_held: dict[int, int] = {}
"""Descriptors of ports, which stay bound until they are released."""


def hold_port(former: int = 0) -> int:
    """A TCP port for programs that want a MASTER_PORT, held in place of a `former` one; the group needs none.

    It is bound and never listened on, so the kernel gives it to nobody else, while a listener with ``SO_REUSEADDR``,
    as every rendezvous of torch is, may take it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))  # all addresses: a rendezvous listens on all of them
    number = int(holder.getsockname()[1])
    _held[number] = holder.detach()
    release_port(former)
    return number


def release_port(number: int) -> None:
    """It may be given to others."""
    holder = _held.pop(number, None)
    if holder is not None:
        os.close(holder)
