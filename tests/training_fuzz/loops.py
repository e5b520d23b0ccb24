"""All loops of the fuzzer, by name."""

from __future__ import annotations

import importlib.util

from .framework_loops import FRAMEWORK_LOOPS
from .torch_loops import TORCH_LOOPS, Loop

LOOPS: dict[str, Loop] = {**TORCH_LOOPS, **FRAMEWORK_LOOPS}


def is_installed(loop: Loop) -> bool:
    """Return True if the packages that the loop needs can be imported."""
    return not loop.needs or importlib.util.find_spec(loop.needs) is not None
