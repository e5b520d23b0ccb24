"""Find Lightning's modules in the installed packages.

``lightning`` has all of its code. ``pytorch_lightning`` and ``lightning_fabric`` have a second copy under other names.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

NAMES = {
    "lightning": {"pytorch": "lightning.pytorch", "fabric": "lightning.fabric"},
    "pytorch_lightning": {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"},
}
INSTALLED = tuple(name for name in NAMES if find_spec(name) is not None)


def installed_modules(path: str) -> list[Any]:
    """Return the module at `path` of each installed package.

    For example, ``pytorch.tuner`` is ``lightning.pytorch.tuner`` and ``pytorch_lightning.tuner``.
    """
    part, dot, rest = path.partition(".")
    return [importlib.import_module(NAMES[name][part] + dot + rest) for name in INSTALLED]


LOADED = [installed_modules(part) for part in ("pytorch", "fabric")]
"""Modules imported with the app, that is, once for all ranks."""
