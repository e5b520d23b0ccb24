"""Changes of a group that are stopped, and the proof that they ended as it was, or as it was asked to be."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import ddip
from ddip.errors import RequestInterrupted
from ddip.group.members.placement import Request

from .leftovers import family_of, titled, wait_until

PROOF = "import torch, torch.distributed as dist\nx = torch.tensor(rank + 1)\ndist.all_reduce(x)\nproof = x.item()"


@contextlib.contextmanager
def stop_at_call(number: int) -> Iterator[list[str]]:
    """Press the stop button when a function of ddip's is called for the `number`-th time; yields their names."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and f"{os.sep}ddip{os.sep}" in frame.f_code.co_filename:
            calls.append(f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_code.co_name}")
            if len(calls) == number:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def ranks_of(owner: int) -> set[int]:
    """Processes of all engines of the process `owner`."""
    family = family_of(owner)
    return {process.pid for title in ("ddip rank", "ddip engine") for process in titled(family, title)}


def prove_consistent(group: ddip.Group, sizes: tuple[int, ...], others: set[int]) -> None:
    """All members live, they are one of the `sizes`, an all_reduce is right, and nobody else is left."""
    assert group.world_size in sizes and group.ranks.ended == []
    wait_until(lambda: ranks_of(os.getpid()) - others == {member.pid for member in group.members}, 10)
    group.run(PROOF)
    right = sum(range(group.world_size + 1))
    assert [v["proof"] for v in group.pull_all(["proof"], range(group.world_size))[0]] == [right] * group.world_size
    group.run("assert world_size == dist.get_world_size()\nassert rank or kept == 'rank 0'")


def stopped_change(group: ddip.Group, size: int, number: int, others: set[int]) -> int:
    """Change `group` to `size`, stopped at a call; returns how many calls were made."""
    sizes = (group.world_size, size)
    with stop_at_call(number) as calls:
        try:
            group.change(Request(n=size))
        except RequestInterrupted as error:
            assert "the change was interrupted; the group is " in str(error), calls[number - 1]
    prove_consistent(group, sizes, others)
    return len(calls)


def stopped_changes(former: int, size: int, parts: Sequence[float]) -> None:
    """Change a group of `former` ranks to `size`, stopped after each of `parts` of the calls that the change makes."""
    others = ranks_of(os.getpid())
    with ddip.Group(former) as group:
        group.run("kept = f'rank {rank}'")
        whole = stopped_change(group, size, 10**9, others)
        assert group.world_size == size
        for part in parts:
            group.change(Request(n=former))
            stopped_change(group, size, 3 + int(part * whole), others)  # the first two calls only lead to the change
