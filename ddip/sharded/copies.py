"""Keep copies of each rank's state in host memory: write them, mirror them on another rank, choose after a fault.

A rank has two pairs of copies. Each pair belongs to one save, and has the rank's own state and its partner's. With two
pairs, a fault loses at most the newest save if three rules hold. Without the first two, a failure in ``save`` followed
by a death in ``restore`` would lose both pairs.

1. A save overwrites the pair that the ranks do not need. They agree on the save that they need (`needed_save`): the
   newest one that is held twice, by its rank and by the partner. That is not always the newest pair, because a failed
   ``save`` leaves copies that are complete on each rank but not mirrored.
2. No copy is discarded before the ranks have a newer save that is held twice, so ``restore`` discards nothing.
3. A copy has a serial only while it is complete: the serial is removed before the first byte is overwritten.
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ddip.sharded.layout import Layout, ShardPosition, dense_strides, local_of

T = TypeVar("T")
SMALL = 1 << 20
"""Bytes below which parts are sent in one message, as models have thousands of small ones."""
FEW_BYTES = 1 << 15
"""Bytes below which a hash is faster than torch's sum."""
STRUCTURE = ""
"""Name of the part that holds everything except tensors, pickled, as bytes."""
Held = tuple[int, int, int]
"""Facts about a copy: serial, the rank that saved it, and the number of ranks at that time."""
Holders = dict[int, list[int]]
"""Ranks that hold a copy now, by the rank that saved it."""


def fingerprint_of(data: torch.Tensor) -> bytes | tuple[int, int]:
    """Return a hash of a tensor of bytes, in practice unique.

    For large tensors, it is a CRC and a sum, 96 bits together: three times as fast as a hash, 0.25 s per 300 MB. The
    CRC detects changes of order and sign, which a sum does not.
    """
    data = data.cpu()
    if len(data) < FEW_BYTES:
        return hashlib.blake2b(ctypes.string_at(data.data_ptr(), len(data)), digest_size=16).digest()
    words = data[: len(data) // 8 * 8].view(torch.int64)
    return zlib.crc32((ctypes.c_char * len(data)).from_address(data.data_ptr())), int(words.sum())


@dataclass
class Part:
    """One rank's part of a tensor."""

    place: ShardPosition
    placements: tuple[Any, ...] | None
    """The DTensor's placements; None for a plain tensor."""
    mesh_size: int
    """Number of ranks that have the DTensor, 1 for a plain tensor; other ranks may have another of the same name."""
    values: torch.Tensor
    """The part's elements, on the CPU; they fill their memory without gaps, in the order of dimensions of the original.

    Fused optimizers on CPUs pair the elements of a parameter and of its state by their order in memory.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values as bytes, in the order in memory; it shares their memory."""
        return self.values.as_strided((self.values.numel(),), (1,)).view(torch.uint8)

    def header(self, size: int) -> Header:
        """Return the description of this part, which one of `size` ranks has saved."""
        is_single = self.mesh_size == size and not any(placement.is_replicate() for placement in self.placements or ())
        fingerprint = None if is_single else fingerprint_of(self.data)
        return Header(self.place, self.placements, self.mesh_size, self.values.dtype, self.values.stride(), fingerprint)


class Header(NamedTuple):
    """Description of a part without its values."""

    place: ShardPosition
    placements: tuple[Any, ...] | None
    mesh_size: int
    dtype: torch.dtype
    strides: tuple[int, ...]
    fingerprint: bytes | tuple[int, int] | None
    """None if no other rank can have the same part."""

    def allocate_part(self, former: Part | None) -> Part:
        """Return a part for these values, in the memory of the `former` part if they fit."""
        values = _allocate_values(former, self.place.shape, self.dtype, self.strides)
        return Part(self.place, self.placements, self.mesh_size, values)


Outline = dict[str, Header]
"""Headers of parts by their names."""


@dataclass
class Copy:
    """One rank's state after a step."""

    serial: int | None = None
    """Number of the call of ``save``, the same on all ranks; None while it is being written, or if it is empty."""
    step: int = 0
    rank: int = 0
    size: int = 0
    """Number of ranks in its group."""
    parts: dict[str, Part] = field(default_factory=dict)

    def keep(self, tensors: dict[str, torch.Tensor], layouts: dict[str, Layout]) -> None:
        """Copy this rank's parts of `tensors`, into the memory of the former parts if they fit."""
        former, self.parts = self.parts, {}
        for name, tensor in tensors.items():
            local = local_of(tensor)
            values = _allocate_values(former.get(name), local.shape, local.dtype, dense_strides(local))
            values.copy_(local)
            layout = layouts[name]
            self.parts[name] = Part(layout.place, layout.placements, layout.mesh_size, values)

    def outline(self) -> Outline:
        """Return the header of each part by name."""
        return {name: part.header(self.size) for name, part in self.parts.items()}

    @property
    def pickled(self) -> bytes:
        """The state without its tensors, pickled."""
        data = self.parts[STRUCTURE].data
        return ctypes.string_at(data.data_ptr(), len(data))


def _allocate_values(
    former: Part | None, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]
) -> torch.Tensor:
    """Return memory for values of this shape, dtype and strides, reusing the `former` part if it fits."""
    if former is not None:
        values = former.values
        if values.shape == shape and values.dtype == dtype and values.stride() == strides:
            return values
    return torch.empty_strided(tuple(shape), strides, dtype=dtype)


