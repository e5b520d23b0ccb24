"""Read the pickled variables of a save one after the other, also after one that cannot be unpickled.

The pickles share a memo: an object of a former variable is a number in a later one. After an error, the numbers of the
failed variable stay taken. Texts, modules, and the functions and classes of modules are still found by their names;
variables that use another of these numbers fail as well, because they hold a part of the failed variable.
"""

from __future__ import annotations

import importlib
import io
import itertools
import operator
import pickle
import pickletools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import cloudpickle

Recipe: TypeAlias = "Callable[[], Any] | None"
"""Function that finds an object again; None if only its variable has the object."""
IMPORT_MODULE: Any = cloudpickle.cloudpickle.subimport
"""Function with which modules are unpickled."""


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
        self._recipes: dict[int, Callable[[], Any]] = {}
        """Recipes for some of these numbers."""
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
        used = [int(argument) for opcode, argument in self._opcodes(name) if opcode.endswith("GET")]
        for number in self._recipes.keys() & used:
            try:
                self._unpickler.memo[number] = self._recipes.pop(number)()
                del self._lost[number]
            except Exception:  # such as a class of a module that no longer exists
                continue
        return next((self._lost[number] for number in used if number in self._lost), "")

    def skip(self, name: str) -> None:
        """Continue after `name`, the next variable; its numbers in the memo are lost, but for those with a recipe."""
        at = self._names.index(name)
        first = sum(map(self._memoized, self._names[:at]))
        numbers = range(first, first + self._memoized(name))
        self._lost |= dict.fromkeys(numbers, name)
        if at + 1 < len(self._names):
            known = self._unpickler.memo.copy()
            self._add_recipes(name, first, known)
            self._unpickler = self._read_from(self._names[at + 1], pickle._Unpickler)  # type: ignore[attr-defined]
            self._unpickler.memo = {n: None if n in self._lost else known[n] for n in range(numbers.stop)}  # not in C

    def _add_recipes(self, name: str, first: int, known: Mapping[int, Any]) -> None:
        """Add recipes for the objects of a failed variable, whose numbers in the memo begin with `first`."""
        number, top = first, list[Recipe]()
        for opcode, argument in self._opcodes(name):
            if opcode == "MEMOIZE":
                if top[-1] is not None:
                    self._recipes[number] = top[-1]
                number += 1
            elif opcode.endswith("GET"):
                is_lost = int(argument) in self._lost
                top.append(self._recipes.get(int(argument)) if is_lost else partial(known.__getitem__, int(argument)))
            elif opcode not in ("FRAME", "PROTO"):
                _follow_opcode(top, opcode, argument)


def _follow_opcode(top: list[Recipe], opcode: str, argument: Any) -> None:
    """Follow an opcode with the recipes for the `top` of the stack.

    Those below a value without a recipe are dropped.
    """
    match opcode, top:
        case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8", _:
            top.append(partial(str, argument))
        case "TUPLE1", [*_, item] if item is not None:
            top[-1] = partial(_tuple_of, item)
        case "STACK_GLOBAL", [*_, module, name] if module is not None and name is not None:
            top[-2:] = [partial(_find_global, module, name)]
        case "REDUCE", [*_, function, args] if function is not None and args is not None:
            top[-2:] = [partial(_import_again, function, args)]
        case _:
            top[:] = [None]


def _tuple_of(item: Callable[[], Any]) -> tuple[Any]:
    return (item(),)


def _find_global(module: Callable[[], str], name: Callable[[], str]) -> Any:
    return operator.attrgetter(name())(importlib.import_module(module()))


def _import_again(function: Callable[[], Any], args: Callable[[], Any]) -> Any:
    """Import a module as unpickling does; raises LookupError for the result of any other function."""
    if function() is not IMPORT_MODULE:
        raise LookupError
    return IMPORT_MODULE(*args())
