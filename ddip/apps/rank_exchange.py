"""What the ranks say to each other: small things, and only where all of them are in the same place."""

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
"""How many blocks are open in which this rank does something that the others do not."""


def together() -> bool:
    """Do all ranks run this, and more than one of them? Only then is anything divided among them."""
    return not _alone and current.is_everywhere() and dist.get_world_size() > 1


@contextlib.contextmanager
def single_process_mode() -> Iterator[None]:
    """In here each rank works as if it were the only one."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def rank() -> int:
    """The rank of this process in the default group."""
    return dist.get_rank()


def size() -> int:
    """Of the group."""
    return dist.get_world_size()


def is_quiet() -> bool:
    """Is it another rank that shows and writes what all of them make?"""
    return together() and rank() != 0


def is_first_here() -> bool:
    """Is this the first rank of its host?"""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _device() -> torch.device:
    """Where a tensor must be that all ranks are to see: on the CPU, unless the group has no backend for that."""
    on_cpu = "cpu:" in str(dist.get_backend_config())
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def gather(value: Any) -> list[Any]:
    """The `value` of each rank."""
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def gather_number(number: int) -> list[int]:
    """The `number` (63 bits) of each rank: quicker than ``gather``."""
    mine = torch.tensor([number], device=_device())
    theirs = [torch.empty_like(mine) for _ in range(size())]
    dist.all_gather(theirs, mine)
    return [int(number) for number in torch.cat(theirs).tolist()]


def total(number: float) -> float:
    """The sum of what the ranks have for `number`."""
    tensor = torch.tensor([number], dtype=torch.float64, device=_device())
    dist.all_reduce(tensor)
    return float(tensor)


def of_rank_0(value: Any) -> Any:
    """What rank 0 has for `value`."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=_device())
    return values[0]


def average(tensor: Tensor) -> None:
    """Make `tensor` the mean over the ranks."""
    dist.all_reduce(tensor)
    tensor /= size()


def share(tensors: list[Tensor]) -> None:
    """Give every rank what rank 0 has in these tensors."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.device.type == _device().type or "cpu:" in str(dist.get_backend_config()):
                dist.broadcast(tensor.detach(), src=0)
            else:
                moved = tensor.detach().to(_device())
                dist.broadcast(moved, src=0)
                tensor.detach().copy_(moved)


def fingerprint(value: Any) -> int:
    """A number of 63 bits, the same for the same plain `value`."""
    digest = hashlib.blake2b(pickle.dumps(value, protocol=4), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def state_of(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers, each once."""
    return [*model.parameters(), *model.buffers()]
