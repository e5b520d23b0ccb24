"""Where a rank is, as it tells the notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["busy", "gil_held", "idle", "finished", "ended", "stopped"]
"""``gil_held``: busy, and it does not answer, perhaps since C code holds the interpreter. ``finished``: with the cell
that others still run. ``ended``: its process is gone. ``stopped``: by SIGSTOP or a debugger; `inner` says how it goes
on."""


@dataclass(frozen=True)
class StackLocation:
    """Where the main thread of a rank is in its cell."""

    function: str = ""
    """The innermost function with a name for people; empty in the cell's own lines."""
    cell: int | None = None
    """Number of the cell that holds the innermost line of the user's; None if there is no such line."""
    line: int = 0
    source: str = ""
    """That line."""
    inner: str = ""
    """The innermost frame of all, as ``file.py:12 in function``."""
    state: State = "busy"
    collective: str = ""
    """The collective that the rank is in, or has begun last, in words; told for a whole `Stack` only."""

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
    """All threads of a rank."""

    place: StackLocation
    threads: dict[str, str]
    """Stack of each thread, as text, by its name; the main thread first."""
