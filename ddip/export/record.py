"""Describe the session to export: its executions in order, and the facts of its ranks."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Reason why the cell has no complete effect, such as its error; empty if it succeeded."""
    is_param: bool = False
    """True if its assignments become options of the script."""
    resized: str = ""
    """The later change of the number of ranks, in words; empty if there was none."""
    cell: str = ""
    """Identifier of the notebook's cell; empty if the front end sends none."""


@dataclass(frozen=True)
class Session:
    """Facts of the group that its script repeats."""

    seeds: tuple[int, ...]
    """Seed of each rank at its start."""
    backend: str = "gloo"
    device: str = "cpu"
    """Type of the ranks' device."""
    threads: int = 1
    """Number of threads of torch on each rank."""
    app: str | None = None
    executions: tuple[Execution, ...] = ()

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
    """True to write ``raise NotImplementedError`` for code that has no translation."""
    results: frozenset[str] = frozenset()
    """Variables that must have their values at the end."""
    stores_data: bool = False
    """True to read pushed values from a file, instead of the notebook's code that made them."""
