"""The machine and what it lets a process have.

Each ``check_`` function reads figures, and its ``judge_`` function decides what they mean.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ddip.cluster import ownership
from ddip.doctor import cgroups
from ddip.doctor.report import Check, failed, ok, warning
from ddip.output.sizes import size_text

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 1 << 30
"""Free, enough for a few data loader workers."""
MEMORY_BYTES, TIGHT_BYTES = 400 << 20, 1500 << 20
"""That two ranks need for themselves, and with which a small network can be trained."""
MANY_RANKS = 8
"""The limits must do for so many, or for one on each GPU."""
BOUND_THREADS = 200
"""Processes and threads that a control group should have free: those of a few ranks."""
LOOPBACK_SECONDS = 3.0


def check_platform() -> Check:
    """Operating system and cores."""
    from ddip.cluster import on_host

    text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return judge_platform(sys.platform, text, on_host.cores())


def judge_platform(name: str, text: str, cores: int) -> Check:
    """`name` is that of ``sys.platform``."""
    found = f"{text}, {cores} core{'s' if cores > 1 else ''}"
    if name == "linux":
        return ok("platform", found)
    if name == "darwin":
        return ok("platform", f"{found}; ranks are spawned, not forked, and start more slowly")
    return failed("platform", found, "use Linux or macOS; on Windows, WSL 2 is Linux")


def check_shared_memory() -> Check:
    """/dev/shm: data loader workers send batches through it."""
    if not SHARED_MEMORY.is_dir():
        return judge_shared_memory(sys.platform, None)
    usage = shutil.disk_usage(SHARED_MEMORY)
    return judge_shared_memory(sys.platform, (usage.total, usage.free))


def judge_shared_memory(name: str, figures: tuple[int, int] | None) -> Check:
    """`figures`: size and free bytes; None: there is no such folder."""
    advice = "give the container more: docker run --shm-size=8g, or a memory-backed emptyDir at /dev/shm"
    if figures is None:
        if name != "linux":
            return ok("shared-memory", "this system has no /dev/shm and needs none")
        return failed("shared-memory", "there is no /dev/shm; data loader workers cannot send batches", advice)
    total, free = figures
    found = f"/dev/shm has {size_text(total)}, {size_text(free)} free"
    if free >= SHARED_MEMORY_BYTES:
        return ok("shared-memory", found)
    if total >= 2 * SHARED_MEMORY_BYTES:
        advice = "remove what ended programs have left in /dev/shm"
    return warning("shared-memory", f"{found}; data loader workers may end with a bus error", advice)


def check_memory() -> Check:
    """RAM, and the control group's limit."""
    from ddip.cluster.limits import Limits

    figures = psutil.virtual_memory()
    return judge_memory(figures.total, figures.available, cgroups.bound("memory"), Limits.now().memory)


def judge_memory(total: int, available: int, bound: cgroups.Bound | None, address_space: float) -> Check:
    """All in bytes; `address_space` is that of ``ulimit -v``."""
    found = f"{size_text(total)}, {size_text(available)} available"
    if bound is not None and bound.limit < total:
        found += f"; the control group allows {size_text(bound.limit)}, {size_text(bound.free)} free"
        available = min(available, bound.free)
    if address_space < float("inf"):
        found += f"; ulimit -v {size_text(address_space)}"
    if available < MEMORY_BYTES:
        return failed("memory", found, "end other programs, or give the machine or container more memory")
    if available < TIGHT_BYTES:
        return warning("memory", found, "two ranks start in this, with little left for data: end other programs")
    if address_space < float("inf"):
        return warning("memory", found, "remove the limit (ulimit -v unlimited): torch reserves more than it uses")
    return ok("memory", found)


def check_limits() -> Check:
    """``ulimit -n`` and ``-u``, and the control group's number of processes, for as many ranks as there may be."""
    from ddip.cluster import devices, limits

    now, files = limits.Limits.now(), len(os.listdir("/dev/fd"))
    threads = limits.user_threads() if now.threads < limits.MANY_THREADS else 0
    ranks = max(MANY_RANKS, len(devices.gpu_names()))
    short = {n: limits.shortage(n, 0, now, files, threads) for n in (2, ranks)}
    return judge_limits(now.files, now.threads, cgroups.bound("pids"), short)


