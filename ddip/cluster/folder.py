"""Guards for the notebook's folder: keep imports out of it, and check that it exists."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

_turn = threading.RLock()


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Keep imports from searching the working directory, and suspend the garbage collector.

    IPython puts the working directory on the path. A file there with the name of a module that ddip needs, such as
    ``zmq.py``, belongs to the user: it must not keep ddip from starting, and ddip must not run it. Folders that the
    user put on the path by their full name stay.

    The garbage collector is off because imports leave little garbage, while a collection visits all the user's objects.
    Threads that start groups at the same time take turns.
    """
    with _turn:
        former, collects = list(sys.path), gc.isenabled()
        try:
            gc.disable()
            sys.path[:] = [entry for entry in former if entry not in ("", ".")]
            yield
        finally:
            sys.path[:] = [*former, *(entry for entry in sys.path if entry not in former)]
            if collects:
                gc.enable()


def ensure_ready() -> None:
    """Raise GroupError if the working directory was removed: ipyparallel and new ranks need one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        from ddip.errors import GroupError

        raise GroupError(
            "the notebook's working folder has been removed; %cd to another folder, and try again"
        ) from None
