"""Objects in and out of the namespace of this rank.

What is large comes and goes in parts, so that a person sees it go on, and no copy of the whole is made on the way. What
is pushed to several ranks of one host is in memory once there, where each of them reads it (``protocol/shared.py``).

A push has two steps, so that all names arrive on all ranks or none does: every rank unpickles into a waiting room, and
only when all could, every rank takes what waits there.
"""

from __future__ import annotations

import mmap
import pickle
from typing import Any

from ddip.protocol import pickling, shared
from ddip.protocol.reports import Packed
from ddip.protocol.shared import SharedBytes
from ddip.protocol.text import readable
from ddip.rank import namespace
from ddip.rank.wrappers import WRAPPERS

_waiting: dict[str, Any] = {}
_arriving: SharedBytes | bytearray = bytearray()
"""What comes in parts: pickled objects, one after the other."""
_arrived: mmap.mmap | None = None
"""The same, where another process of this host has it."""
_leaving: dict[str, bytes] = {}
"""Pickled objects that leave in parts."""


def add(part: bytes, first: bool, share: bool) -> str:
    """The next part of pickled objects; returns where others of this host can `attach` all of it, to `share` it."""
    global _arriving
    if first:
        drop()
        _arriving = _shared() if share else bytearray()
    if isinstance(_arriving, bytearray):
        _arriving += part
        return ""
    _arriving.write(part)
    return _arriving.path


def _shared() -> SharedBytes | bytearray:
    try:
        return SharedBytes()
    except OSError:
        return bytearray()


def attach(path: str, size: int) -> bool:
    """Take `size` bytes of pickled objects from where another process of this host has them; False: that cannot be."""
    global _arrived
    drop()
    try:
        found = shared.view(path)
    except (OSError, ValueError):
        return False
    if len(found) != size:  # the path means something else here
        return False
    _arrived = found
    return True


def stage(packed: dict[str, bytes | bytearray], places: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Unpickle `packed`, and what has come before, of which `places` has begin and end, into the waiting room.

    Returns the errors by name.
    """
    _waiting.clear()
    errors = {}
    with _taken() as came:
        parts = {name: came[begin:end] for name, (begin, end) in places.items()}
        for name, data in {**packed, **parts}.items():
            try:
                _waiting[name] = pickle.loads(data)
            except KeyboardInterrupt:
                drop()
                raise
            except BaseException as error:
                errors[name] = readable(f"{type(error).__name__}: {error}")
    if errors:
        _waiting.clear()
    return errors


def _taken() -> memoryview:
    """All that has come in parts, which is gone when nobody looks at it any more."""
    here = _arriving if isinstance(_arriving, bytearray) else _arriving.view()
    came = memoryview(here if _arrived is None else _arrived)
    _let_go()
    return came


def _let_go() -> None:
    """Of what comes in parts."""
    global _arriving, _arrived
    if not isinstance(_arriving, bytearray):
        _arriving.close()
    _arriving, _arrived = bytearray(), None


def commit() -> None:
    """Move the waiting objects into the namespace."""
    namespace().update(_waiting)
    _waiting.clear()


def drop() -> None:
    """Forget the waiting objects, and what has come or was to leave in parts."""
    _waiting.clear()
    _leaving.clear()
    _let_go()


def pack(names: list[str], most: int | None = None) -> Packed:
    """Pickle `names`: ``values`` and ``errors`` by name, the ``missing`` names, and those ``moved`` to the CPU.

    ``wrappers`` has the name of the wrapper of torch's that a model is in. What is longer than `most` bytes waits for
    `part`; ``sizes`` has its length by name.
    """
    here = namespace()
    missing = [name for name in names if name not in here]
    values, errors, moved = pickling.dump_all({name: here[name] for name in names if name in here})
    if errors or missing:
        values = {}  # nothing is taken
    sizes = {name: len(data) for name, data in values.items() if most is not None and len(data) > most}
    _leaving.clear()
    _leaving.update({name: values.pop(name) for name in sizes})
    wrappers = {name: kind for name in names if name in here and (kind := _wrapper(here[name]))}
    return {
        "values": values,
        "errors": errors,
        "missing": missing,
        "moved": moved,
        "sizes": sizes,
        "wrappers": wrappers,
    }


def _wrapper(value: object) -> str:
    """Name of the wrapper that `value` is; empty if it is none."""
    kinds = (kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torch."))
    return next((kind for kind in kinds if kind in WRAPPERS.values()), "")


def part(name: str, begin: int, end: int) -> bytes:
    """A part of an object that `pack` keeps."""
    return bytes(memoryview(_leaving[name])[begin:end])
