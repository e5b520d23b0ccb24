"""Join, release and leave the group.

A collective that waits cannot be interrupted: its thread is in C++. What it waits for can be broken, from the control
thread: the connections that the ranks have with each other (gloo raises then), the communicators (nccl aborts), and
the store, which the notebook replaces by something that no rank can read. After that every rank leaves the broken group
and joins a new one; its variables stay.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from typing import Any

import setproctitle
import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython

from ddip.guard import Guard
from ddip.protocol.rank_spec import RankSpec, has_nccl
from ddip.protocol.reports import CellReport, Ends, Going
from ddip.rank import namespace
from ddip.rank.inspection.advice import watch_samplers
from ddip.rank.native import sockets
from ddip.rank.objects import changes, wrappers
from ddip.rank.process_group import (
    aborted_tensors,
    collectives,
    init_in_cells,
    meshes,
    rank_vitals,
    released_waits,
    setup,
)
from ddip.rank.runtime import c10d, descriptors, process_settings, stacks, stores
from ddip.rank.runtime.gpu import gpu
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
NUMBERS = ("rank", "world_size")
"""The variables of a cell that say where it runs."""
ABORT_FIRST_SECONDS = 0.5
"""For which the connections wait for the aborts, at most: a kernel of the user's may hold them up."""
ABORT_SECONDS = 5.0
"""How long an abort may take until the rank is taken for one that cannot leave its group."""
_seated = False
"""Has this process what a rank has for good: threads, device, variables?"""
_store = ""
"""Of the group that was formed last; it names that group."""
_formed: dist.ProcessGroup | None = None
"""The default group that ddip has formed."""
_released = False
"""Has that group been released?"""
_is_given_up = False
"""Has an app asked for the group to be formed again, in the cell that runs?"""
NOTHING = Going(wrappers=0, meshes=0, subgroups=0, rpc=False)
_gone = NOTHING
"""What went with the groups that this rank has left, until the user has been told: the next one may fail to form."""
_joins = threading.Event()
"""Has this rank begun to join another group since the last release?"""
_is_cut_off = False
"""Was the cell interrupted since a release has cut off its work on the GPU, or half of a message of gloo's?"""
standing: dict[str, Any] = {}
"""The variables that a cell may use."""
_told_replaced: dict[str, str] = {}
"""What was told last of those that cells have given other values."""


def watch() -> None:
    """Once, before the first group is formed and before an interrupt can come: see what this process does in groups."""
    collectives.watch()
    init_in_cells.watch(lambda: _formed is not None and c10d.world() is _formed)
    setup.watch()
    stores.watch(lambda: _released)
    wrappers.watch()
    changes.watch()
    rank_vitals.watch()
    watch_samplers()


def join(rank_spec: RankSpec) -> tuple[list[Ends], list[int]]:
    """Take the `rank_spec`: environment, threads, device, the group itself, and the variables that a cell may use.

    Blocks until all ``rank_spec.world_size`` ranks have joined. Returns the connections that were made meanwhile, and
    the ports at which those of other ranks came in.
    """
    global _seated, _store, _formed, _released
    _store, _released = rank_spec.store, False
    _joins.set()
    wrappers.begin_group()
    aborted_tensors.begin_group()
    changes.begin_group(rank_spec.store)
    os.environ.update(rank_spec.environment)
    os.environ.update(rank_spec.interfaces)  # whatever the notebook, or a cell, has set
    first = not _seated  # also after one that was interrupted: all of this may be done again
    if first:
        os.chdir(rank_spec.directory)
        sys.argv[:] = [""]
    cells.threads = rank_spec.threads
    cells.collect = rank_spec.collect
    device = torch.device(rank_spec.device)
    gpu.use(device)
    try:
        with descriptors.spare(descriptors.of_a_group(rank_spec.world_size)):
            connections = _form(rank_spec)
    finally:
        if first:  # not before: what torch imports to form its first group is not taken from the notebook's folder
            sys.path[:] = rank_spec.path
            process_settings.note_start()
            _seated = True
    c10d.set_groups_made(rank_spec.groups)
    _formed = c10d.world()
    if _formed is None or _formed.size() != rank_spec.world_size:
        raise RuntimeError("init_process_group has formed no group of all ranks; something has taken its place")
    setproctitle.setproctitle(f"ddip rank {rank_spec.rank} of {rank_spec.world_size} ({rank_spec.notebook})")
    standing.update(rank=rank_spec.rank, world_size=rank_spec.world_size, device=device)
    namespace().update(standing)
    _told_replaced.clear()
    return connections


