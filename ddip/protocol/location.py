"""Locations in code that ranks report to the notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["busy", "gil_held", "idle", "finished", "ended", "stopped"]
"""State of a rank. ``gil_held``: busy and not replying; C code may hold the interpreter lock. ``finished``: done with
a cell that other ranks still run. ``ended``: its process has ended. ``stopped``: SIGSTOP or a debugger has stopped its
process."""


@dataclass(frozen=True)
class StackLocation:
    """Position of a rank's main thread in its cell.

    `cell` or `script`, `line` and `source` describe the innermost line of the stack that the user wrote in a cell, or
    in a script that ``%diprun`` has run.
    """

    function: str = ""
    """Innermost function whose name is not private; empty for top-level lines of the cell."""
    cell: int | None = None
    """Number of the cell that contains the line; None if the stack has no line of a cell."""
    line: int = 0
    """Number of the line in its cell or script, from 1; 0 if there is none."""
    source: str = ""
    """Text of the line."""
    inner: str = ""
    """Innermost frame, including library code, as ``file.py:12 in function``. For a stopped rank, how to continue
    it."""
    state: State = "busy"
    """Current state.

    ``gil_held``: busy and not replying; C code may hold the interpreter lock. ``finished``: done with a cell that other
    ranks still run. ``ended``: its process has ended. ``stopped``: SIGSTOP or a debugger has stopped its process.
    """
    collective: str = ""
    """Description of the current or last collective of the rank; only set in a `Stack` and for a stalled cell."""
    script: str = ""
    """Name of the script that contains the line; empty if a cell does."""

    @property
    def line_text(self) -> str:
        """The line that the user wrote, such as ``cell [12] line 3`` or ``train.py line 3``; may be empty."""
        return f"{self.script or f'cell [{self.cell}]'} line {self.line}" if self.line else ""

    def __str__(self) -> str:
        if self.state == "stopped":
            return self.inner
        held = self.state == "gil_held"
        if self.state != "busy" and not held:
            return self.state
        where = self.line_text or self.inner or "awaiting something"
        if self.function and (self.line or held):
            where = f"{self.function}, {where}"
        return f"{where}, and it does not answer: C code may hold the interpreter" if held else where


@dataclass(frozen=True)
class Stack:
    """Stacks of all threads of a rank."""

    place: StackLocation
    """Position of the main thread."""
    threads: dict[str, str]
    """Stack of each thread as text, by the name of the thread. The main thread comes first, with the name ``main``."""
