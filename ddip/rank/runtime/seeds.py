"""Give each rank a random state at its start that one number describes, so that a script can start with the same."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time

import torch

from ddip.rank.runtime import process_settings
from ddip.rank.runtime.libraries import is_librarys

with contextlib.suppress(ImportError):
    import numpy.random

_seed = 0
"""Seed of this process; 0 before `seed_process`."""
_began = 0.0
"""Unix time at which this process has drawn its seed, in seconds."""


def seed_process() -> None:
    """Seed Python, torch and numpy with a new number; call this once, before the first cell."""
    global _seed, _began
    _seed = int.from_bytes(os.urandom(4), "little")
    _began = time.time()
    random.seed(_seed)
    torch.manual_seed(_seed)
    if "numpy.random" in sys.modules:
        numpy.random.seed(_seed)


def start_facts() -> tuple[int, int, str, list[str]]:
    """Return facts of this rank's start that an exported script repeats.

    These are its seed, the number of torch's threads, its working directory, and the names of files of the user's
    imported modules that have changed since, by their modification times.
    """
    changed: list[str] = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not is_librarys(file) and not _is_generated(name):
            with contextlib.suppress(OSError):
                if os.stat(file).st_mtime > _began:
                    changed.append(os.path.basename(file))
    return _seed, *process_settings.start_settings(), changed


def _is_generated(name: str) -> bool:
    """Return whether a library, such as ``torch.compile``, has written the module `name`."""
    package = sys.modules.get(name.partition(".")[0])
    return name.startswith("_remote_module_") or is_librarys(getattr(package, "__file__", None) or "")
