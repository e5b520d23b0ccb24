"""Join, release and leave the process group.

A release runs on the control thread, and breaks what the main thread waits for: the connections between the ranks, or
the communicators of nccl. ``rank/kernel/kernel.py`` describes its part in an interrupt, and ``group/repair.py`` how the
ranks join another group afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import setproctitle
import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython

from ddip.guard import Guard
from ddip.protocol.rank_spec import RankSpec, has_nccl
from ddip.protocol.reports import CellReport, Ends, LeaveReport, LostObjects
from ddip.rank import user_namespace
from ddip.rank.inspection.advice import watch_samplers
from ddip.rank.native import lost_waits, sockets
from ddip.rank.objects import changes, wrappers
from ddip.rank.process_group import (
    aborted_tensors,
    collectives,
    init_in_cells,
    meshes,
    setup,
)
from ddip.rank.runtime import c10d, descriptors, process_settings, stacks, stores
from ddip.rank.runtime.gpu import Gpu, gpu
from ddip.rank.runtime.housekeeping import cells

CHECK = """
import os, threading, torch, torch.distributed as dist
room = torch.empty(1 << 26, dtype=torch.uint8)
thread = threading.Thread(target=os.getpid)
thread.start()
thread.join()
total = torch.ones(1, device=device, dtype=torch.float32)
dist.all_reduce(total)
total, size = total.item(), dist.get_world_size()
"""
RANK_VARIABLES = ("rank", "world_size")
"""Names of the variables that tell a cell which rank it runs on."""
ABORT_FIRST_SECONDS = 0.5
"""Maximum time that shutting down connections waits for the aborts, which a user's GPU kernel may hold up."""
LAST_BEGIN_SECONDS, BEGIN_POLL_SECONDS = 0.05, 0.005
"""Maximum time that an abort waits for an interrupted cell, and the time between two looks whether it begins more."""
LOST_SECONDS = 0.2
"""Time for which a wait must last after a release to be considered lost."""
ABORT_SECONDS = 5.0
"""Maximum time of an abort; a rank that exceeds it cannot leave its group."""
_is_set_up = False
"""True once this process has the working directory, the import path and the settings that a rank keeps."""
_store = ""
"""Store of the latest group, which identifies that group."""
_ddip_group: dist.ProcessGroup | None = None
"""The default group that ddip has formed."""
_released = False
"""True if the group has been released."""
_wants_rebuild = False
"""True if an app has asked for a rebuild of the group in the running cell."""
NOTHING_LOST = LostObjects(wrappers=0, meshes=0, subgroups=0, rpc=False)
_lost = NOTHING_LOST
"""Objects lost with groups that this rank has left, until they are reported to the user. They are kept because forming
the next group may fail."""
_is_joining = threading.Event()
"""Set when this rank begins to join another group after a release."""
_begun_before = 0
"""Collectives that this rank had begun on the GPU when the group was released, or the cell began after that."""
_is_cut_off = False
"""True if a release has interrupted the cell, since it cut off work on the GPU or a half-sent gloo message."""
standing: dict[str, Any] = {}
"""Variables that ddip provides to cells, by name."""
_reported_replaced: dict[str, str] = {}
"""Replaced values of these variables that were reported last."""


def install_hooks() -> None:
    """Install all hooks that note what this process does in groups.

    Call this once, before the first group is formed and before an interrupt can arrive.
    """
    collectives.wrap_methods()
    init_in_cells.wrap_init(lambda: _ddip_group is not None and c10d.default_group() is _ddip_group)
    setup.wrap_functions()
    stores.patch_stores(lambda: _released)
    wrappers.watch_creation()
    changes.watch_optimizers()
    watch_samplers()


