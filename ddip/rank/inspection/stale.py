"""Make objects raise an error if they hold the rank or the size of a group that has changed its size.

One heuristic serves all libraries: an attribute that is 0 on rank 0, 1 on rank 1 and so on is a rank, and an attribute
of the same object that equals the number of ranks is the group's size. A sampler with the former size would silently
skip a part of the data. In a group of one rank, any 0 and 1 would match, so the names of the attributes must fit, too.
Reading one of the attributes raises an error that says what to do; setting one makes the object usable again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ddip.rank.inspection.kinds import instance_dict, is_heap_type
from ddip.rank.inspection.state_history import history
from ddip.rank.inspection.state_report import hash_of, variable_of
from ddip.rank.inspection.walk import Path, Walk

RANK_NAMES, SIZE_NAMES = re.compile("rank|shard|proc"), re.compile("world|replica|ranks|shard|proc|^size$")
"""Names of attributes that hold a rank, and a number of ranks."""
STALE = "this {kind} was made for a group of {size} ranks ({name}), and the group has changed its size: recreate it"


def rank_marks(rank: int) -> list[int]:
    """Return the path hashes of attributes that equal this `rank`, as candidates for rank attributes."""
    walk = history.walk_now(checksums=False, keep=True)
    return [hash_of(path) for path in _attribute_paths(walk) if _is_number(walk.values.get(path), rank)]


def refuse_stale(marks: list[int], size: int) -> list[str]:
    """Make objects of the former group raise errors when their rank or size is read.

    They have a rank attribute and an attribute equal to the former `size`. `marks` has the path hashes of rank
    attributes, from `rank_marks` in the former group. Returns the paths of the objects, sorted.
    """
    walk = history.walk_now(checksums=False, keep=True)
    hashes = set(marks)
    found = _find_holders(walk, lambda path: hash_of(path) in hashes, size, by_name=size == 1)
    return sorted(
        holder for holder, (names, sizes) in found.items() if _make_unusable(walk.objects[holder], sizes, names, size)
    )


def find_copied_ranks(names: list[str], source: int, size: int) -> list[str]:
    """Return the attributes that hold the rank `source` of their copy, in the variables `names`.

    They are sorted. Their objects also have an attribute for the number of ranks, which is `size`.
    """
    walk = history.walk_now(checksums=False, keep=True, known=names)
    found = _find_holders(walk, lambda path: _is_number(walk.values.get(path), source), size, by_name=True)
    holders = {holder: ranks for holder, (ranks, _) in found.items() if variable_of(holder) in names}
    return sorted(f"{holder}.{name}" for holder, ranks in holders.items() for name in ranks)


def _find_holders(
    walk: Walk, is_rank: Callable[[Path], bool], size: int, by_name: bool
) -> dict[Path, tuple[list[str], list[str]]]:
    """Return the objects with a rank and a number of ranks, by path, and the attributes of both.

    `is_rank` selects paths of the former; the latter equal `size`. `by_name`: their names must also say so.
    """
    ranks, sizes = dict[Path, list[str]](), dict[Path, list[str]]()
    for path in _attribute_paths(walk):
        holder, _, key = walk.links[path]
        if is_rank(path) and (not by_name or RANK_NAMES.search(key)):
            ranks.setdefault(holder, []).append(key)
        if _is_number(walk.values.get(path), size) and (not by_name or SIZE_NAMES.search(key)):
            sizes.setdefault(holder, []).append(key)
    return {holder: (names, sizes[holder]) for holder, names in ranks.items() if holder in sizes}


def _attribute_paths(walk: Walk) -> list[Path]:
    """Return the paths of all attributes of objects."""
    return [path for path, (holder, how, _) in walk.links.items() if how == "attribute" and holder in walk.objects]


def _is_number(value: Any, number: int) -> bool:
    return type(value) is int and value == number


def _make_unusable(value: Any, sizes: list[str], ranks: list[str], size: int) -> bool:
    """Replace attributes of `value` with properties that raise; return False if its class prevents it.

    `sizes`, `ranks`: names of the attributes that hold the former group's `size`, and the rank.
    """
    kind = type(value)
    if not is_heap_type(kind) or instance_dict(value) is None:
        return False
    text = STALE.format(kind=kind.__name__, size=size, name=f"{sizes[0]}={size}")
    names = [*sizes, *(name for name in ranks if name not in sizes)]
    attributes = {name: _raising_property(name, text, kind) for name in names}
    subclass = type(kind.__name__, (kind,), {"__module__": kind.__module__, **attributes})
    try:
        value.__class__ = subclass
    except TypeError:  # the subclass has another memory layout
        return False
    return True


def _raising_property(name: str, text: str, kind: type) -> property:
    """Return a property that raises a RuntimeError if read, and restores the class `kind` if set."""

    def raise_error(self: Any) -> Any:
        raise RuntimeError(text)

    def set_value(self: Any, new: Any) -> None:
        self.__class__ = kind
        setattr(self, name, new)

    return property(raise_error, set_value)
