"""Objects in and out of the namespace of this rank.

A push has two steps, so that all names arrive on all ranks or none does: every rank unpickles into a waiting room, and
only when all could, every rank takes what waits there.
"""

from __future__ import annotations

import pickle
from typing import Any

from ddip.rank import namespace, pickling

_waiting: dict[str, Any] = {}


def stage(packed: dict[str, bytes]) -> dict[str, str]:
    """Unpickle `packed` into the waiting room; returns the errors by name."""
    _waiting.clear()
    errors = {}
    for name, data in packed.items():
        try:
            _waiting[name] = pickle.loads(data)
        except BaseException as error:
            errors[name] = f"{type(error).__name__}: {error}"
    if errors:
        _waiting.clear()
    return errors


def commit() -> None:
    """Move the waiting objects into the namespace."""
    namespace().update(_waiting)
    _waiting.clear()


def drop() -> None:
    """Forget the waiting objects."""
    _waiting.clear()


def pack(names: list[str]) -> dict[str, Any]:
    """Pickle `names`: ``values`` and ``errors`` by name, the ``missing`` names, and those ``moved`` to the CPU."""
    here = namespace()
    missing = [name for name in names if name not in here]
    values, errors, moved = pickling.dump_all({name: here[name] for name in names if name in here})
    return {"values": values, "errors": errors, "missing": missing, "moved": moved}
