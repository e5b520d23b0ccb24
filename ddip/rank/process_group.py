"""Join and leave the group."""

from __future__ import annotations

import os
import sys

import setproctitle
import torch
import torch.distributed as dist

from ddip.rank import namespace
from ddip.rank.housekeeping import cells
from ddip.rank.seat import Seat

_seated = False


def join(seat: Seat) -> None:
    """Take the `seat`: environment, threads, device, the group itself, and the variables that a cell may use.

    Blocks until all ``seat.world_size`` ranks have joined.
    """
    global _seated
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
    setproctitle.setproctitle(f"ddip rank {seat.rank} of {seat.world_size} ({seat.notebook})")
    namespace().update(rank=seat.rank, world_size=seat.world_size, device=device)


def leave() -> None:
    """Leave the group, if this rank is in one; the variables stay."""
    if dist.is_initialized():
        dist.destroy_process_group()
