"""An interrupt waits where it would leave something half done, for ever: for the import of a library to end, and while
a ``with`` statement enters or leaves something.

Python forgets a package whose import fails, but not the parts of it that were imported before; when it is imported
again these are not imported once more, and the package does not find them. Of the moments of ``import torch._dynamo``,
which the first optimizer does, an interrupt in three of four leaves a rank in which no optimizer works ("module 'sympy'
has no attribute 'logic'"; torch 2.15, Python 3.11).

``with`` calls ``__exit__`` only after ``__enter__`` has returned. An interrupt right before that leaves a lock that
nobody opens, or ``torch.no_grad()`` for all that comes. One stop in sixty, of a data loader that had just begun, left a
queue whose lock was held, and the rank waited for that when it took the loader apart. A user's context managers are no
different: of 24 stops in a loop that entered and left one which disabled gradients, 6 left them disabled.
``process_settings.py`` looks after what is left all the same.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from types import FrameType

SAME_PLACE = 50
"""How often an interrupt must have found an import at the same place until the import is taken to stand still."""
LONGEST_SECONDS = 30.0
"""For which an interrupt waits for the imports of one cell, whatever they do."""
AGAIN_SECONDS, WITH_AGAIN_SECONDS = 0.02, 0.002
"""After which an interrupt is tried again that came to an import, and to what a ``with`` statement enters or leaves."""
WITH_SECONDS, ALL_WITH_SECONDS = 0.4, 2.0
"""For which an interrupt waits for one such call, which takes microseconds if it does not wait itself; and for one call
after the other, in a loop that does little else."""
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = ("/site-packages/", "/dist-packages/")
OURS = str(Path(__file__).parents[2])
"""An interrupt may come while a former one is handled, wherever that has come."""


def library_in(frame: FrameType | None) -> str:
    """Name of the library whose import `frame` is part of; empty if it is part of none.

    A module of the user's own is none: it may do anything while it is imported, and for as long as it likes.
    """
    name = ""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and is_librarys(frame.f_code.co_filename) and _is_imported(frame.f_back):
            name = frame.f_globals.get("__name__", "")
        frame = frame.f_back
    return name


def call_of_with(frame: FrameType | None) -> FrameType | None:
    """Find the innermost call of ``__enter__`` or ``__exit__`` that `frame` is part of, in code of anybody's.

    The user's own matter, too: a generator under ``contextlib.contextmanager`` that disables gradients enables them
    again in its last line.
    """
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return frame
        frame = frame.f_back
    return None


def is_librarys(path: str) -> bool:
    """Is `path` a file of Python's own, or of a package that is installed, or ddip's?"""
    return path.startswith((_STANDARD, OURS)) or any(part in path for part in _INSTALLED)


def _is_imported(caller: FrameType | None) -> bool:
    """Not, for one, executed by ``runpy``, as a script is."""
    return caller is not None and caller.f_code.co_filename == "<frozen importlib._bootstrap>"


class Patience:
    """With libraries, of the interrupts of one cell."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._place: tuple[int, int] | None = None
        self._same = 0
        self._call: FrameType | None = None
        """What a ``with`` statement has called; kept, so that no other call gets its place in memory."""
        self._call_since = self._calls_since = 0.0

    def forget(self) -> None:
        """The cell has ended; its frames have its variables."""
        self._call = None

    def wait(self, frame: FrameType | None) -> float | None:
        """After how many seconds to try it again with the interrupt that has come at `frame`; None: it need not wait.

        Ask each time it comes.
        """
        now = time.monotonic()
        if library_in(frame):
            return AGAIN_SECONDS if self._import_goes_on(frame, now) else None
        former, self._call = self._call, call_of_with(frame)
        if self._call is None:
            return None
        if former is None:
            self._calls_since = now
        if former is not self._call:
            self._call_since = now
        over = now > self._call_since + WITH_SECONDS or now > self._calls_since + ALL_WITH_SECONDS
        if over:
            self._call = None
        return None if over else WITH_AGAIN_SECONDS

    def _import_goes_on(self, frame: FrameType | None, now: float) -> bool:
        if self._began is None:
            self._began = now
        place = id(frame), getattr(frame, "f_lasti", 0)
        self._same = self._same + 1 if place == self._place else 0
        self._place = place
        return self._same < SAME_PLACE and now < self._began + LONGEST_SECONDS


def interrupt(frame: FrameType | None) -> KeyboardInterrupt:
    """What to raise at `frame`; it says so where that is in the middle of an import, which did not end in time."""
    library = library_in(frame)
    if not library:
        return KeyboardInterrupt()
    what = f"the import of {library} did not finish, and was interrupted half-way"
    return KeyboardInterrupt(f"{what}; if importing it again fails, start new ranks: %makedip --restart")
