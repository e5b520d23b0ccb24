"""Objects in and out of the namespace of this rank.

What is large comes and goes in parts, so that a person sees it go on, and no copy of the whole is made on the way. What
is pushed to several ranks of one host is in memory once there: each of them has it as its own, and what a rank changes
is copied before (``protocol/objects/shared.py``). What the notebook pulls from a rank beside it is in memory once, too.

All names of a push arrive on all ranks, or none does, in one message to each: a rank that could unpickle all of it puts
it into the namespace at once, and keeps what was there before, until the notebook knows of all ranks. Where one could
not, the others put that back.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any, TypeAlias

from ddip.protocol.objects import pickling, shared
from ddip.protocol.objects.pickling import Loader, Pickled
from ddip.protocol.objects.shared import SharedBytes
from ddip.protocol.reports import Packed, Paths, Place, Put
from ddip.protocol.text import readable
from ddip.rank import namespace
from ddip.rank.objects import changes
from ddip.rank.objects.wrappers import WRAPPERS
from ddip.rank.runtime.housekeeping import cells

Memory: TypeAlias = "SharedBytes | bytearray | mmap.mmap"
AT_ONCE = 1 << 24
"""Bytes of one call of the system's, within which no stop is heard."""

LIGHT = (type(None), bool, int, float, complex, str, bytes)
"""Types of what may be kept for a while where it has been replaced."""

_push = 0
"""Number of the push that came last."""
_before: dict[str, Any] = {}
"""What it has replaced, until all ranks have it; `_nothing` where there was no such name."""
_nothing = object()
pickling.find_parts = changes.find_flat_storages
_arriving: dict[int, Memory] = {}
"""What is pushed, by the number of the load: of this rank alone, or shared with others of this host."""
_leaving: dict[str, SharedBytes | bytearray] = {}
"""Pickled objects that leave in parts, or that the notebook reads where they are."""


def add(load: int, part: bytes, first: bool, share: bool) -> str:
    """The next part of a load of pickled objects.

    Returns where others of this host can `attach` all of it, to `share` it; empty: nowhere.
    """
    if first:
        if not load:
            drop()
        _arriving[load] = _shared() if share else bytearray()
    there = _arriving[load]
    if isinstance(there, SharedBytes):
        there.write([part])
        return there.path
    assert isinstance(there, bytearray)
    there += part
    return ""


def _shared() -> SharedBytes | bytearray:
    try:
        return SharedBytes()
    except OSError:
        return bytearray()


def attach(load: int, path: str, size: int) -> bool:
    """Take a load of `size` bytes from where another process of this host has it; False: that cannot be."""
    if not load:
        drop()
    try:
        found = shared.view(path)
    except (OSError, ValueError):
        return False
    if len(found) != size:  # the path means something else here
        return False
    _arriving[load] = found
    return True


def lacking(names: list[str]) -> list[str]:
    """Those of `names` that functions read, and that are not here."""
    here = namespace()
    return [name for name in names if pickling.lacks(here, name)]


def put(
    push: int, places: list[Place], along: list[str], small: bytes | bytearray = b"", paths: Paths | None = None
) -> Put:
    """Unpickle what has come, and put it into the namespace, if all of it can be; `places` say where it lies, in order.

    Names that only came `along` replace nothing. `small` is all of it, as load 0, where it is not worth a way of its
    own; `paths` say where another process of this host has the loads. What it replaces is kept until `settle`, or until
    something else comes or goes; until then `drop` brings it back, by the number of the `push`.
    """
    global _push
    settle()
    _push = push
    if small:
        _arriving[0] = bytearray(small)
    if not all(attach(load, path, size) for load, (path, size) in (paths or {}).items()):
        drop()
        return {"errors": {}, "unread": True, "replaces": False}
    loads, errors = _taken(), dict[str, str]()
    pickled = {name: _lying(loads[load], begin, sizes) for name, load, begin, sizes in places}
    loader = Loader(pickled)
    here = namespace()
    for name in pickled:
        try:
            value = loader.load(name)
        except KeyboardInterrupt:
            drop(push)
            raise
        except BaseException as error:  # of a user's class; it is the answer
            errors[name] = readable(f"{type(error).__name__}: {error}")
            drop(push)
            break
        _before[name] = here.get(name, _nothing)
        if name in along:
            pickling.bring(here, {name: value})
        else:
            here[name] = value  # the next may have code that reads it
    return {"errors": errors, "unread": False, "replaces": any(_is_heavy(value) for value in _before.values())}


