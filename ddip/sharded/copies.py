"""Copies of what one rank has of a model and its optimizer, and how ranks exchange them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
            values = _room(former.get(name), local.shape, local.dtype)
            values.copy_(local)
            self.parts[name] = Part(layout.place, layout.placements, values)

    def outline(self) -> Copy:
        """The same, without a number: with parts that take no memory."""
        parts = {name: replace(part, values=part.values.to("meta")) for name, part in self.parts.items()}
        return replace(self, serial=None, parts=parts)


def _room(former: Part | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """For values on the CPU: those of the `former` part, if they fit."""
    if former is not None and former.values.shape == shape and former.values.dtype == dtype:
        return former.values
    return torch.empty(shape, dtype=dtype)


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


def of_the_partner(own: Copy, former: Copy) -> Copy:
    """Give this rank's copy to the rank half the group further; returns that of the rank half the group before, in the
    place of the `former` one.

    So the first half of the ranks holds all of a group that gets smaller, and on two hosts each holds all of the other.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    to, partner = (rank + size // 2) % size, (rank - size // 2) % size
    theirs: Copy = from_all(own.outline())[partner]
    for name, part in theirs.parts.items():
        part.values = _room(former.parts.get(name), part.values.shape, part.values.dtype)
    works = [dist.isend(data, to, tag=tag) for tag, data in enumerate(_bytes(own))]
    works += [dist.irecv(data, partner, tag=tag) for tag, data in enumerate(_bytes(theirs))]
    for work in works:
        assert work is not None
        work.wait()
    theirs.serial = own.serial
    return theirs


def _bytes(one: Copy) -> list[torch.Tensor]:
    """The values of its parts, as bytes in the same memory; of those that have some."""
    return [part.values.reshape(-1).view(torch.uint8) for part in one.parts.values() if part.values.numel()]
