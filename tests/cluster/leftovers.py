"""Find what a cluster could leave behind: processes, files, shared memory, listening sockets."""

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
    """Wait until a condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what or condition} did not come in {seconds} s"
        time.sleep(0.02)


def family_of(owner: int) -> list[psutil.Process]:
    """Return every live ddip process of the process `owner`, found by the environment it was started with."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("DDIP_OWNER") == str(owner)
            if mine and process.pid != owner and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def with_title(processes: list[psutil.Process], title: str) -> list[psutil.Process]:
    """Return the live processes whose title begins with `title`."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and " ".join(line).startswith(title):
                found.append(process)
    return found


def controllers_of(owner: int) -> list[psutil.Process]:
    """Return the controllers of `owner`, oldest first, without their heart monitors."""
    found = with_title(family_of(owner), "ddip controller")
    pids = {process.pid for process in found}
    return sorted((p for p in found if p.ppid() not in pids), key=lambda p: p.create_time())


def processes_of(owner: int) -> list[psutil.Process]:
    """Return every live process of the clusters of the process `owner`.

    This excludes the preload process while `owner` lives, which may keep it.
    """
    family = family_of(owner)
    # A new process gets its title later
    preload = [
        *with_title(family, "ddip preload process"),
        *with_title(family, " ".join(preload_client.module_command("ddip.cluster.processes.preload_server"))),
    ]
    if is_alive(owner):
        family = [process for process in family if process not in preload]
    return with_title(family, "")  # drops processes that have just ended: without a title they cannot be identified


def is_alive(pid: int) -> bool:
    """Return True if the process exists; a zombie has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def files_of(owner: int) -> list[str]:
    """Return every file of the clusters of `owner`: run folders, and ipyparallel files in its profile."""
    folders = [f for f in run_folders(Path("/tmp")) if Path(f).name.split("-")[3:4] == [str(owner)]]
    profile = Path(os.environ["IPYTHONDIR"]) / "profile_default"
    return folders + [str(path) for path in profile.glob(f"*/*ddip-{owner}-*")]


def files_and_processes_of(owner: int) -> tuple[set[str], dict[int, str]]:
    """Return every file and live process of the clusters of `owner`, with each process's title."""
    titles = {}
    for process in processes_of(owner):
        with contextlib.suppress(psutil.Error):
            titles[process.pid] = " ".join(process.cmdline())[-200:]
    return set(files_of(owner)), titles


def run_folders(*also: Path) -> list[str]:
    """Return all run folders of this user in the temporary and runtime folders, and in `also`."""
    places = {Path(tempfile.gettempdir()), *also, *(Path(p) for p in [os.environ.get("XDG_RUNTIME_DIR")] if p)}
    return sorted(str(f) for place in places for f in place.iterdir() if f.name.startswith(f"ddip-{os.getuid()}-"))


def shared_memory_files() -> set[str]:
    """Return the files in shared memory."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()


def shared_memory_of_other_processes() -> set[str]:
    """Return the shared memory files that other live processes map, such as a parallel test run.

    Includes semaphores of this process: on Python 3.14 tqdm's is a file as long as the process lives.
    """
    names, found = {}, set()
    for name in shared_memory_files():
        with contextlib.suppress(OSError):
            status = Path("/dev/shm", name).stat()
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            names[device, str(status.st_ino)] = name  # the path in the map of a semaphore is another
    for pid in psutil.pids() if names else ():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = names.get((*line.split(maxsplit=5)[3:5],), "")
                if name and (pid != os.getpid() or name.startswith("sem.")):
                    found.add(name)
    return found


def listening_addresses(processes: list[psutil.Process]) -> list[str]:
    """Return the addresses on which `processes` listen."""
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
def no_shared_memory_left() -> Iterator[None]:
    """Fail if a shared memory file is left that was not there before.

    None of our processes may be alive when the context ends.
    """
    before = shared_memory_files()
    yield
    end = time.monotonic() + 10
    while (new := shared_memory_files() - before) and (left := new - shared_memory_of_other_processes()):
        assert time.monotonic() < end, f"files of shared memory are left: {sorted(left)}"
        time.sleep(0.02)


def collection_counts(group: ddip.Group) -> list[int]:
    """Return how often each rank has collected garbage, asked over the control channel."""
    return [
        figures["collections"]
        for figures in group.ranks.call_on_control_channel(range(group.world_size), on_rank.rank_figures(), 10).values()
    ]