def join_group(rank_spec: RankSpec) -> tuple[list[Ends], list[int]]:
    """Apply the `rank_spec`: environment, threads, device, process group, and variables for cells.

    Blocks until all ``rank_spec.world_size`` ranks have joined. Returns the connections that were made in the meantime,
    and the ports at which connections of other ranks were accepted. Raises RuntimeError or an error of torch if the
    group cannot be formed.
    """
    global _is_set_up, _store, _ddip_group, _released
    _store, _released = rank_spec.store, False
    _is_joining.set()
    wrappers.begin_group()
    aborted_tensors.begin_group()
    changes.begin_group(rank_spec.store)
    os.environ.update(rank_spec.environment)
    os.environ.update(rank_spec.interfaces)  # these take precedence over settings of the notebook or a cell
    first = not _is_set_up  # True again if an interrupt ended the first join: the steps may be repeated
    if first:
        os.chdir(rank_spec.directory)
        sys.argv[:] = [""]
    cells.threads = rank_spec.threads
    cells.collect = rank_spec.collect
    cells.ranks_per_core = max(1.0, rank_spec.local_world_size / (os.cpu_count() or 1))
    device = torch.device(rank_spec.device)
    gpu.use(device)
    try:
        with descriptors.raise_limit(descriptors.of_a_group(rank_spec.world_size)):
            connections = _form_group(rank_spec)
    finally:
        if first:  # only now, so that torch's imports for the first group do not come from the notebook's folder
            sys.path[:] = rank_spec.path
            process_settings.note_start()
            _is_set_up = True
    c10d.set_groups_made(rank_spec.groups)
    _ddip_group = c10d.default_group()
    if _ddip_group is None or _ddip_group.size() != rank_spec.world_size:
        raise RuntimeError("init_process_group has not formed a group of all ranks; other code has replaced it")
    setproctitle.setproctitle(f"ddip rank {rank_spec.rank} of {rank_spec.world_size} ({rank_spec.notebook})")
    names = user_namespace()
    kept = {} if _is_own_device(names.get("device")) else {"device": names["device"]}
    standing.update(rank=rank_spec.rank, world_size=rank_spec.world_size, device=device)
    names.update({**standing, **kept})
    _reported_replaced.clear()
    return connections


def _is_own_device(value: object) -> bool:
    """Return whether the variable ``device`` is missing, or has the value from ddip."""
    former = standing.get("device")
    return former is None or value is None or (type(value) is torch.device and value == former)


def _form_group(rank_spec: RankSpec) -> tuple[list[Ends], list[int]]:
    """Form the default group; return the new connections and the listening ports, as `join_group` does."""
    before = set(sockets.tcp_connections())
    nccl, at_once = has_nccl(rank_spec.backend), c10d.connects_at_once(rank_spec.backend)
    timed, served = nccl or rank_spec.backend == dist.Backend.GLOO, rank_spec.store.startswith("tcp:")
    dist.init_process_group(
        rank_spec.backend,
        init_method=None if served else f"file://{rank_spec.store}",
        store=stores.connect_store(rank_spec.store, rank_spec.rank, rank_spec.seconds) if served else None,
        rank=rank_spec.rank,
        world_size=rank_spec.world_size,
        timeout=c10d.setup_timeout(rank_spec.seconds) if timed else None,
        device_id=gpu.device if at_once else None,  # the older nccl would split it in new_group
    )
    if nccl and not at_once:
        c10d.connect_devices(gpu.device)
    if timed:
        c10d.set_timeout(c10d.WAIT_TIMEOUT)
    listening, connected = sockets.list_sockets()
    return [ends for ends in connected if ends not in before], list(setup.listening_ports(set(listening.items())))


def begin_cell() -> None:
    """Reset the state that a rank keeps per cell, and restore missing variables such as `rank` and `world_size`.

    ``%reset -f`` removes them.
    """
    global _begun_before, _is_cut_off, _wants_rebuild
    _is_cut_off = _wants_rebuild = False
    gpu.begin_cell()
    _begun_before = gpu.begun_before_cell
    changes.begin_cell()
    names = user_namespace()
    for name, value in standing.items():
        names.setdefault(name, value)


def find_replaced() -> dict[str, str]:
    """Return, as text and only once, the values with which a cell has replaced ``rank`` or ``world_size``.

    ``device`` is left out, since many programs have a variable of that name. No method of a value is called, since it
    may be any object.
    """
    global _reported_replaced
    names, now = user_namespace(), dict[str, str]()
    for name in RANK_VARIABLES:
        own_value = standing.get(name)
        value = names.get(name, own_value)
        if value is own_value or (type(value) is int and value == own_value):
            continue
        small = type(value) is int and abs(value) < 1 << 63  # Python cannot convert very large ones to text
        now[name] = str(value) if small else f"of type {type(value).__name__}"
    reported, _reported_replaced = _reported_replaced, now
    return {name: text for name, text in now.items() if reported.get(name) != text}


