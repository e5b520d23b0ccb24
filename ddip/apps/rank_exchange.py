"""Collectives that apps use to exchange small values, at points that all ranks reach together."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddip.rank.runtime import current

_alone = 0
"""Number of open `single_process_mode` blocks."""


def on_all_ranks() -> bool:
    """Return whether the group has several ranks and all of them run this cell.

    Apps divide work among the ranks only then. Returns False within `single_process_mode`.
    """
    return not _alone and current.is_everywhere() and dist.get_world_size() > 1


@contextlib.contextmanager
def single_process_mode() -> Iterator[None]:
    """Make this rank work as if it were the only one: `on_all_ranks` returns False inside."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def rank() -> int:
    """Return the rank of this process in the default group."""
    return dist.get_rank()


def world_size() -> int:
    """Return the number of ranks in the default group."""
    return dist.get_world_size()


def is_quiet() -> bool:
    """Return whether this rank must not show or write common output, because rank 0 does."""
    return on_all_ranks() and rank() != 0


def is_first_on_host() -> bool:
    """Return whether this is the first rank of its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _collective_device() -> torch.device:
    """Return the device for collectives of the default group: the CPU, unless it lacks a CPU backend."""
    on_cpu = "cpu:" in str(dist.get_backend_config())
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def gather_objects(value: Any) -> list[Any]:
    """Return the `value` of each rank, in the order of ranks. A collective."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_numbers(number: int) -> list[int]:
    """Return the `number` (63 bits) of each rank; faster than `gather_objects`. A collective."""
    mine = torch.tensor([number], device=_collective_device())
    theirs = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(theirs, mine)
    return [int(number) for number in torch.cat(theirs).tolist()]


def sum_number(number: float) -> float:
    """Return the sum of `number` over the ranks. A collective."""
    tensor = torch.tensor([number], dtype=torch.float64, device=_collective_device())
    dist.all_reduce(tensor)
    return float(tensor)


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. A collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=_collective_device())
    return values[0]


def average_tensor(tensor: Tensor) -> None:
    """Replace `tensor` with its mean over the ranks, in place. A collective."""
    dist.all_reduce(tensor)
    tensor /= world_size()


def broadcast_tensors(tensors: list[Tensor]) -> None:
    """Copy rank 0's values of `tensors` to every rank, in place. A collective.

    The memory formats of the ranks may differ, such as channels last.
    """
    with torch.no_grad():
        for tensor in tensors:
            is_near = tensor.device.type == _collective_device().type or "cpu:" in str(dist.get_backend_config())
            sent = tensor.detach() if is_near else tensor.detach().to(_collective_device())
            sent = sent.contiguous()  # the backends send memory as it is, whatever the strides
            dist.broadcast(sent, src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)


def fingerprint_value(value: Any) -> int:
    """Return a hash of 63 bits that is the same on every rank for the same plain `value`."""
    digest = hashlib.blake2b(pickle.dumps(value, protocol=4), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def parameters_and_buffers(model: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers of `model`, each once."""
    return [*model.parameters(), *model.buffers()]