def _form(rank_spec: RankSpec) -> tuple[list[Ends], list[int]]:
    """Form the group; returns what `join` does."""
    before = set(sockets.connections())
    nccl, at_once = has_nccl(rank_spec.backend), c10d.connects_at_once(rank_spec.backend)
    timed, served = nccl or rank_spec.backend == dist.Backend.GLOO, rank_spec.store.startswith("tcp:")
    dist.init_process_group(
        rank_spec.backend,
        init_method=None if served else f"file://{rank_spec.store}",
        store=stores.client(rank_spec.store, rank_spec.rank, rank_spec.seconds) if served else None,
        rank=rank_spec.rank,
        world_size=rank_spec.world_size,
        timeout=c10d.setup_timeout(rank_spec.seconds) if timed else None,
        device_id=gpu.device if at_once else None,  # with the former nccl, new_group would split the communicator then
    )
    if nccl and not at_once:
        c10d.connect_devices(gpu.device)
    if timed:
        c10d.set_timeout(dist.default_pg_timeout)
    listening, connected = sockets.list_sockets()
    return [ends for ends in connected if ends not in before], list(setup.ports(set(listening.items())))


def begin_cell() -> None:
    """Put back what is missing of the names that a cell may use: ``%reset -f`` has taken them away."""
    global _is_cut_off, _is_given_up
    _is_cut_off = _is_given_up = False
    gpu.begin_cell()
    changes.begin_cell()
    names = namespace()
    for name, value in standing.items():
        names.setdefault(name, value)


def replaced() -> dict[str, str]:
    """The values, in words, that the cell which has just ended has given ``rank`` and ``world_size``, if others than
    this rank has; each is told once. Not ``device``: many programs have their own.

    No method of the value is called: it may be anything.
    """
    global _told_replaced
    names, now = namespace(), dict[str, str]()
    for name in NUMBERS:
        ours = standing.get(name)
        value = names.get(name, ours)
        if value is ours or (type(value) is int and value == ours):
            continue
        small = type(value) is int and abs(value) < 1 << 63  # Python refuses to write very long ones
        now[name] = str(value) if small else f"of type {type(value).__name__}"
    told, _told_replaced = _told_replaced, now
    return {name: text for name, text in now.items() if told.get(name) != text}


def check() -> None:
    """Use the group once, as a cell does, with some memory and a thread; raises if this rank cannot."""
    names: dict[str, Any] = {"device": gpu.device}
    exec(CHECK, names)
    if names["total"] != names["size"]:
        raise RuntimeError(f"the sum of one from each of {names['size']} ranks is {names['total']:g}")


def adopt(former_port: int, port: int) -> bool:
    """Take the group that a cell has formed for the group of this rank.

    If that listens at the `former_port`, another would find it taken until all ranks have left the first: the next one
    gets `port`.
    """
    global _formed
    _formed = c10d.world()
    if os.environ.get("MASTER_PORT") == str(former_port):
        os.environ["MASTER_PORT"] = str(port)
    return True


def release(store: str, connections: list[Ends]) -> bool:
    """Make whatever waits in a collective of the group that was formed through `store` fail now.

    Returns whether work on the GPU is cut off by that: what it was to compute may be anything.
    """
    global _released
    if store != _store:  # this comes too late: the rank was held up in C code, and has joined another group since
        return False
    _released = True
    _joins.clear()
    on_cpu = gpu.device.type == "cpu"
    if on_cpu:
        _disconnect(connections)
    try:
        return False if on_cpu else _abort()
    finally:  # beside this thread, which answers others meanwhile
        guard = Guard("ranks may still wait in a released group")
        guard.start_thread("ddip-release", _end_release, store, None if on_cpu else connections)