def check_group() -> None:
    """Run an all_reduce, allocate 64 MiB and start a thread, as a cell may do.

    Raises an error if this rank cannot. All ranks must call this; it waits for them.
    """
    names: dict[str, Any] = {"device": gpu.device}
    exec(CHECK, names)
    if names["total"] != names["size"]:
        raise RuntimeError(f"the sum of one from each of {names['size']} ranks is {names['total']:g}")


def adopt_group(former_port: int, port: int) -> bool:
    """Use the default group that a cell has formed as the group of this rank; always returns True.

    If ``MASTER_PORT`` is the `former_port`, it becomes `port`: the adopted group may listen at the former one, where
    another group could not be formed until all ranks have left this one.
    """
    global _ddip_group
    _ddip_group = c10d.default_group()
    if os.environ.get("MASTER_PORT") == str(former_port):
        os.environ["MASTER_PORT"] = str(port)
    return True


def release_group(store: str, connections: list[Ends]) -> bool:
    """Abort all waiting collectives of the group that was formed through `store`, and mark it as released.

    Does nothing if this rank has joined another group since. `connections`: those between ranks, to be shut down. Slow
    steps continue on a thread. Returns whether this cuts off work on the GPU, whose results are then undefined.
    """
    global _begun_before, _released
    if store != _store:  # too late: the control thread was delayed, and this rank has joined another group since
        return False
    if not _released:
        _begun_before = gpu.begun()  # before it counts as released: the main thread may be at the end of a cell
    _released = True
    _is_joining.clear()
    on_cpu = gpu.device.type == "cpu"
    if on_cpu:
        _shut_down_connections(connections)
    try:
        return False if on_cpu else _abort_on_gpu()
    finally:  # in another thread, so that the control thread can serve requests
        guard = Guard("ranks may still wait in a released group")
        guard.start_thread("ddip-release", _finish_release, store, None if on_cpu else connections)


def _abort_on_gpu() -> bool:
    """Begin to abort collectives on the GPU; return whether this cuts off a cell's work."""
    cut_off = gpu.is_under_way()
    if cut_off:
        _interrupt_cell()
        _wait_while_collectives_begin()
    c10d.abort_collectives()
    if not cut_off and gpu.begun() > _begun_before:  # a collective began in the meantime
        cut_off = True
        _interrupt_cell()
    if gpu.state != "under way":  # the work belongs to a request of ddip, not to a cell
        return False
    if cut_off:
        aborted_tensors.add_report(*gpu.last)
    else:
        Guard("a collective that begins now is not noticed until the cell ends").start_thread(
            "ddip-begins", _interrupt_if_one_begins, _store, gpu, _begun_before
        )
    return cut_off


def _wait_while_collectives_begin() -> None:
    """Wait briefly until the interrupted cell begins no more collectives: an abort may free what they use."""
    until, before = time.monotonic() + LAST_BEGIN_SECONDS, -1
    while before != (before := gpu.begun()) and time.monotonic() < until:
        time.sleep(BEGIN_POLL_SECONDS)


def _interrupt_if_one_begins(store: str, watched: Gpu, begun: int) -> None:
    """Interrupt the running cell if it begins a collective in the aborted group, which does nothing there."""
    while watched.state == "under way" and _released and store == _store and not _is_cut_off:
        if watched.begun() > begun and c10d.default_group() is _ddip_group:
            _interrupt_cell()
            aborted_tensors.add_report(*watched.last)
            return
        time.sleep(BEGIN_POLL_SECONDS)


def ensure_not_cut_off() -> None:
    """Raise KeyboardInterrupt if a release has cut off the GPU work of the cell, whose code has ended.

    The interrupt may have been delayed until then, or the cell has caught it.
    """
    if gpu.device.type == "cpu" or not _released or c10d.default_group() is not _ddip_group:
        return
    if _is_cut_off or gpu.begun() > _begun_before:
        _note_cut_off()
        raise KeyboardInterrupt


def _note_cut_off() -> None:
    global _is_cut_off
    _is_cut_off = True


def _interrupt_cell() -> None:
    """Interrupt the running cell, if any, since it would continue with undefined results."""
    _note_cut_off()
    shell: Any = get_ipython()
    if shell is not None:
        shell.kernel.interrupt_running_cell()


def _finish_release(store: str, connections: list[Ends] | None) -> None:
    """Finish the slow steps of a release: shut down `connections` after the aborts, then end lost waits."""
    if connections is not None:
        _shut_down_connections(connections)
    _end_lost_waits(store)


