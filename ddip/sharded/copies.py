"""Copies of each rank's state in the memory of the hosts: written, mirrored on another rank, and chosen after a fault.

A rank has two pairs of copies, each of one save: its own state, and its partner's. Two pairs lose at most the newest
save if three rules hold; without the first two, a failure in ``save`` and then a death in ``restore`` lost both pairs:

1. A save is written over the pair that the ranks do not need. They agree on which save they need (`needed_save`): the
   newest that is held twice, by its rank and by the partner. The newest pair need not be that one: a failed ``save``
   leaves copies that are complete on each rank, and mirrored on none.
2. No copy is discarded before the ranks have a newer save that is held twice: ``restore`` discards nothing on its way.
3. A copy has a serial only while it is complete: it gets none before the first byte is written over.
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddip.sharded.layout import Layout, Place, local_of

SMALL = 1 << 20
"""Bytes: parts of less are sent together, since each message takes its time, and models have thousands of them."""
FEW_BYTES = 1 << 15
"""Of fewer, a hash is faster than torch's sum."""
STRUCTURE = ""
"""Name of the part that has everything else than tensors, pickled, as bytes."""
Held = tuple[int, int, int]
"""Of a copy: serial, the rank that saved it, and the number of ranks then."""
Holders = dict[int, list[int]]
"""By the rank that saved a copy: the ranks that hold it now."""


