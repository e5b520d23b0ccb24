"""Have objects refuse to work that hold the rank or the size of a group that has changed its size.

One rule for all libraries: an attribute that is 0 on rank 0, 1 on rank 1 and so on is a rank, and an attribute of the
same object that is the number of ranks is the size. A sampler with the former size would leave out a part of the data,
without a word. Whoever reads one of the two gets an error that says what to do; whoever sets it goes on.
"""

from __future__ import annotations

from typing import Any

from ddip.rank.inspection.kinds import instance_dict, is_heap_type
from ddip.rank.inspection.state_history import history
from ddip.rank.inspection.state_report import hash_of
from ddip.rank.inspection.walk import Path, Walk

STALE = "this {kind} was made for a group of {size} ranks ({name}), and the group has changed its size: recreate it"


def rank_marks(rank: int) -> list[int]:
    """Return the hashes of the attributes that are the number of this rank."""
    walk = history.walk_now(checksums=False, keep=True)
    return [hash_of(path) for path in _attributes(walk) if _is_number(walk.values.get(path), rank)]


def refuse_stale(marks: list[int], size: int) -> list[str]:
    """Make objects refuse to work that have one of these attributes, and another that is the former `size`.

    Returns their paths.
    """
    walk = history.walk_now(checksums=False, keep=True)
    ranks, holders = set(marks), dict[Path, list[str]]()
    attributes = _attributes(walk)
    for path in attributes:
        if hash_of(path) in ranks:
            holder, _, key = walk.links[path]
            holders.setdefault(holder, []).append(key)
    found = []
    for holder, names in holders.items():
        sizes = [
            walk.links[path][2]
            for path in attributes
            if walk.links[path][0] == holder and _is_number(walk.values.get(path), size)
        ]
        if sizes and _refuse(walk.objects[holder], sizes, names, size):
            found.append(holder)
    return sorted(found)


def _attributes(walk: Walk) -> list[Path]:
    """Return the paths of the numbers that objects hold as attributes."""
    return [path for path, (holder, how, _) in walk.links.items() if how == "attribute" and holder in walk.objects]


def _is_number(value: Any, number: int) -> bool:
    return type(value) is int and value == number


def _refuse(value: Any, sizes: list[str], ranks: list[str], size: int) -> bool:
    """Put properties that raise in the place of these attributes of `value`; return whether that is possible."""
    kind = type(value)
    if not is_heap_type(kind) or instance_dict(value) is None:
        return False
    text = STALE.format(kind=kind.__name__, size=size, name=f"{sizes[0]}={size}")
    names = [*sizes, *(name for name in ranks if name not in sizes)]
    attributes = {name: _property(name, text, kind) for name in names}
    made = type(kind.__name__, (kind,), {"__module__": kind.__module__, **attributes})
    try:
        value.__class__ = made
    except TypeError:  # its memory is laid out in another way
        return False
    return True


def _property(name: str, text: str, kind: type) -> property:
    def refuse(self: Any) -> Any:
        raise RuntimeError(text)

    def take(self: Any, new: Any) -> None:
        self.__class__ = kind
        setattr(self, name, new)

    return property(refuse, take)
