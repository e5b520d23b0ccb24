"""What a profiled cell has to tell: where the time of each rank went, and the collectives that all of them had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddip.protocol.collective import kind_text

PARTS = ("compute", "communication", "waiting", "loading", "idle")
"""Of the time of a rank; they add up to it."""


@dataclass(frozen=True)
class RankProfile:
    """Where the time of a rank went, seconds."""

    rank: int
    seconds: float
    """That were recorded."""
    compute: float
    """Operations of torch's and Python; on a GPU its kernels, too."""
    communication: float
    """In collectives that all ranks had begun, and nothing was computed meanwhile."""
    waiting: float
    """In collectives that another rank had not begun yet."""
    loading: float
    """For the next batch of a ``DataLoader``."""
    idle: float
    """The main thread neither ran nor waited for any of these: it slept, read a file, waited for a process."""
    python: float
    """Part of `compute`: no operation was under way."""
    trace: Path | None = None
    note: str = ""
    """Why the recording has ended before the cell; empty if it has not."""


@dataclass(frozen=True)
class Collective:
    """One collective of a group of ranks."""

    group: str
    """As people call it."""
    number: int
    """In its group, from 1, as torch counts."""
    op: str
    shapes: tuple[tuple[int, ...], ...]
    """Of what goes in; empty if they are not known."""
    dtype: str
    seconds: float
    """From its begin to its end, on the rank where that took longest."""
    waiting: float
    """How long ranks waited in it for the last one, and computed nothing: the one that waited longest."""
    last: int | None
    """The rank that has begun it last; None: some have not begun it, or are not known."""

    @property
    def kind(self) -> str:
        """What it does with what, for people."""
        return kind_text(self.op, self.shapes, self.dtype)

    def __str__(self) -> str:
        return f"number {self.number} of {self.group}, {self.kind}"


@dataclass(frozen=True)
class Profile:
    """What a profiled cell has to tell. A notebook shows it as a table and a plot."""

    ranks: Mapping[int, RankProfile]
    collectives: Sequence[Collective]
    """In the order in which they were begun."""
    waited_for: Mapping[int, float] = field(default_factory=dict)
    """How long others have waited for a rank, seconds: the one that waited longest."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """Ranks without a profile, and why."""
    folder: Path | None = None
    merged: Path | None = None
    """All ranks as one trace, for Perfetto."""

    @property
    def slowest_rank(self) -> int | None:
        """The rank that others have waited for longest; if none did, the one whose part of the cell took longest."""
        if self.waited_for and max(self.waited_for.values()) > 0:
            return max(self.waited_for, key=lambda rank: self.waited_for[rank])
        if len(self.ranks) < 2:
            return None
        return max(self.ranks, key=lambda rank: self.ranks[rank].seconds)

    @property
    def slowest_collective(self) -> Collective | None:
        """The one that took longest."""
        return max(self.collectives, key=lambda each: each.seconds, default=None)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ddip.output import profile_report

        return {"text/plain": profile_report.text(self), "text/html": profile_report.html(self)}
