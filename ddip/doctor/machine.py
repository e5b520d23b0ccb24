"""Checks of the machine and of the resources that it gives to a process."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ddip.cluster.processes import ownership
from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.output.tables.tables import size_text

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 1 << 30
"""Free space that is enough for a few data loader workers."""
MEMORY_BYTES, TIGHT_BYTES = 400 << 20, 1500 << 20
"""Memory that two ranks need for themselves, and with which a small network can be trained."""
MANY_RANKS = 8
"""Number of ranks that the limits must suffice for, unless there are more GPUs."""
BOUND_THREADS = 200
"""Processes and threads that a control group should have free, enough for a few ranks."""
LOOPBACK_SECONDS = 3.0


def check_shared_memory() -> Check:
    """Check the space in /dev/shm, through which data loader workers send batches."""
    advice = "give the container more: docker run --shm-size=8g, or a memory-backed emptyDir at /dev/shm"
    if not SHARED_MEMORY.is_dir():
        if sys.platform != "linux":
            return ok("shared-memory", "this system has no /dev/shm and needs none")
        return failed("shared-memory", "there is no /dev/shm; data loader workers cannot send batches", advice)
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"/dev/shm has {size_text(usage.total)}, {size_text(usage.free)} free"
    if usage.free >= SHARED_MEMORY_BYTES:
        return ok("shared-memory", found)
    if usage.total >= 2 * SHARED_MEMORY_BYTES:
        advice = "remove what ended programs have left in /dev/shm"
    return warning("shared-memory", f"{found}; data loader workers may end with a bus error", advice)


def check_memory() -> Check:
    """Check the free memory of the machine and of the control group."""
    from ddip.cluster import limits

    figures, bound = psutil.virtual_memory(), limits.control_group("memory")
    return judge_memory(figures.total, figures.available, *bound, limits.Limits.now().memory)


def judge_memory(total: int, available: int, limit: int, used: int, address_space: float) -> Check:
    """Judge the free memory; all figures in bytes.

    `limit` and `used`: of the control group, 0 without one; `address_space`: the limit set by ``ulimit -v``.
    """
    found = f"{size_text(total)}, {size_text(available)} available"
    if 0 < limit < total:
        available = min(available, max(0, limit - used))
        found += f"; the control group allows {size_text(limit)}, {size_text(max(0, limit - used))} free"
    if available < MEMORY_BYTES:
        return failed("memory", found, "end other programs, or give the machine or container more memory")
    if available < TIGHT_BYTES:
        return warning("memory", found, "two ranks start in this, with little left for data: end other programs")
    if address_space < float("inf"):
        advice = "remove the limit (ulimit -v unlimited): torch reserves more than it uses"
        return warning("memory", f"{found}; ulimit -v {size_text(address_space)}", advice)
    return ok("memory", found)


def check_limits() -> Check:
    """Check the limits on files, threads and processes for the largest likely group."""
    from ddip.cluster import devices, limits

    now, files = limits.Limits.now(), len(os.listdir("/dev/fd"))
    threads = limits.user_threads() if now.threads < limits.MANY_THREADS else 0
    ranks = max(MANY_RANKS, len(devices.gpu_names()))
    short = {n: limits.find_shortage(n, 0, now, files, threads) for n in (2, ranks)}
    return judge_limits(now.files, now.threads, *limits.control_group("pids"), short)


def judge_limits(files: float, threads: float, limit: int, used: int, short: Mapping[int, str]) -> Check:
    """Judge the limits; `short` has the text of a shortage per number of ranks, empty if there is none."""
    found = f"ulimit -n {files:.0f}, -u {threads:.0f}".replace("inf", "unlimited")
    if limit:
        found += f"; the control group allows {limit} processes and threads, {limit - used} free"
    fewest = next((ranks for ranks, text in sorted(short.items()) if text), None)
    if fewest is not None:
        what, _, advice = short[fewest].partition("; ")
        return (failed if fewest <= 2 else warning)("limits", f"{found}; {what}", advice)
    if limit and limit - used < BOUND_THREADS:
        is_tight = limit - used < BOUND_THREADS // 4
        advice = "raise the limit of the container: docker run --pids-limit=-1"
        return (failed if is_tight else warning)("limits", found, advice)
    return ok("limits", found)


def check_loopback() -> Check:
    """Check the interface over which the ranks of one host talk."""
    from ddip.group.process_group.network import loopback_name

    name = loopback_name()
    state = psutil.net_if_stats().get(name)
    if state is None or not state.isup:
        what = f"the interface {name} is {'missing' if state is None else 'down'}"
        return failed("loopback", what, f"give the machine or container that interface: ip link set {name} up")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LOOPBACK_SECONDS)
            with socket.create_connection(server.getsockname(), LOOPBACK_SECONDS), server.accept()[0]:
                pass
    except OSError as error:
        advice = f"let programs connect to 127.0.0.1 over {name}: look at firewall rules and sandboxes"
        return failed("loopback", f"a connection to 127.0.0.1 fails: {error or type(error).__name__}", advice)
    return ok("loopback", f"{name} is up, and 127.0.0.1 takes connections")


def check_run_folder() -> Check:
    """Check that a folder for a group's sockets can be created, and remove it at once."""
    try:
        folder = ownership.make_run_folder()
    except OSError as error:
        advice = "set TMPDIR to a folder of yours with a short path"
        return failed("run-folder", f"cannot create a folder for a group's sockets: {error}", advice)
    ownership.remove_files(folder, "", "")
    return ok("run-folder", f"sockets of a group are in a folder of {folder.parent}")


def check_leftovers() -> Check:
    """List what this user's groups left behind after their notebooks ended; remove nothing."""
    return judge_runs(ownership.list_runs())


def judge_runs(runs: Sequence[ownership.Run]) -> Check:
    """Count the groups whose notebooks are running, and list what groups of ended notebooks left behind."""
    dead = [run for run in runs if not run.owner_lives]
    found = f"groups of other notebooks: {len(runs) - len(dead)}"
    if not dead:
        return ok("leftovers", found)
    lines = [f"left by process {run.owner.pid}, which ended: {run.folder}, processes: {run.processes}" for run in dead]
    advice = "nothing, if you start a group: the next %makedip ends and removes them"
    return warning("leftovers", "\n".join([found, *lines]), advice)
