"""Locations in code that ranks report to the notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["busy", "gil_held", "idle", "finished", "ended", "stopped"]
"""State of a rank. ``gil_held``: busy and not answering; C code may hold the interpreter. ``finished``: done with
a cell that other ranks still run. ``ended``: its process is gone. ``stopped``: by SIGSTOP or a debugger; `inner` says
how to let it continue."""


@dataclass(frozen=True)
class StackLocation:
    """Position of a rank's main thread in its cell."""

    function: str = ""
    """The innermost function, by the name that users see; empty for top-level lines of the cell."""
    cell: int | None = None
    """Number of the cell with the innermost line that the user wrote; None if there is no such line."""
    line: int = 0
    source: str = ""
    """Text of that line."""
    inner: str = ""
    """The innermost frame, including library code, as ``file.py:12 in function``."""
    state: State = "busy"
    collective: str = ""
    """Description of the collective that the rank is in, or began last; only set in a `Stack`."""

    def __str__(self) -> str:
        if self.state == "stopped":
            return self.inner
        held = self.state == "gil_held"
        if self.state != "busy" and not held:
            return self.state
        where = f"cell [{self.cell}] line {self.line}" if self.cell is not None else self.inner or "awaiting something"
        if self.function and (self.cell is not None or held):
            where = f"{self.function}, {where}"
        return f"{where}, and it does not answer: C code may hold the interpreter" if held else where


@dataclass(frozen=True)
class Stack:
    """Stacks of all threads of a rank."""

    place: StackLocation
    threads: dict[str, str]
    """Stack of each thread as text, by the thread's name; the main thread is first."""