def _end_lost_waits(store: str) -> None:
    """End lost waits until two checks in a row find none, or this rank begins to join another group.

    gloo does not notify a thread that waits for the rest of a message (``lost_waits.py``), and C++ polls a FileStore
    for a key until its timeout. Blocks until then.
    """
    before, quiet = dict[int, int](), 0
    with contextlib.closing(stores.FileWaits()) as files:
        while quiet < 2 and not _is_joining.wait(LOST_SECONDS) and store == _store:
            waits = lost_waits.find_waits()
            lost_buffers = {buffer for thread, buffer in waits.items() if before.get(thread) == buffer}
            if lost_buffers and cells.busy and not cells.doing:
                _interrupt_cell()  # before the wait ends, since its tensor will then hold undefined values
            lost_waits.end_waits(lost_buffers)
            in_files = files.end()
            before, quiet = waits, 0 if waits or in_files else quiet + 1


def _shut_down_connections(connections: list[Ends]) -> None:
    """Shut down the connections between the ranks, after any aborts.

    Some may belong to nccl, whose watchdog would take a broken connection for a failure. The connection to the store is
    not among `connections` if rank 0 has closed its end, which this rank does not notice in a partition.
    """
    c10d.wait_for_aborts(ABORT_FIRST_SECONDS)
    with descriptors.raise_limit(1):
        own = sockets.own_connections(stores.served_ports())
        to_store = sockets.connections_to(*stores.find_server(_store))
        sockets.shut_down([*connections, *own, *to_store], setup.listening_ports())


def leave_group() -> LeaveReport:
    """Leave the group, if this rank is in one; the variables are kept.

    The report has the objects lost with this and earlier groups that the user does not know of. Raises RuntimeError
    if an abort of nccl has not ended within `ABORT_SECONDS`.
    """
    global _ddip_group, _lost
    if not c10d.wait_for_aborts(ABORT_SECONDS):
        raise RuntimeError("the GPU still runs aborted work, possibly a kernel that cannot be stopped")
    gpu_lost = gpu.find_lost()
    _ddip_group = None
    cells.tidy_error()  # a wrapper that only the frames of the failed cell hold is not lost to the user
    _lost = {
        "wrappers": wrappers.retire_all(),
        "meshes": _lost["meshes"] + meshes.disable_meshes(),
        "subgroups": _lost["subgroups"] + c10d.count_subgroups(),
        "rpc": c10d.has_rpc(),
    }
    c10d.destroy_groups()
    aborted_tensors.leave_group()
    return {**_lost, "gpu_lost": gpu_lost}


def forget_lost_objects() -> list[str]:
    """Clear the lost objects, as they are reported now; return the variables with unusable wrappers."""
    global _lost
    _lost = NOTHING_LOST
    return wrappers.forget_lost_objects()


def give_up() -> None:
    """Request a rebuild of the process group before the next cell, as an app does after a fault of its own."""
    global _wants_rebuild
    _wants_rebuild = True


def report_state() -> CellReport:
    """Report the state of the group after a cell; ``other``: the cell has formed its own default group."""
    now = c10d.default_group()
    is_lost = _released or _wants_rebuild or aborted_tensors.is_group_broken
    common: CellReport = {"released": is_lost, "state": "none"}
    if now is None:
        return common
    if now is not _ddip_group:
        return {**common, "state": "other", "rank": dist.get_rank(), "size": dist.get_world_size()}
    return {
        **common,
        "state": "ours",
        "begun": collectives.begun_operations(),
        "groups": c10d.groups_made(),
        "changes": changes.writes_by_owner(),
    }


def is_released(error: BaseException) -> bool:
    """Return whether `error` comes from a collective that was aborted because this rank was released."""
    return _released and c10d.is_broken_connection(error)


def waited_in(error: BaseException) -> str:
    """Return where this rank waited for others when `error` ended the wait; empty for an error of its own."""
    if _is_cut_off and isinstance(error, KeyboardInterrupt):
        place = stacks.place_of(error)
        if gpu.device.type == "cpu":
            return str(place)
        return str(replace(place, function=stacks.ON_GPU) if place.cell is not None else stacks.place_on_gpu())
    return str(stacks.place_of(error)) if c10d.is_broken_connection(error) else ""
