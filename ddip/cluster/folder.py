"""The notebook's folder: imports that find nothing in it, and whether it is there."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """While this lasts, imports do not look into the working directory, as IPython has them do.

    A file there that has the name of something that ddip needs, such as ``zmq.py``, is the user's: it is no reason for
    ddip not to start, and ddip is no reason to run it. What a user has put on the path by its whole name stays there.

    The garbage collector is off, too: imports leave little, and a collection goes through all objects of the user's.
    """
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
    """Raise GroupError if the working directory has been removed: neither ipyparallel nor a new rank can do without."""
    try:
        os.getcwd()
    except FileNotFoundError:
        from ddip.errors import GroupError

        raise GroupError(
            "the folder in which this notebook works has been removed; %cd to another, and type it again"
        ) from None
