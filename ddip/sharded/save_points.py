"""Implement ``ddip.save_point``, with which a training loop marks the points at which it may be saved."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["save_point"]

at_point: Callable[[], bool] | None = None
"""Set on ddip's ranks while saves are scheduled: saves if one is due, and returns whether it did."""


def save_point() -> bool:
    """Mark a point between two steps, at which ddip saves the variables if a save is due.

    Call it on all ranks, once per step. It returns at once unless ``%dipsave --every`` is on. A save is due after the
    time that was typed there, and after a scheduler's warning: SIGUSR1, and SIGTERM to the notebook::

        for step in range(step, 1000):
            train(step)
            ddip.save_point()

    What a resumed loop needs, such as ``step``, must be in variables of the session, not of a function.

    Returns
    -------
    bool
        True if the variables were saved.
    """
    hook = sys.modules[__name__].at_point  # not of this copy, if a cell has imported the module again
    return hook() if hook is not None else False
