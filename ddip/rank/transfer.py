"""Objects in and out of the namespace of this rank.

What is large comes and goes in parts, so that a person sees it go on, and no copy of the whole is made on the way. What
is pushed to several ranks of one host is in memory once there: each of them has it as its own, and what a rank changes
is copied before (``protocol/shared.py``). What the notebook pulls from a rank beside it is in memory once, too.

All names of a push arrive on all ranks, or none does, in one message to each: a rank that could unpickle all of it puts
it into the namespace at once, and keeps what was there before, until the notebook knows of all ranks. Where one could
not, the others put that back.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any, TypeAlias

from ddip.protocol import pickling, shared
from ddip.protocol.pickling import Pickled
from ddip.protocol.reports import Packed, Paths, Place, Put
from ddip.protocol.shared import SharedBytes
from ddip.protocol.text import readable
from ddip.rank import namespace
from ddip.rank.housekeeping import cells
from ddip.rank.wrappers import WRAPPERS

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


def put(push: int, places: dict[str, Place], small: bytes | bytearray = b"", paths: Paths | None = None) -> Put:
    """Unpickle what has come, of which `places` says where it lies, and put it into the namespace, if all of it can be.

    `small` is all of it, as load 0, where it is not worth a way of its own; `paths` say where another process of this
    host has the loads. What it replaces is kept until `settle`, or until something else comes or goes; until then
    `drop` brings it back, by the number of the `push`.
    """
    global _push
    settle()
    _push = push
    if small:
        _arriving[0] = bytearray(small)
    if not all(attach(load, path, size) for load, (path, size) in (paths or {}).items()):
        drop()
        return {"errors": {}, "unread": True, "replaces": False}
    loads, values, errors = _taken(), dict[str, Any](), dict[str, str]()
    for name, (load, begin, sizes) in places.items():
        try:
            came = Pickled.of(loads[load], sizes, begin)
            values[name] = (Pickled.of(came.joined(), sizes) if len(loads[load]) <= shared.COPIED else came).load()
        except KeyboardInterrupt:
            drop()
            raise
        except BaseException as error:
            errors[name] = readable(f"{type(error).__name__}: {error}")
    if not errors:
        here = namespace()
        _before.update({name: here.get(name, _nothing) for name in values})
        here.update(values)
    return {"errors": errors, "unread": False, "replaces": any(_is_heavy(value) for value in _before.values())}


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


def pack(names: list[str], most: int, share: bool) -> Packed:
    """Pickle `names`; with errors by name, the missing names, and those moved to the CPU.

    What is longer than `most` bytes stays here until `drop`: for the notebook to read in `paths`, to `share` it, or for
    `part`.
    """
    drop()
    here = namespace()
    missing = [name for name in names if name not in here]
    packed, errors, moved = pickling.dump_all({name: here[name] for name in names if name in here})
    if errors or missing:
        packed = {}  # nothing is taken
    large = [name for name, pickled in packed.items() if pickled.size > most]
    for name in large:
        _leaving[name] = _laid(packed[name], share)
    return {
        "values": {name: pickled.joined() for name, pickled in packed.items() if name not in large},
        "sizes": {name: pickled.sizes for name, pickled in packed.items()},
        "paths": {name: there.path for name, there in _leaving.items() if isinstance(there, SharedBytes)},
        "errors": errors,
        "missing": missing,
        "moved": moved,
        "wrappers": {name: kind for name in names if name in here and (kind := wrapper_of(here[name]))},
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