def judge_limits(files: float, threads: float, bound: cgroups.Bound | None, short: Mapping[int, str]) -> Check:
    """`short`: what is missing for a group of so many ranks, or nothing."""
    found = f"ulimit -n {_limit(files)}, -u {_limit(threads)}"
    if bound is not None:
        found += f"; the control group allows {bound.limit} processes and threads, {bound.free} free"
    fewest = next((ranks for ranks, text in sorted(short.items()) if text), None)
    if fewest is not None:
        make = failed if fewest <= 2 else warning
        what, _, advice = short[fewest].partition("; ")
        return make("limits", f"{found}; {what}", advice)
    if bound is not None and bound.free < BOUND_THREADS:
        make = failed if bound.free < BOUND_THREADS // 4 else warning
        return make("limits", found, "raise the limit of the container: docker run --pids-limit=-1")
    return ok("limits", found)


def _limit(number: float) -> str:
    return "unlimited" if number == float("inf") else f"{number:.0f}"


def check_loopback() -> Check:
    """Ranks on one host talk over it."""
    from ddip.group.host import loopback

    name = loopback()
    state = psutil.net_if_stats().get(name)
    try:
        talk_over_loopback()
        error = ""
    except OSError as raised:
        error = str(raised) or type(raised).__name__
    return judge_loopback(name, None if state is None else state.isup, error)


def judge_loopback(name: str, is_up: bool | None, error: str) -> Check:
    """`is_up` None: there is no such interface; `error`: why nothing could be sent over it, or nothing."""
    if is_up is None:
        return failed("loopback", f"there is no interface {name}", f"give the container a loopback interface {name}")
    if not is_up:
        return failed("loopback", f"the interface {name} is down", f"bring it up: ip link set {name} up")
    if error:
        advice = f"let programs connect to 127.0.0.1 over {name}: look at firewall rules and sandboxes"
        return failed("loopback", f"a connection to 127.0.0.1 fails: {error}", advice)
    return ok("loopback", f"{name} is up, and 127.0.0.1 takes connections")


def talk_over_loopback() -> None:
    """Send a word to ourselves; raises OSError."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LOOPBACK_SECONDS)
        with socket.create_connection(server.getsockname(), LOOPBACK_SECONDS) as one:
            other, _ = server.accept()
            with other:
                one.sendall(b"ddip")
                other.settimeout(LOOPBACK_SECONDS)
                if other.recv(4) != b"ddip":
                    raise OSError("what arrives is not what was sent")


def check_run_folder() -> Check:
    """Where the sockets of a group are; the folder is removed at once."""
    try:
        folder = ownership.make_run_folder()
    except OSError as error:
        advice = "set TMPDIR to a folder of yours with a short path"
        return failed("run-folder", f"there is no place for the sockets of a group: {error}", advice)
    ownership.remove_files(folder, "", "")
    return ok("run-folder", f"sockets of a group are in a folder of {folder.parent}")


def check_leftovers() -> Check:
    """Groups of this user, also those of notebooks that are gone; nothing is removed."""
    return judge_runs(ownership.runs())


def judge_runs(runs: Sequence[ownership.Run]) -> Check:
    """Those whose notebooks live are counted, the others are listed."""
    live = sum(run.owner_lives for run in runs)
    found = ["no group of another notebook runs", "1 other notebook has a group"][live] if live < 2 else ""
    found = found or f"{live} other notebooks have groups"
    dead = [run for run in runs if not run.owner_lives]
    if not dead:
        return ok("leftovers", found)
    lines = [f"{run.folder}, of process {run.owner.pid}, which ended; {_processes(run.processes)}" for run in dead]
    what = "1 run is" if len(dead) == 1 else f"{len(dead)} runs are"
    text = "\n".join([f"{what} left of notebooks that ended; {found}", *lines])
    return warning("leftovers", text, "nothing, if you start a group: the next %makedip ends and removes them")


def _processes(count: int) -> str:
    return {0: "no process of it runs", 1: "1 process of it runs"}.get(count, f"{count} processes of it run")
