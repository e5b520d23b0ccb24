"""Compare tensors across ranks by a number for each."""

from __future__ import annotations

import itertools
import marshal
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROW = 1024
"""Numbers of 64 bits that are summed before the sum is weighted by its place."""
PART_BYTES = 8 << 20
"""Bytes that are summed between two points at which a computation may pause: about 1 ms."""
PART_ITEMS, MOST_NESTED = 2048, 1 << 16
"""Items of a list that are summed at once, and how many these may have in turn."""
PLAIN_IDS = frozenset(map(id, (int, float, complex, bool, str, bytes, type(None))))
NESTED_IDS = frozenset(map(id, (tuple, list)))
"""Types by their ids: a metaclass may have an ``__eq__`` of its own."""
FREED = "<freed>"
WEIGHT = 2654435761
"""Knuth's multiplier: sums of rows at different places count differently."""


def checksum(tensors: list[Tensor]) -> tuple[int | None, ...]:
    """Return a number for each tensor; equal tensors have equal numbers on any device."""
    return tuple(Checksum(tensor).finish() for tensor in tensors)


class Checksum:
    """A sum of a tensor's bits as 64-bit integers, weighted by place: exact, in whatever order a device adds.

    One pass over the memory, without a wider copy: 20 ms for 0.4 GB. A permutation within a row of 8 KiB is not seen.
    `total` is None for a tensor without memory of its own (meta) or in a layout of a library (mkldnn).
    """

    def __init__(self, tensor: Tensor) -> None:
        memory = _memory_of(tensor.detach())
        self.total: int | None = 0 if memory else None
        self._memory = [one for one in memory if one.numel() > 0]
        self.is_freed = any(map(_is_freed, self._memory))
        """Whether its memory was given back, as FSDP does with whole parameters: it must not be read."""

    def finish(self) -> int | None:
        """Compute it without a pause."""
        for _ in self.parts:
            pass
        return self.total

    @property
    def parts(self) -> Iterator[None]:
        """Compute it; yield where it may pause."""
        for tensor in () if self.is_freed else self._memory:
            yield from self._add(*_integers(tensor))

    def _add(self, flat: Tensor, per_word: int) -> Iterator[None]:
        whole = flat.numel() // (per_word * ROW) * (per_word * ROW)
        step = PART_BYTES // flat.element_size()
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for begin in range(0, whole, step):
            rows = flat[begin : min(begin + step, whole)].view(torch.int64).view(-1, ROW).sum(1)
            first = begin // (per_word * ROW)
            places = torch.arange(first, first + rows.numel(), device=flat.device)
            total += (rows * (places * WEIGHT + 1)).sum()
            if begin + step < whole:
                yield
        if whole < flat.numel():
            tail = flat[whole:].to(torch.int64)
            total += ((tail + 7) * (torch.arange(tail.numel(), device=flat.device) * WEIGHT + 5)).sum()
        self.total = ((self.total or 0) * WEIGHT + int(total)) % (1 << 63)


def _memory_of(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that have the values of `tensor`."""
    if tensor.device.type == "meta":
        return []
    match tensor.layout:
        case torch.strided:
            return [tensor.int_repr() if tensor.is_quantized else tensor.as_subclass(Tensor)]
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _is_freed(tensor: Tensor) -> bool:
    needed = tensor.numel() * tensor.element_size() if tensor.is_contiguous() else 1
    return tensor.untyped_storage().nbytes() < needed


def _integers(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the elements as integers in one dimension, and how many make 64 bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().contiguous().reshape(-1)
    flat = tensor.view(AS_INTEGERS[tensor.element_size()])
    per_word = 8 // flat.element_size()
    return flat.clone() if flat.storage_offset() % per_word else flat, per_word


class BytesSum:
    """A checksum of the bytes of a NumPy array, in parts; no part is a copy of more than `PART_BYTES`."""

    def __init__(self, array: Any) -> None:
        self.total = 0
        self._array = array

    def finish(self) -> int:
        """Compute it without a pause."""
        for _ in self.parts:
            pass
        return self.total

    @property
    def parts(self) -> Iterator[None]:
        """Compute it; yield where it may pause."""
        flat = self._array.reshape(-1) if self._array.flags.c_contiguous else self._array.flat
        step = max(1, PART_BYTES // max(1, self._array.itemsize))
        for begin in range(0, self._array.size, step):
            self.total = zlib.crc32(flat[begin : begin + step].tobytes(), self.total)
            yield


class ItemsSum:
    """A checksum of a long list of numbers, texts and tuples of them, in parts; no code of the items runs.

    `total` is None if there is anything else among them.
    """

    def __init__(self, items: list[Any], is_ordered: bool) -> None:
        self.total: int | None = None
        self._items, self._is_ordered = items, is_ordered

    @property
    def parts(self) -> Iterator[None]:
        """Compute it; yield where it may pause."""
        total = 0
        for begin in range(0, len(self._items), PART_ITEMS):
            part = self._items[begin : begin + PART_ITEMS]
            if not _are_plain(part):
                return
            if self._is_ordered:
                total = zlib.crc32(marshal.dumps(part, 2), total)
            else:
                total += sum([zlib.crc32(marshal.dumps(item, 2)) for item in part])
            yield
        self.total = total


def _are_plain(items: list[Any]) -> bool:
    """Return whether these are numbers and texts, or tuples and lists of some: not large, and without code."""
    found = set(map(id, map(type, items)))
    if not found & NESTED_IDS:
        return found <= PLAIN_IDS
    nested = [item for item in items if id(type(item)) in NESTED_IDS]
    if not found <= PLAIN_IDS | NESTED_IDS or sum(map(len, nested)) > MOST_NESTED:
        return False
    return set(map(id, map(type, itertools.chain.from_iterable(nested)))) <= PLAIN_IDS
