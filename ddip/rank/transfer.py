"""Objects in and out of the namespace of this rank.

What is large comes and goes in parts, so that a person sees it go on, and no copy of the whole is made on the way.

A push has two steps, so that all names arrive on all ranks or none does: every rank unpickles into a waiting room, and
only when all could, every rank takes what waits there.
"""

from __future__ import annotations

import pickle
from typing import Any

from ddip.protocol import pickling
from ddip.protocol.reports import Packed
from ddip.protocol.text import readable
from ddip.rank import namespace
from ddip.rank.wrappers import WRAPPERS

_waiting: dict[str, Any] = {}
_parts: dict[str, bytes | bytearray] = {}
"""Pickled objects that arrive, or leave, in parts."""


def add(name: str, part: bytes, first: bool) -> None:
    """The next part of a pickled object."""
    if first:
        _parts[name] = bytearray()
    arriving = _parts[name]
    assert isinstance(arriving, bytearray)
    arriving += part


def stage(packed: dict[str, bytes | bytearray | None]) -> dict[str, str]:
    """Unpickle `packed` into the waiting room; returns the errors by name. None: it has come in parts."""
    _waiting.clear()
    errors = {}
    for name, data in packed.items():
        try:
            _waiting[name] = pickle.loads(_parts.pop(name) if data is None else data)
        except KeyboardInterrupt:
            drop()
            raise
        except BaseException as error:
            errors[name] = readable(f"{type(error).__name__}: {error}")
    if errors:
        _waiting.clear()
    return errors


def commit() -> None:
    """Move the waiting objects into the namespace."""
    namespace().update(_waiting)
    _waiting.clear()


def drop() -> None:
    """Forget the waiting objects, and what has come or was to leave in parts."""
    _waiting.clear()
    _parts.clear()


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
    _parts.clear()
    _parts.update({name: values.pop(name) for name in sizes})
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
    return bytes(memoryview(_parts[name])[begin:end])