@dataclass
class Part:
    """One rank's part of a tensor."""

    place: Place
    placements: tuple[Any, ...] | None
    """torch's; None for a plain tensor."""
    values: torch.Tensor
    """On the CPU."""

    @property
    def data(self) -> torch.Tensor:
        """The values as bytes, in the same memory."""
        return self.values.reshape(-1).view(torch.uint8)

    @property
    def fingerprint(self) -> bytes | tuple[int, int] | None:
        """Equal for equal values, and for no others in practice; None for a shard, which is on one rank.

        Of large parts a CRC, and a sum that makes it 96 bits: three times as fast as a hash, 0.25 s per 300 MB. The CRC
        sees what a sum does not: order and signs.
        """
        if self.placements is not None and not any(one.is_replicate() for one in self.placements):
            return None
        data = self.data
        if len(data) < FEW_BYTES:
            return hashlib.blake2b(ctypes.string_at(data.data_ptr(), len(data)), digest_size=16).digest()
        words = data[: len(data) // 8 * 8].view(torch.int64)
        return zlib.crc32((ctypes.c_char * len(data)).from_address(data.data_ptr())), int(words.sum())


Outline = dict[str, tuple[Place, Any, torch.dtype, bytes | tuple[int, int] | None]]
"""Place, placements, dtype and fingerprint of parts, by their names."""


@dataclass
class Copy:
    """One rank's state after a step."""

    serial: int | None = None
    """Of the call of ``save``, the same on all ranks; None: it is being written, or there is none."""
    step: int = 0
    rank: int = 0
    size: int = 0
    """Of its group."""
    parts: dict[str, Part] = field(default_factory=dict)

    def keep(self, tensors: dict[str, torch.Tensor], layouts: dict[str, Layout]) -> None:
        """Copy the tensors' parts into the memory of the former copies, if they fit."""
        former, self.parts = self.parts, {}
        for name, tensor in tensors.items():
            local = local_of(tensor)
            values = _room(former.get(name), local.shape, local.dtype)
            values.copy_(local)
            self.parts[name] = Part(layouts[name].place, layouts[name].placements, values)

    def outline(self) -> Outline:
        """Describe the parts."""
        return {
            name: (one.place, one.placements, one.values.dtype, one.fingerprint) for name, one in self.parts.items()
        }

    @property
    def pickled(self) -> bytes:
        """Everything else than the tensors."""
        data = self.parts[STRUCTURE].data
        return ctypes.string_at(data.data_ptr(), len(data))


def _room(former: Part | None, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for values: that of the `former` part, if they fit."""
    if former is not None and former.values.shape == shape and former.values.dtype == dtype:
        return former.values
    return torch.empty(tuple(shape), dtype=dtype)


@dataclass
class Pair:
    """The copies of one save: this rank's own, and its partner's."""

    own: Copy = field(default_factory=Copy)
    spare: Copy = field(default_factory=Copy)

    @property
    def copies(self) -> list[Copy]:
        return [one for one in (self.own, self.spare) if one.serial is not None]


@dataclass
class Kept:
    """All copies under one name on this rank."""

    pairs: tuple[Pair, Pair] = field(default_factory=lambda: (Pair(), Pair()))
    owner: Callable[[], torch.nn.Module | None] = lambda: None
    """The model that was saved or restored last, if it still exists."""
    cell: int | None = None
    """In which that was done."""

    @property
    def copies(self) -> list[Copy]:
        return [one for pair in self.pairs for one in pair.copies]

    @property
    def held(self) -> list[Held]:
        return [(one.serial or 0, one.rank, one.size) for one in self.copies]

    def pair_beside(self, needed: int | None) -> Pair:
        """Return the pair that may be written over, without copies; the other one has the `needed` save."""
        first, second = self.pairs
        pair = second if any(one.serial == needed for one in first.copies) else first
        pair.own.serial = pair.spare.serial = None
        return pair

    def drop_newer(self, serial: int) -> None:
        """Discard copies of failed saves."""
        for one in self.copies:
            if one.serial is not None and one.serial > serial:
                one.serial = None


def complete_saves(held: list[list[Held]]) -> dict[int, Holders]:
    """Return the saves of which each rank's copy is held by some rank, by their serials.

    >>> complete_saves([[(4, 0, 2), (4, 1, 2), (5, 0, 2)], [(4, 1, 2)]])
    {4: {0: [0], 1: [0, 1]}}
    """
    return {serial: holders for serial, (size, holders) in _holders(held).items() if len(holders) == size}


def missing_ranks(held: list[list[Held]]) -> str:
    """Return which ranks' copies of the newest save are lost."""
    size, holders = max(_holders(held).items())[1]
    return f"rank {', '.join(str(rank) for rank in range(size) if rank not in holders)} of {size}"


def _holders(held: list[list[Held]]) -> dict[int, tuple[int, Holders]]:
    saves: dict[int, tuple[int, Holders]] = {}
    for holder, copies in enumerate(held):
        for serial, rank, size in copies:
            saves.setdefault(serial, (size, {}))[1].setdefault(rank, []).append(holder)
    return saves


def fewest_copies(holders: Holders) -> int:
    """Return how often the state of the rank is held that is held least."""
    return min(map(len, holders.values()))


def needed_save(saves: dict[int, Holders], wanted: int) -> int | None:
    """Return the save that must survive the next one: the newest that is held `wanted` times, or most often.

    >>> needed_save({4: {0: [0, 1], 1: [0, 1]}, 5: {0: [0], 1: [1]}}, 2)
    4
    """
    return max(saves, key=lambda serial: (min(fewest_copies(saves[serial]), wanted), serial), default=None)


def from_all(value: Any) -> list[Any]:
    """Return the value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mirror(own: Copy, former: Copy) -> Copy:
    """Give this rank's copy to the rank half the group further; returns that of the rank half the group before, in the
    memory of the `former` one.

    So the first half of the ranks holds all of a group that gets smaller, and on two hosts each holds all of the other.
    Parts whose fingerprints are equal are neither sent nor stored twice: of a DDP replica almost all.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    to, partner = (rank + size // 2) % size, (rank - size // 2) % size
    mine = own.outline()
    headers = from_all((own.step, mine))
    step, outline = headers[partner]
    theirs = Copy(None, step, partner, size)
    same_here, same_there = _same(mine, outline), _same(mine, headers[to][1])
    memory = {name: part for name, part in former.parts.items() if not _is_shared(part, own.parts.get(name))}
    for name, (place, placements, dtype, _) in outline.items():
        values = own.parts[name].values if name in same_here else _room(memory.get(name), place.shape, dtype)
        theirs.parts[name] = Part(place, placements, values)
    _exchange([(to, _except(own, same_there))], [(partner, _except(theirs, same_here))])
    theirs.serial = own.serial
    return theirs


def _same(mine: Outline, theirs: Outline) -> set[str]:
    return {name for name, entry in mine.items() if entry[-1] is not None and entry == theirs.get(name)}


def _is_shared(part: Part, own: Part | None) -> bool:
    return own is not None and part.values is own.values


def _except(one: Copy, names: Collection[str]) -> list[Part]:
    return [part for name, part in one.parts.items() if name not in names]


def fetch(copies: dict[int, Copy], holders: dict[int, int]) -> Copy:
    """Return this rank's copy: its own, or, on a new rank, the one that another rank holds for it.

    `copies` are those of this rank, by the ranks that saved them; `holders` says who gives which.
    """
    rank = dist.get_rank()
    given = {to: copies[to] for to, holder in holders.items() if holder == rank and to != rank}
    if all(to == holder for to, holder in holders.items()):
        return copies[rank]
    headers = from_all({to: (one.serial, one.step, one.size, one.outline()) for to, one in given.items()})
    incoming = []
    if holders[rank] != rank:
        serial, step, size, outline = headers[holders[rank]][rank]
        copies[rank] = Copy(serial, step, rank, size)
        for name, (place, placements, dtype, _) in outline.items():
            copies[rank].parts[name] = Part(place, placements, _room(None, place.shape, dtype))
        incoming = [(holders[rank], _except(copies[rank], ()))]
    _exchange([(to, _except(one, ())) for to, one in given.items()], incoming)
    return copies[rank]


def _exchange(outgoing: list[tuple[int, list[Part]]], incoming: list[tuple[int, list[Part]]]) -> None:
    """Send parts to ranks, and receive those of others into their memory; small ones together."""
    works, received = [], []
    for to, parts in outgoing:
        small, large = _by_size(parts)
        data = [*large, *([torch.cat(small)] if small else [])]
        works += [dist.isend(one, to, tag=tag) for tag, one in enumerate(data)]
    for source, parts in incoming:
        small, large = _by_size(parts)
        together = torch.empty(sum(map(len, small)), dtype=torch.uint8)
        data = [*large, *([together] if small else [])]
        works += [dist.irecv(one, source, tag=tag) for tag, one in enumerate(data)]
        received.append((small, together))
    for work in works:
        assert work is not None
        work.wait()
    for small, together in received:
        for values, data in zip(small, together.split(list(map(len, small))), strict=True):
            values.copy_(data)


def _by_size(parts: list[Part]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parts' bytes: those that are sent together, and large ones."""
    values = [part.data for part in parts if part.values.numel()]
    return [data for data in values if len(data) < SMALL], [data for data in values if len(data) >= SMALL]
