"""Stop changes of a group at any call, and prove that the group ends in its old or its new size."""

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

from .leftovers import family_of, wait_until, with_title

PROOF = "import torch, torch.distributed as dist\nx = torch.tensor(rank + 1)\ndist.all_reduce(x)\nproof = x.item()"


@contextlib.contextmanager
def stop_at_call(number: int) -> Iterator[list[str]]:
    """Press stop at the `number`-th call of a ddip function; yield the names of the called functions."""
    calls: list[str] = []

    def count_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and f"{os.sep}ddip{os.sep}" in frame.f_code.co_filename:
            calls.append(f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_code.co_name}")
            if len(calls) == number:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(count_call)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def ranks_of(owner: int) -> set[int]:
    """Return the PIDs of all engines of the process `owner`."""
    family = family_of(owner)
    return {process.pid for title in ("ddip rank", "ddip engine") for process in with_title(family, title)}


def prove_consistent(group: ddip.Group, sizes: tuple[int, ...], other_ranks: set[int]) -> None:
    """Prove that the group has one of `sizes`, computes an all_reduce, and has left no other rank."""
    assert group.world_size in sizes and group.ranks.ended == []
    wait_until(lambda: ranks_of(os.getpid()) - other_ranks == {member.pid for member in group.members}, 10)
    group.run(PROOF)
    expected_sum = sum(range(group.world_size + 1))
    assert [v["proof"] for v in group.pull_all(["proof"], range(group.world_size))[0]] == [
        expected_sum
    ] * group.world_size
    group.run("assert world_size == dist.get_world_size()\nassert rank or kept == 'rank 0'")


def change_and_stop(group: ddip.Group, size: int, number: int, other_ranks: set[int]) -> int:
    """Change `group` to `size`, stopped at a call; return how many calls were made."""
    sizes = (group.world_size, size)
    with stop_at_call(number) as calls:
        try:
            group.change(Request(n=size))
        except RequestInterrupted as error:
            assert "the change was interrupted; the group " in str(error), calls[number - 1]
    prove_consistent(group, sizes, other_ranks)
    return len(calls)


def prove_stopped_changes(former: int, size: int, parts: Sequence[float]) -> None:
    """Change a group from `former` to `size` ranks, stopped after each part of its calls.

    A part is a fraction: 0.5 stops halfway through the calls.
    """
    other_ranks = ranks_of(os.getpid())
    with ddip.Group(former) as group:
        group.run("kept = f'rank {rank}'")
        call_count = change_and_stop(group, size, 10**9, other_ranks)
        assert group.world_size == size
        for part in parts:
            group.change(Request(n=former))
            # The first two calls only lead up to the change
            change_and_stop(group, size, 3 + int(part * call_count), other_ranks)
