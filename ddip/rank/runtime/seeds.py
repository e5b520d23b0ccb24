"""Give each rank a random state at its start that one number describes, so that a script can start with the same."""

from __future__ import annotations

import contextlib
import os
import random
import sys

import torch

with contextlib.suppress(ImportError):
    import numpy.random

_seed = 0


def seed_process() -> None:
    """Seed Python, torch and numpy with a new number; call this once, before the first cell."""
    global _seed
    _seed = int.from_bytes(os.urandom(4), "little")
    random.seed(_seed)
    torch.manual_seed(_seed)
    if "numpy.random" in sys.modules:
        numpy.random.seed(_seed)


def start_seed() -> tuple[int, int]:
    """Return the seed of this rank's start, and its number of torch threads."""
    return _seed, torch.get_num_threads()
