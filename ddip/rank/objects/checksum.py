"""Checksums of tensors, arrays and long lists, to compare them across ranks."""

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
"""64-bit words that are summed into one row, before the row's sum is weighted by its position."""
PART_BYTES = 8 << 20
"""Bytes that are summed between two points at which a computation may pause; about 1 ms."""
PART_ITEMS, MOST_NESTED = 2048, 1 << 16
"""List items that are summed at once, and the limit for all items of the tuples and lists among them."""
PLAIN_IDS = frozenset(map(id, (int, float, complex, bool, str, bytes, type(None))))
NESTED_IDS = frozenset(map(id, (tuple, list)))
"""Ids of types; types themselves are not compared because a metaclass may define ``__eq__``."""
FREED = "<freed>"
WEIGHT = 2654435761
"""Knuth's multiplier, which makes the checksum depend on the order of the rows."""


def tensor_checksums(tensors: list[Tensor]) -> tuple[int | None, ...]:
    """Return a checksum for each tensor; equal tensors have equal checksums on any device."""
    return tuple(Checksum(tensor).finish() for tensor in tensors)


class Checksum:
    """A sum of a tensor's bits as 64-bit integers, weighted by position.

    It is exact in whatever order a device adds. It takes one pass over the memory without a wider copy (20 ms for 0.4
    GB), and does not detect a permutation within a row of 8 KiB. `total` is None for a tensor without memory (meta) or
    with an opaque layout (mkldnn).
    """

    def __init__(self, tensor: Tensor) -> None:
        memory = _memory_of(tensor.detach())
        self.total: int | None = 0 if memory else None
        self._memory = [part for part in memory if part.numel() > 0]
        self.is_freed = any(map(_is_freed, self._memory))
        """True if its memory was freed, as FSDP does with gathered parameters; it must not be read then."""

    def finish(self) -> int | None:
        """Compute the checksum without a pause and return it."""
        for _ in self.parts:
            pass
        return self.total

    @property
    def parts(self) -> Iterator[None]:
        """Compute the checksum, one step per iteration; `total` is complete after the last one."""
        for tensor in () if self.is_freed else self._memory:
            yield from self._add_tensor(*_as_integers(tensor))

    def _add_tensor(self, flat: Tensor, per_word: int) -> Iterator[None]:
        whole = flat.numel() // (per_word * ROW) * (per_word * ROW)
        step = PART_BYTES // flat.element_size()
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for begin in range(0, whole, step):
            rows = flat[begin : min(begin + step, whole)].view(torch.int64).view(-1, ROW).sum(1)
            first = begin // (per_word * ROW)
            positions = torch.arange(first, first + rows.numel(), device=flat.device)
            total += (rows * (positions * WEIGHT + 1)).sum()
            if begin + step < whole:
                yield
        if whole < flat.numel():
            tail = flat[whole:].to(torch.int64)
            total += ((tail + 7) * (torch.arange(tail.numel(), device=flat.device) * WEIGHT + 5)).sum()
        self.total = ((self.total or 0) * WEIGHT + int(total)) % (1 << 63)


def _memory_of(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that hold the values of `tensor`; none if it has no memory to read."""
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


def _as_integers(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the elements as a flat integer tensor, and how many of them make 64 bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().contiguous().reshape(-1)
    flat = tensor.view(AS_INTEGERS[tensor.element_size()])
    per_word = 8 // flat.element_size()
    return flat.clone() if flat.storage_offset() % per_word else flat, per_word


class BytesSum:
    """A CRC-32 of the bytes of a NumPy array, computed in parts that copy `PART_BYTES` at most."""

    def __init__(self, array: Any) -> None:
        self.total = 0
        self._array = array

    def finish(self) -> int:
        """Compute the checksum without a pause and return it."""
        for _ in self.parts:
            pass
        return self.total

    @property
    def parts(self) -> Iterator[None]:
        """Compute the checksum, one step per iteration; `total` is complete after the last one."""
        flat = self._array.reshape(-1) if self._array.flags.c_contiguous else self._array.flat
        step = max(1, PART_BYTES // max(1, self._array.itemsize))
        for begin in range(0, self._array.size, step):
            self.total = zlib.crc32(flat[begin : begin + step].tobytes(), self.total)
            yield


class ItemsSum:
    """A checksum of a long list of numbers, texts and tuples of them, computed in parts.

    No code of the items runs. `total` is None if the list has any other item.
    """

    def __init__(self, items: list[Any], is_ordered: bool) -> None:
        self.total: int | None = None
        self._items, self._is_ordered = items, is_ordered

    def finish(self) -> int | None:
        """Compute the checksum without a pause and return it."""
        for _ in self.parts:
            pass
        return self.total

    @property
    def parts(self) -> Iterator[None]:
        """Compute the checksum, one step per iteration; `total` is set after the last one.

        It stays None if an item is not plain.
        """
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


class ObjectsSum(ItemsSum):
    """A checksum of the items of a NumPy array of objects, computed as for a list."""

    def __init__(self, array: Any) -> None:
        super().__init__(array.reshape(-1).tolist(), is_ordered=True)


def _are_plain(items: list[Any]) -> bool:
    """Return whether `items` are numbers and texts, or tuples and lists of these.

    The tuples and lists may have `MOST_NESTED` items at most, all together.
    """
    found = set(map(id, map(type, items)))
    if not found & NESTED_IDS:
        return found <= PLAIN_IDS
    nested = [item for item in items if id(type(item)) in NESTED_IDS]
    if not found <= PLAIN_IDS | NESTED_IDS or sum(map(len, nested)) > MOST_NESTED:
        return False
    return set(map(id, map(type, itertools.chain.from_iterable(nested)))) <= PLAIN_IDS
