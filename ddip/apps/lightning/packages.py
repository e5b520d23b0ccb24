"""The packages with Lightning's code: ``lightning`` has all of it, ``pytorch_lightning`` and ``lightning_fabric`` the
same once more, under other names."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

NAMES = {
    "lightning": {"pytorch": "lightning.pytorch", "fabric": "lightning.fabric"},
    "pytorch_lightning": {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"},
}
THERE = tuple(name for name in NAMES if find_spec(name) is not None)


def modules(path: str) -> list[Any]:
    """The module of this `path` in each package that is installed: ``pytorch.tuner`` is ``lightning.pytorch.tuner`` and
    ``pytorch_lightning.tuner``."""
    room, dot, rest = path.partition(".")
    return [importlib.import_module(NAMES[name][room] + dot + rest) for name in THERE]


LOADED = [modules(room) for room in ("pytorch", "fabric")]
"""Imported when the app is: once for all ranks."""
