"""Delay interrupts that would leave a library's import or a ``with`` statement half done, with lasting damage.

Python removes a package whose import fails from ``sys.modules``, but not the submodules that it has imported. The next
import of the package does not import these again, and does not find them as attributes. ``import torch._dynamo``, which
the first optimizer does, breaks in three of four cases if it is interrupted: no optimizer works on that rank ("module
'sympy' has no attribute 'logic'"; torch 2.15, Python 3.11).

``with`` calls ``__exit__`` only after ``__enter__`` has returned. An interrupt right before leaves a lock held, or
``torch.no_grad()`` on indefinitely. Since Python 3.14 that includes locks written in C, because an interrupt can arrive
between the call of their ``__enter__`` and the next instruction: one stop in ten of a flood of output lost the rank.

One stop in sixty of a data loader that had just begun left a queue's lock held, and the rank hung on it when the loader
was destroyed. Context managers of users are no different: of 24 stops in a loop that entered and left one which
disabled gradients, 6 left them disabled. ``process_settings.py`` repairs settings that are left changed all the same.
"""

from __future__ import annotations

import opcode
import sysconfig
import time
from pathlib import Path
from types import FrameType

SAME_PLACE = 50
"""Number of tries that find an import at the same instruction, after which the import counts as stuck."""
LONGEST_SECONDS = 30.0
"""Longest delay of an interrupt by the imports of one cell."""
AGAIN_SECONDS, WITH_AGAIN_SECONDS = 0.02, 0.002
"""Pause before the next try of an interrupt, during an import and during a ``with`` statement's calls."""
WITH_SECONDS, ALL_WITH_SECONDS = 0.4, 2.0
"""Longest delay of an interrupt by one ``__enter__`` or ``__exit__``, which normally takes microseconds, and by
consecutive ones, in a loop that does little else."""
_CALL_ENTER = b""
"""Bytecode that loads and calls ``__enter__`` since Python 3.14; before, it is one instruction, and this is empty."""
if "LOAD_SPECIAL" in opcode.opmap:
    _CALL_ENTER = bytes((opcode.opmap["LOAD_SPECIAL"], 0, opcode.opmap["CALL"], 0))
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = ("/site-packages/", "/dist-packages/")
OURS = str(Path(__file__).parents[2])
"""Folder of ddip, which counts as a library because an interrupt can arrive while another is handled."""


def library_in(frame: FrameType | None) -> str:
    """Return the name of the library whose import `frame` is part of; "" if it is part of none.

    A user's module does not count, because its import may do anything and take any time.
    """
    name = ""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and is_librarys(frame.f_code.co_filename) and _is_imported(frame.f_back):
            name = frame.f_globals.get("__name__", "")
        frame = frame.f_back
    return name


def call_of_with(frame: FrameType | None) -> FrameType | None:
    """Find the innermost call of ``__enter__`` or ``__exit__`` that `frame` is part of, in any code.

    Those in users' code also count: a generator under ``contextlib.contextmanager`` that disables gradients enables
    them again in its last line. A frame that is at its call of an ``__enter__`` written in C counts itself.
    """
    if frame is not None and _is_entering(frame):
        return frame
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return frame
        frame = frame.f_back
    return None


def _is_entering(frame: FrameType) -> bool:
    """Return whether `frame` is at the instruction that calls ``__enter__``; False before Python 3.14."""
    code, position = frame.f_code.co_code, frame.f_lasti
    return bool(_CALL_ENTER) and position >= 2 and code[position - 2 : position + 2] == _CALL_ENTER


def is_librarys(path: str) -> bool:
    """Return whether `path` is a file of the standard library, an installed package or ddip."""
    return path.startswith((_STANDARD, OURS)) or any(part in path for part in _INSTALLED)


def _is_imported(caller: FrameType | None) -> bool:
    """Return whether the import system is the `caller` of a module's code, and not ``runpy`` (a script)."""
    return caller is not None and caller.f_code.co_filename == "<frozen importlib._bootstrap>"


class InterruptDelay:
    """Decide how long the interrupts of one cell are delayed."""

    def __init__(self) -> None:
        self._imports_since: float | None = None
        self._position: tuple[int, int] | None = None
        self._tries_at_position = 0
        self._call: FrameType | None = None
        """Call by a ``with`` statement at the last try; kept so that no other frame gets its id."""
        self._call_since = self._calls_since = 0.0

    def forget(self) -> None:
        """Free the frame of a cell that has ended, because it holds the cell's variables."""
        self._call = None

    def delay_at(self, frame: FrameType | None) -> float | None:
        """Return the seconds until the next try of an interrupt at `frame`; None if it may be raised now.

        Does not wait. Call this at each try.
        """
        now = time.monotonic()
        if library_in(frame):
            return AGAIN_SECONDS if self._is_import_progressing(frame, now) else None
        former, self._call = self._call, call_of_with(frame)
        if self._call is None:
            return None
        if former is None:
            self._calls_since = now
        if former is not self._call:
            self._call_since = now
        is_over = now > self._call_since + WITH_SECONDS or now > self._calls_since + ALL_WITH_SECONDS
        if is_over:
            self._call = None
        return None if is_over else WITH_AGAIN_SECONDS

    def _is_import_progressing(self, frame: FrameType | None, now: float) -> bool:
        if self._imports_since is None:
            self._imports_since = now
        position = id(frame), getattr(frame, "f_lasti", 0)
        self._tries_at_position = self._tries_at_position + 1 if position == self._position else 0
        self._position = position
        return self._tries_at_position < SAME_PLACE and now < self._imports_since + LONGEST_SECONDS


def make_interrupt(frame: FrameType | None) -> KeyboardInterrupt:
    """Return the exception to raise at `frame`; it has a hint if an import is interrupted half-way."""
    library = library_in(frame)
    if not library:
        return KeyboardInterrupt()
    what = f"the import of {library} did not finish, and was interrupted half-way"
    return KeyboardInterrupt(f"{what}; if importing it again fails, start new ranks: %makedip --restart")