@dataclass
class Pair:
    """The two copies of one save: this rank's own state, and its partner's (`spare`)."""

    own: Copy = field(default_factory=Copy)
    spare: Copy = field(default_factory=Copy)

    @property
    def copies(self) -> list[Copy]:
        """The copies of this pair that hold a complete save."""
        return [copy for copy in (self.own, self.spare) if copy.serial is not None]


@dataclass
class CopyStore:
    """All copies that this rank keeps under one name of `dist_state`."""

    pairs: tuple[Pair, Pair] = field(default_factory=lambda: (Pair(), Pair()))
    owner: Callable[[], torch.nn.Module | None] = lambda: None
    """Returns the model that was saved or restored last, or None if it no longer exists."""
    cell: int | None = None
    """Number of the cell that saved or restored it last."""

    @property
    def copies(self) -> list[Copy]:
        """The copies with a complete save, of this rank and of its partners."""
        return [copy for pair in self.pairs for copy in pair.copies]

    @property
    def held(self) -> list[Held]:
        """Serial, rank and group size of each complete copy."""
        return [(copy.serial or 0, copy.rank, copy.size) for copy in self.copies]

    def pair_to_overwrite(self, needed: int | None) -> Pair:
        """Invalidate and return the pair that may be overwritten; the other pair has the `needed` save."""
        first, second = self.pairs
        pair = second if any(copy.serial == needed for copy in first.copies) else first
        pair.own.serial = pair.spare.serial = None
        return pair

    def drop_newer(self, serial: int) -> None:
        """Invalidate copies newer than `serial`, which failed saves have left."""
        for copy in self.copies:
            if copy.serial is not None and copy.serial > serial:
                copy.serial = None


def complete_saves(held: list[list[Held]]) -> dict[int, Holders]:
    """Return the saves for which some rank holds each rank's copy, with the holders, by serial.

    `held`: by rank, the copies that it holds (`CopyStore.held`).

    >>> complete_saves([[(4, 0, 2), (4, 1, 2), (5, 0, 2)], [(4, 1, 2)]])
    {4: {0: [0], 1: [0, 1]}}
    """
    return {serial: holders for serial, (size, holders) in _holders_by_save(held).items() if len(holders) == size}


def missing_ranks(held: list[list[Held]]) -> str:
    """Return a text that names the ranks whose copies of the newest save are lost.

    Some rank must hold a copy. `held` as in `complete_saves`.
    """
    size, holders = max(_holders_by_save(held).items())[1]
    return f"rank {', '.join(str(rank) for rank in range(size) if rank not in holders)} of {size}"


def _holders_by_save(held: list[list[Held]]) -> dict[int, tuple[int, Holders]]:
    saves: dict[int, tuple[int, Holders]] = {}
    for holder, copies in enumerate(held):
        for serial, rank, size in copies:
            saves.setdefault(serial, (size, {}))[1].setdefault(rank, []).append(holder)
    return saves


def fewest_copies(holders: Holders) -> int:
    """Return the smallest number of copies that exist of any rank's state.

    `holders`: the ranks with a copy, by rank.
    """
    return min(map(len, holders.values()))


