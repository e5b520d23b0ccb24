"""Copies of what one rank has of a model and its optimizer, and how ranks exchange them."""

from __future__ import annotations

import ctypes
import io
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddip.sharded.layout import Layout, Place, local_of


@dataclass
class Part:
    """Of a tensor, what one rank has."""

    place: Place
    placements: tuple[Any, ...] | None
    """torch's; None for a plain tensor."""
    values: torch.Tensor
    """On the CPU."""


@dataclass
class Copy:
    """Of what one rank had after a step."""

    serial: int | None = None
    """Of the call of ``save``, the same on all ranks; None: it is being written, or there is none."""
    step: int = 0
    rank: int = 0
    size: int = 0
    """Of its group."""
    parts: dict[str, Part] = field(default_factory=dict)
    rest: Any = None
    """What is no tensor, and the same on all ranks."""

    def keep(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy the tensors' parts, to where the former copies are that fit."""
        former, self.parts = self.parts, {}
        for name, tensor in tensors.items():
            local, layout = local_of(tensor), Layout.of(tensor)
            held = former[name].values if name in former else None
            if held is not None and held.shape == local.shape and held.dtype == local.dtype:
                held.copy_(local)
            else:
                held = local.to("cpu", copy=True)
            self.parts[name] = Part(layout.place, layout.placements, held)

    def packed(self) -> torch.Tensor:
        """As bytes."""
        file = io.BytesIO()
        torch.save(vars(self), file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Copy:
    packed = ctypes.string_at(data.data_ptr(), data.numel())
    return Copy(**torch.load(io.BytesIO(packed), weights_only=False))


@dataclass
class Pair:
    """The copies of one step: this rank's own, and that of its partner."""

    own: Copy = field(default_factory=Copy)
    spare: Copy = field(default_factory=Copy)

    @property
    def copies(self) -> list[Copy]:
        return [one for one in (self.own, self.spare) if one.serial is not None]

    @property
    def serial(self) -> int:
        return max((one.serial or 0 for one in self.copies), default=0)


def from_all(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_one(rank: int, value: Any) -> Any:
    """The value of `rank`."""
    values = [value]
    dist.broadcast_object_list(values, src=rank)
    return values[0]


def of_the_partner(own: Copy) -> Copy:
    """Give this rank's copy to the rank half the group further; returns that of the rank half the group before.

    So the first half of the ranks holds all of a group that gets smaller, and on two hosts each holds all of the other.
    """
    rank, size, data = dist.get_rank(), dist.get_world_size(), own.packed()
    partner = (rank - size // 2) % size
    theirs = torch.empty(from_all(data.numel())[partner], dtype=torch.uint8)
    works = [dist.isend(data, (rank + size // 2) % size), dist.irecv(theirs, partner)]
    for work in works:
        assert work is not None
        work.wait()
    return _unpacked(theirs)
