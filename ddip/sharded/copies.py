"""Copies of what one rank has of a model and its optimizer, and how ranks exchange them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddip.sharded.layout import Layout, Place, local_of

SMALL = 1 << 20
"""Bytes: parts of less are sent together, since each message takes its time, and models have thousands of them."""


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


def _room(former: Part | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
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
    outline = {name: (part.place, part.placements, part.values.dtype) for name, part in own.parts.items()}
    step, number, count, parts, rest = from_all((own.step, own.rank, own.size, outline, own.rest))[partner]
    theirs = Copy(None, step, number, count, {}, rest)
    for name, (place, placements, dtype) in parts.items():
        theirs.parts[name] = Part(place, placements, _room(former.parts.get(name), place.shape, dtype))
    small, large = _bytes(own)
    theirs_small, theirs_large = _bytes(theirs)
    together = torch.empty(sum(map(len, theirs_small)), dtype=torch.uint8)
    outgoing = [*large, *([torch.cat(small)] if small else [])]
    incoming = [*theirs_large, *([together] if theirs_small else [])]
    works = [dist.isend(data, to, tag=tag) for tag, data in enumerate(outgoing)]
    works += [dist.irecv(data, partner, tag=tag) for tag, data in enumerate(incoming)]
    for work in works:
        assert work is not None
        work.wait()
    for values, data in zip(theirs_small, together.split(list(map(len, theirs_small))), strict=True):
        values.copy_(data)
    theirs.serial = own.serial
    return theirs


def _bytes(one: Copy) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The values of its parts, as bytes in the same memory: those that are sent together, and large ones."""
    values = [part.values.reshape(-1).view(torch.uint8) for part in one.parts.values() if part.values.numel()]
    return [data for data in values if len(data) < SMALL], [data for data in values if len(data) >= SMALL]
