"""Keep warnings that the user turns into errors (``PYTHONWARNINGS=error``) away from the start of ddip's processes.

An import of ipyparallel or torch that warns would otherwise end them. The filters apply again to the cells of a rank.
"""

from __future__ import annotations

import warnings
from typing import Any

_former: list[Any] = []
"""All filters at the start of the process, in their order."""


def set_aside() -> None:
    """Remove the filters that turn warnings into errors."""
    _former[:] = warnings.filters
    warnings.filters[:] = [entry for entry in warnings.filters if entry[0] != "error"]  # type: ignore[index]


def give_back() -> None:
    """Put the removed filters back in their places, below those that libraries have added."""
    added = [entry for entry in warnings.filters if entry not in _former]
    warnings.filters[:] = [*added, *_former]  # type: ignore[index]