def _abort() -> bool:
    """Begin to abort what waits on the GPU; returns whether work is cut off by that."""
    begun, cut_off = gpu.begun(), gpu.is_under_way()
    if cut_off:
        _interrupt()
    c10d.abort()
    if not cut_off and gpu.begun() > begun:  # it has been begun just now
        cut_off = True
        _interrupt()
    if cut_off and gpu.state == "under way":  # and not of what ddip itself has asked for
        aborted_tensors.report(*gpu.last)
        return True
    return False


def _interrupt() -> None:
    """Interrupt the cell, if one runs: what it does next, when the GPU is let go, would be done with garbage."""
    global _is_cut_off
    _is_cut_off = True
    shell: Any = get_ipython()
    if shell is not None:
        shell.kernel.interrupt_running_cell()


def _end_release(store: str, connections: list[Ends] | None) -> None:
    """What of a release takes time: the `connections` that wait for the aborts, and the waits that gloo forgets."""
    if connections is not None:
        _disconnect(connections)
    released_waits.end_all(lambda seconds: _joins.wait(seconds) or store != _store, _interrupt)


def _disconnect(connections: list[Ends]) -> None:
    """Shut down what the ranks are connected by, after the aborts, if any: some of it may be nccl's own, whose watchdog
    takes that for a failure."""
    c10d.wait_for_aborts(ABORT_FIRST_SECONDS)
    with descriptors.spare(1):
        sockets.shut_down([*connections, *sockets.own_connections(stores.ports())], setup.ports())


def leave() -> Going:
    """Leave the group, if this rank is in one; the variables stay.

    Returns what has gone with this group and those before that the user has not been told. Raises RuntimeError if nccl
    does not let go of the GPU.
    """
    global _formed, _gone
    if not c10d.wait_for_aborts(ABORT_SECONDS):
        raise RuntimeError("the GPU still works on what was aborted: a kernel that nobody can stop may run there")
    _formed = None
    _gone = {
        "wrappers": wrappers.retire(),
        "meshes": _gone["meshes"] + meshes.retire(),
        "subgroups": _gone["subgroups"] + c10d.subgroups(),
        "rpc": c10d.has_rpc(),
    }
    c10d.forget()
    aborted_tensors.leave_group()
    return _gone


def forget_gone() -> None:
    """The user has been told what has gone."""
    global _gone
    _gone = NOTHING
    wrappers.forget_gone()


def give_up() -> None:
    """For an app, at the end of a cell: have the group formed again before the next one."""
    global _is_given_up
    _is_given_up = True


def report() -> CellReport:
    """Report the state of the group after a cell; ``other``: the cell has formed one in place of ours."""
    now = c10d.world()
    lost = _released or _is_given_up or aborted_tensors.is_group_broken
    told: CellReport = {"released": lost, "state": "none"}
    if now is None:
        return told
    if now is not _formed:
        return {**told, "state": "other", "rank": dist.get_rank(), "size": dist.get_world_size()}
    return {
        **told,
        "state": "ours",
        "begun": collectives.begun(),
        "groups": c10d.groups_made(),
        "changes": changes.count(),
    }


def is_released(error: BaseException) -> bool:
    """Is `error` what a collective raised since the notebook has released this rank?"""
    return _released and c10d.is_broken_connection(error)


def waited_in(error: BaseException) -> str:
    """Where this rank waited for others when `error` ended that; empty for an error of its own."""
    if _is_cut_off and isinstance(error, KeyboardInterrupt):
        place = stacks.place_of(error)
        if gpu.device.type == "cpu":
            return str(place)
        return str(replace(place, function=stacks.ON_GPU) if place.cell is not None else stacks.place_on_gpu())
    return str(stacks.place_of(error)) if c10d.is_broken_connection(error) else ""