def needed_save(saves: dict[int, Holders], wanted: int) -> int | None:
    """Return the serial of the save that must survive the next one; None if there is none.

    It is the newest with `wanted` copies of each rank's state, or else the newest with the most.

    >>> needed_save({4: {0: [0, 1], 1: [0, 1]}, 5: {0: [0], 1: [1]}}, 2)
    4
    """
    return max(saves, key=lambda serial: (min(fewest_copies(saves[serial]), wanted), serial), default=None)


def from_all(value: T) -> list[T]:
    """Gather `value` of every rank; return the list by rank. All ranks must call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mirror_copy(own: Copy, former: Copy) -> Copy:
    """Send this rank's copy to the rank half the group further, and return the copy that it receives.

    Therefore the first half of the ranks has the state of all ranks if the group shrinks, and each of two hosts has the
    state of the other. The received copy reuses the memory of the `former` one. Parts with equal fingerprints, such as
    almost all of a DDP replica, are neither sent nor stored twice. All ranks must call this.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    receiver, partner = (rank + size // 2) % size, (rank - size // 2) % size
    own_outline = own.outline()
    headers = from_all((own.step, own_outline))
    step, outline = headers[partner]
    received = Copy(None, step, partner, size)
    same_here, same_there = _equal_parts(own_outline, outline), _equal_parts(own_outline, headers[receiver][1])
    memory = {name: part for name, part in former.parts.items() if not _shares_memory(part, own.parts.get(name))}
    for name, header in outline.items():
        received.parts[name] = own.parts[name] if name in same_here else header.allocate_part(memory.get(name))
    _exchange_parts([(receiver, _parts_except(own, same_there))], [(partner, _parts_except(received, same_here))])
    received.serial = own.serial
    return received


def _equal_parts(outline: Outline, other: Outline) -> set[str]:
    """Return the names of parts with the same description and fingerprint in both outlines."""
    return {name for name, entry in outline.items() if entry.fingerprint is not None and entry == other.get(name)}


def _shares_memory(part: Part, own: Part | None) -> bool:
    return own is not None and part.values is own.values


def _parts_except(copy: Copy, names: Collection[str]) -> list[Part]:
    return [part for name, part in copy.parts.items() if name not in names]


def fetch_copy(copies: dict[int, Copy], holders: dict[int, int]) -> Copy:
    """Return the copy of this rank's state, and fetch it from its holder if this is a new rank.

    All ranks must call this. `copies` has the copies on this rank by the rank that saved them. `holders` has, by that
    rank, the rank that sends the copy.
    """
    rank = dist.get_rank()
    outgoing = {saver: copies[saver] for saver, holder in holders.items() if holder == rank and saver != rank}
    if all(saver == holder for saver, holder in holders.items()):
        return copies[rank]
    headers = from_all({saver: (copy.serial, copy.step, copy.size, copy.outline()) for saver, copy in outgoing.items()})
    incoming = []
    if holders[rank] != rank:
        serial, step, size, outline = headers[holders[rank]][rank]
        copies[rank] = Copy(serial, step, rank, size)
        copies[rank].parts = {name: header.allocate_part(None) for name, header in outline.items()}
        incoming = [(holders[rank], _parts_except(copies[rank], ()))]
    _exchange_parts([(saver, _parts_except(copy, ())) for saver, copy in outgoing.items()], incoming)
    return copies[rank]


def _exchange_parts(outgoing: list[tuple[int, list[Part]]], incoming: list[tuple[int, list[Part]]]) -> None:
    """Send parts to ranks, and receive parts of others into existing memory; small ones share a message."""
    works, received = [], []
    for receiver, parts in outgoing:
        small, large = _split_by_size(parts)
        data = [*large, *([torch.cat(small)] if small else [])]
        works += [dist.isend(message, receiver, tag=tag) for tag, message in enumerate(data)]
    for source, parts in incoming:
        small, large = _split_by_size(parts)
        joined = torch.empty(sum(map(len, small)), dtype=torch.uint8)
        data = [*large, *([joined] if small else [])]
        works += [dist.irecv(message, source, tag=tag) for tag, message in enumerate(data)]
        received.append((small, joined))
    for work in works:
        assert work is not None
        work.wait()
    for small, joined in received:
        for values, data in zip(small, joined.split(list(map(len, small))), strict=True):
            values.copy_(data)


def _split_by_size(parts: list[Part]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the bytes of small parts, which share a message, and of large ones; empty parts are left out."""
    values = [part.data for part in parts if part.values.numel()]
    return [data for data in values if len(data) < SMALL], [data for data in values if len(data) >= SMALL]
