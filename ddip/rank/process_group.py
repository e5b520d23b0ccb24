"""Join, release and leave the group.

A collective that waits cannot be interrupted: its thread is in C++. What it waits for can be broken, from the control
thread: the connections that the ranks have with each other (gloo raises then), the communicators (nccl aborts), and
the store, which the notebook replaces by something that no rank can read. After that every rank leaves the broken group
and joins a new one; its variables stay.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import setproctitle
import torch
import torch.distributed as dist

from ddip.rank import c10d, namespace, sockets, stacks
from ddip.rank.housekeeping import cells
from ddip.rank.seat import Seat
from ddip.rank.sockets import Ends

_seated = False
_store = ""
"""Of the group that was formed last; it names that group."""
_formed: dist.ProcessGroup | None = None
_released = False
_counts: dict[str, tuple[int, int]] = {}
"""Collectives until the cell began, and the size of the group, by group."""


def join(seat: Seat) -> None:
    """Take the `seat`: environment, threads, device, the group itself, and the variables that a cell may use.

    Blocks until all ``seat.world_size`` ranks have joined.
    """
    global _seated, _store, _formed, _released
    _store, _released = seat.store, False
    os.environ.update(seat.environment)
    if seat.interface:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", seat.interface)
    if not _seated:
        os.chdir(seat.directory)
        sys.path[:] = seat.path
        sys.argv[:] = [""]
        _seated = True
    cells.threads = seat.threads
    cells.collect = seat.collect
    device = cells.device = torch.device(seat.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        seat.backend, init_method=f"file://{seat.store}", rank=seat.rank, world_size=seat.world_size
    )
    _formed = c10d.world()
    setproctitle.setproctitle(f"ddip rank {seat.rank} of {seat.world_size} ({seat.notebook})")
    namespace().update(rank=seat.rank, world_size=seat.world_size, device=device)


def adopt() -> bool:
    """Take the group that a cell has formed for the group of this rank."""
    global _formed
    _formed = c10d.world()
    return True


def release(store: str, connections: list[Ends]) -> None:
    """Make whatever waits in a collective of the group that was formed through `store` fail now."""
    global _released
    if store == _store:  # else this comes too late: the rank was held up in C code, and has joined another group since
        _released = True
        try:
            sockets.shut_down(connections)
        finally:
            c10d.abort()


def leave() -> int:
    """Leave the group, if this rank is in one; the variables stay.

    Returns how many wrappers (DDP) and subgroups go with it.
    """
    global _formed
    _formed = None
    going = c10d.retire_wrappers() + c10d.subgroups()
    c10d.forget()
    return going


def begin_cell() -> None:
    """Remember what must be known when the cell has ended."""
    global _counts
    _counts = c10d.counts()


def report() -> dict[str, Any]:
    """What became of the group in the cell that has just ended.

    ``released``: whether the notebook has released it. ``state``: ``ours`` if it is the group that this rank has
    joined, ``none``, or ``other``, formed by the cell; then ``rank`` and ``size`` tell this rank's place in it.
    ``counts``: collectives that the cell began, and the size of the group, by group.
    """
    now = c10d.world()
    told: dict[str, Any] = {"released": _released, "state": "none"}
    if now is None:
        return told
    if now is not _formed:
        return {**told, "state": "other", "rank": dist.get_rank(), "size": dist.get_world_size()}
    counts = {name: (n - _counts.get(name, (0, 0))[0], size) for name, (n, size) in c10d.counts().items()}
    return {**told, "state": "ours", "counts": counts}


def waited_in(error: BaseException) -> str:
    """Where this rank waited for others when `error` ended that; empty for an error of its own."""
    return str(stacks.place_of(error)) if c10d.is_broken_connection(error) else ""