def _lying(memory: bytearray | mmap.mmap, begin: int, sizes: list[int]) -> Pickled:
    came = Pickled.of(memory, sizes, begin)
    return Pickled.of(came.joined(), sizes) if len(memory) <= shared.COPIED else came


def _is_heavy(value: object) -> bool:
    """May it be large, or hold something that is to be let go of soon?"""
    return value is not _nothing and (type(value) not in LIGHT or sys.getsizeof(value) > pickling.INLINE)


def settle() -> None:
    """All ranks have what was pushed: let go of what it has replaced, as after a cell."""
    if _before:
        with cells.letting_go():
            _before.clear()


def _taken() -> dict[int, bytearray | mmap.mmap]:
    """All that has come, which is gone when no object has it for its memory any more."""
    came = {load: there.view() if isinstance(there, SharedBytes) else there for load, there in _arriving.items()}
    _let_go()
    return came


def _let_go() -> None:
    """Of what has come."""
    for there in _arriving.values():
        if isinstance(there, SharedBytes):
            there.close()
    _arriving.clear()


def drop(push: int = 0) -> None:
    """Forget what has come, and what was to leave; of the `push` with this number, what it has replaced comes back."""
    if push and push == _push:
        here = namespace()
        for name, value in _before.items():
            if value is _nothing:
                here.pop(name, None)
            else:
                here[name] = value
    settle()
    for there in _leaving.values():
        if isinstance(there, SharedBytes):
            there.close()
    _leaving.clear()
    _let_go()


def pack(names: list[str], most: int, share: bool, known: list[str]) -> Packed:
    """Pickle `names`; with errors by name, the missing names, and those moved to the CPU.

    What their functions read goes along, unless it is `known` to who gets it.
    What is longer than `most` bytes stays here until `drop`: for the notebook to read in `paths`, to `share` it, or for
    `part`.
    """
    drop()
    here = namespace()
    missing = [name for name in names if name not in here]
    found, has = {name: here[name] for name in names if name in here}, frozenset(known)
    told = pickling.dump_all(found, lambda read: [name for name in read if name not in has], here)
    packed = {} if missing else told.pickled  # nothing is taken
    large = [name for name, pickled in packed.items() if pickled.size > most]
    for name in large:
        _leaving[name] = _laid(packed[name], share)
    return {
        "values": {name: pickled.joined() for name, pickled in packed.items() if name not in large},
        "sizes": [(name, pickled.sizes) for name, pickled in packed.items()],
        "paths": {name: there.path for name, there in _leaving.items() if isinstance(there, SharedBytes)},
        "errors": told.errors,
        "missing": missing,
        "moved": told.moved,
        "along": told.along,
        "shares": told.shares,
        "wrappers": {name: kind for name, value in found.items() if (kind := wrapper_of(value))},
    }


def _laid(pickled: Pickled, share: bool) -> SharedBytes | bytearray:
    """Where it lies to be fetched."""
    there = _shared() if share else bytearray()
    if isinstance(there, bytearray):
        return pickled.joined()
    try:
        for portion in shared.portions(pickled.pieces(), AT_ONCE):
            there.write(portion)
    except OSError:  # there is no room
        there.close()
        return pickled.joined()
    except BaseException:
        there.close()
        raise
    return there


def wrapper_of(value: object) -> str:
    """Name of the wrapper that `value` is; empty if it is none."""
    kinds = (kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torch."))
    return next((kind for kind in kinds if kind in WRAPPERS.values()), "")


def part(name: str, begin: int, end: int) -> bytes:
    """A part of an object that `pack` keeps."""
    there = _leaving[name]
    return bytes(memoryview(there.view() if isinstance(there, SharedBytes) else there)[begin:end])
