"""Prepare the process from which multiprocessing forks a rank's workers: its default since Python 3.14.

Only that process, the forkserver, imports this module. Its workers inherit

- torch, which each would import for seconds
- a stdout that writes each line at once, which otherwise would keep all lines until the worker ends
- an explanation for workers that look for a class or function of a cell
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import NoReturn

from ddip.protocol.start_methods import NOT_FORKED

with contextlib.suppress(Exception):  # the notebook's folder may hide a module of Python's: workers say so
    import torch  # noqa: F401


def _explain_missing(name: str) -> NoReturn:
    """Raise the error of an attribute that ``__main__`` lacks, as a module's ``__getattr__``."""
    advice = "" if name.startswith("__") else f"; {NOT_FORKED}"
    raise AttributeError(f"module '__main__' has no attribute {name!r}{advice}")


if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True)
sys.modules["__main__"].__getattr__ = _explain_missing  # type: ignore[method-assign]
