"""What a cluster could leave behind: processes, files, shared memory, listening sockets."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import ddip
from ddip.cluster.processes import preload_client
from ddip.protocol import on_rank
from ddip.protocol.old_versions import tcp_connections


def wait_until(condition: Callable[[], object], seconds: float = 90, what: str = "") -> None:
    """Wait for a condition; fails when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what or condition} did not come in {seconds} s"
        time.sleep(0.02)


def family_of(owner: int) -> list[psutil.Process]:
    """Every live process that the process `owner` has for ddip, known by the environment that it was started with."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("DDIP_OWNER") == str(owner)
            if mine and process.pid != owner and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def titled(processes: list[psutil.Process], title: str) -> list[psutil.Process]:
    """Those of `processes` that live, and whose title begins with `title`."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and " ".join(line).startswith(title):
                found.append(process)
    return found


def controllers_of(owner: int) -> list[psutil.Process]:
    """The controllers of `owner`, the oldest first, without their heart monitors."""
    found = titled(family_of(owner), "ddip controller")
    pids = {process.pid for process in found}
    return sorted((p for p in found if p.ppid() not in pids), key=lambda p: p.create_time())


def processes_of(owner: int) -> list[psutil.Process]:
    """Return every live process of the clusters of the process `owner`.

    That is all of its family, but for the preload process while `owner` lives, which may then keep it.
    """
    family = family_of(owner)
    warm = [
        *titled(family, "ddip preload process"),
        *titled(family, " ".join(preload_client.command("ddip.cluster.processes.preload_server"))),
    ]  # its title comes later
    if lives(owner):
        family = [process for process in family if process not in warm]
    return titled(family, "")  # one that has ended meanwhile has no title, by which to tell what it was


def lives(pid: int) -> bool:
    """Is there such a process? A zombie has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def files_of(owner: int) -> list[str]:
    """Every file of the clusters of the process `owner`: run folders, and ipyparallel's files in its profile."""
    folders = [f for f in run_folders(Path("/tmp")) if Path(f).name.split("-")[3:4] == [str(owner)]]
    profile = Path(os.environ["IPYTHONDIR"]) / "profile_default"
    return folders + [str(path) for path in profile.glob(f"*/*ddip-{owner}-*")]


def all_of(owner: int) -> tuple[set[str], dict[int, str]]:
    """Every file and live process of the clusters of the process `owner`, each process with its title."""
    titles = {}
    for process in processes_of(owner):
        with contextlib.suppress(psutil.Error):
            titles[process.pid] = " ".join(process.cmdline())[-200:]
    return set(files_of(owner)), titles


def run_folders(*also: Path) -> list[str]:
    """The run folders of all clusters of this user where these tests have them, and in the folders `also`."""
    places = {Path(tempfile.gettempdir()), *also, *(Path(p) for p in [os.environ.get("XDG_RUNTIME_DIR")] if p)}
    return sorted(str(f) for place in places for f in place.iterdir() if f.name.startswith(f"ddip-{os.getuid()}-"))


def shared_memory() -> set[str]:
    """Files in shared memory."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()


def shared_memory_of_others() -> set[str]:
    """Those of them that a live process has, other than this one: a neighbour on this machine."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid():
                paths = [Path(region.path.removesuffix(" (deleted)")) for region in process.memory_maps()]
                found |= {path.name for path in paths if path.parent == Path("/dev/shm")}
    return found


def listening(processes: list[psutil.Process]) -> list[str]:
    """Addresses on which `processes` listen."""
    sockets = [c for p in processes for c in tcp_connections(p, "inet") if c.status == psutil.CONN_LISTEN]
    return sorted({c.laddr.ip for c in sockets})


def assert_nothing_left(owner: int, seconds: float = 60) -> None:
    """Fail unless every process and file of the clusters of `owner` is gone within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and (processes_of(owner) or files_of(owner)):
        time.sleep(0.05)
    assert [(p.pid, p.cmdline()) for p in processes_of(owner)] == []
    assert files_of(owner) == []


@contextlib.contextmanager
def same_shared_memory() -> Iterator[None]:
    """Fail if a file in shared memory is left that was not there before; when this ends, nothing of ours may live."""
    before = shared_memory()
    yield

    def no_more() -> bool:
        new = shared_memory() - before
        return not new or new <= shared_memory_of_others()

    wait_until(no_more, 10, "the end of the shared memory files")


def collections(group: ddip.Group) -> list[int]:
    """How often each rank has collected so far, asked beside its cells."""
    return [
        figures["collections"]
        for figures in group.ranks.call_on_control_channel(range(group.world_size), on_rank.figures(), 10).values()
    ]
