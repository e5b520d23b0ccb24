"""Describe the session to export: its executions and pushes in order, and the facts of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Execution:
    """One execution of a cell, with the source that it had."""

    number: int
    """Number of the execution in the notebook."""
    code: str
    """Source without its ``%%dip`` line."""
    ranks: tuple[int, ...] | None = None
    """Ranks that ran the cell; None for a cell of the notebook."""
    failure: str = ""
    """The error of a failed or stopped cell, such as ``NameError: name 'x' is not defined``; empty if it succeeded."""
    never_began: bool = False
    """True for a failed cell that left the queue without running."""
    overlaps: int = 0
    """Number of another cell on ranks that ran at the same time; 0 if there was none."""
    is_param: bool = False
    """True if its assignments become options of the script."""
    is_former: bool = False
    """True for a cell of the notebook that ran before the group started."""
    cell: str = ""
    """Identifier of the notebook's cell; empty if the front end sends none."""


@dataclass(frozen=True)
class Push:
    """Variables that the notebook sent to ranks."""

    number: int
    """Number of the notebook's cell that sent them."""
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    data: bytes | None = None
    """Dict of the values at that time as ``torch.save`` writes it; None if they were too large, or that failed."""


@dataclass(frozen=True)
class Session:
    """Facts of the group that its script repeats."""

    seeds: tuple[int, ...]
    """Seed of each rank at its start."""
    backend: str = "gloo"
    device: str = "cpu"
    """Type of the ranks' device."""
    threads: int = 1
    """Number of threads of torch on each rank at its start."""
    folder: str = "."
    """Working directory of the ranks at their start."""
    app: str | None = None
    events: tuple[Execution | Push, ...] = ()
    """Executions and pushes, in order."""
    problems: tuple[str, ...] = ()
    """Reasons why no script can repeat the session."""
    doubts: tuple[str, ...] = ()
    """Reasons why a script may give other numbers."""
    exports: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Names that ``from module import *`` binds, by module, as `names.exported_names` returns them."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.seeds)


@dataclass(frozen=True)
class Choice:
    """The choice of cells, and the options of the export."""

    numbers: frozenset[int] | None = None
    """Numbers of the chosen executions; None for all."""
    last: bool = False
    """True to take each cell once, in its last version."""
    partial: bool = False
    """True to write ``raise NotImplementedError`` for each refused part."""
    checked: bool = False
    """True if the script's values are compared with the session's, so that doubts are no reason to refuse it."""
    results: frozenset[str] = frozenset()
    """Variables that must have their values at the end."""
    stores_data: bool = False
    """True to read pushed values from a file beside the script."""
