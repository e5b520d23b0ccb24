"""Read the pickled variables of a save one after the other, also after one that cannot be unpickled.

The pickles share a memo: an object of a former variable is a number in a later one. After an error, the numbers of the
failed variable stay taken, and variables that use one of them fail as well, because they hold a part of it.
"""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from typing import Any


class PickledParts:
    """The pickles of several variables with one memo, to be read in their order.

    Parameters
    ----------
    stream
        All pickles, one after the other.
    sizes
        Bytes of each pickle, by the variable's name.
    buffers
        Out-of-band buffers of each pickle, by the variable's name.
    """

    def __init__(
        self, stream: bytes | bytearray, sizes: Mapping[str, int], buffers: Mapping[str, Sequence[Any]]
    ) -> None:
        self._stream, self._names, self._buffers = memoryview(stream), [*sizes], buffers
        self._ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
        self._sizes = sizes
        self._lost: dict[int, str] = {}
        """Numbers in the memo that failed variables have taken, with the variable's name."""
        self._unpickler: Any = self._read_from(self._names[0], pickle.Unpickler) if sizes else None

    def load(self, name: str) -> Any:
        """Unpickle the variable `name`, the next one; if that raises, the one after it can still be loaded."""
        try:
            if self._lost and (holder := self._lost_part_of(name)):
                raise ValueError(f"it holds a part of {holder}")
            return self._unpickler.load()
        except Exception:
            self.skip(name)
            raise

    def _read_from(self, name: str, unpickler_class: Any) -> Any:
        """Return an unpickler of `name` and the variables after it."""
        buffers = itertools.chain.from_iterable(self._buffers[n] for n in self._names[self._names.index(name) :])
        return unpickler_class(io.BytesIO(self._stream[self._ends[name] - self._sizes[name] :]), buffers=buffers)

    def _opcodes(self, name: str) -> list[tuple[str, Any]]:
        end = self._ends[name]
        pickled = self._stream[end - self._sizes[name] : end]
        return [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(bytes(pickled))]

    def _memoized(self, name: str) -> int:
        return sum(opcode == "MEMOIZE" for opcode, _ in self._opcodes(name))

    def _lost_part_of(self, name: str) -> str:
        """Return the failed variable of which `name` takes a part from the memo; empty if there is none."""
        used = (self._lost.get(int(argument), "") for opcode, argument in self._opcodes(name) if opcode.endswith("GET"))
        return next(filter(None, used), "")

    def skip(self, name: str) -> None:
        """Continue after `name`, the next variable; its numbers in the memo are lost."""
        at = self._names.index(name)
        first = sum(map(self._memoized, self._names[:at]))
        numbers = range(first, first + self._memoized(name))
        self._lost |= dict.fromkeys(numbers, name)
        if at + 1 < len(self._names):
            known = self._unpickler.memo.copy()
            self._unpickler = self._read_from(self._names[at + 1], pickle._Unpickler)  # type: ignore[attr-defined]
            self._unpickler.memo = {n: None if n in self._lost else known[n] for n in range(numbers.stop)}  # not in C
