"""An interrupt waits for the import of a library to end: it would leave half of it behind, for ever.

Python forgets a package whose import fails, but not the parts of it that were imported before; when it is imported
again these are not imported once more, and the package does not find them. Of the moments of ``import torch._dynamo``,
which the first optimizer does, an interrupt in three of four leaves a rank in which no optimizer works ("module 'sympy'
has no attribute 'logic'"; torch 2.15, Python 3.11).
"""

from __future__ import annotations

import sysconfig
import time
from types import FrameType

SAME_PLACE = 50
"""How often an interrupt must have found an import at the same place until the import is taken to stand still."""
LONGEST_SECONDS = 30.0
"""For which an interrupt waits for the imports of one cell, whatever they do."""
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = ("/site-packages/", "/dist-packages/")


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


def is_librarys(path: str) -> bool:
    """Is `path` a file of Python's own, or of a package that is installed?"""
    return path.startswith(_STANDARD) or any(part in path for part in _INSTALLED)


def _is_imported(caller: FrameType | None) -> bool:
    """Not, for one, executed by ``runpy``, as a script is."""
    return caller is not None and caller.f_code.co_filename == "<frozen importlib._bootstrap>"


class Patience:
    """With imports, of the interrupts of one cell."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._place: tuple[int, int] | None = None
        self._same = 0

    def waits(self, frame: FrameType | None) -> bool:
        """Must the interrupt that has come at `frame` wait, since an import makes progress? Ask each time it comes."""
        if not library_in(frame):
            return False
        now = time.monotonic()
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
