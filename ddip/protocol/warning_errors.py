"""Keep warnings that the user turns into errors (``PYTHONWARNINGS=error``) away from the start of ddip's processes.

An import of ipyparallel or torch that warns would otherwise end them. The filters apply again to the cells of a rank.
"""

from __future__ import annotations

import warnings
from typing import Any

_errors: list[Any] = []
"""The filters that were removed."""


def set_aside() -> None:
    """Remove the filters that turn warnings into errors."""
    _errors[:] = [entry for entry in warnings.filters if entry[0] == "error"]
    warnings.filters[:] = [entry for entry in warnings.filters if entry[0] != "error"]  # type: ignore[index]


def give_back() -> None:
    """Put the removed filters back, before those that libraries have added."""
    warnings.filters[:0] = _errors  # type: ignore[index]
    _errors.clear()
