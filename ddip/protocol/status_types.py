"""What programs are told of a group and of its cells: plain data, which JSON holds.

``protocol/schemas`` describes the same for those who are not Python. `SCHEMA` is raised when something that a program
may rely on goes or changes its meaning; keys may be added without that.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

SCHEMA = 1
CELL_MIME = "application/vnd.ddip.cell+json"
"""Of the `CellData` beside the HTML of a cell."""
ANSWER_MIME = "application/vnd.ddip.answer+json"
"""Of what a kernel answers to a program: JSON text of ``{"ok": ...}``, or of ``{"error": ..., "message": ...}``."""
TOO_LATE = "TooLate"
"""The error of a request that the kernel came to when nobody waited for it any more; nothing was done."""
TEXT_CHARACTERS = 20_000
"""Of what a rank has shown; of more, the end is kept."""

CellOutcome: TypeAlias = Literal["ok", "user_error", "rank_died", "stuck", "interrupted", "timeout", "not_run"]
"""How a cell has ended. ``stuck``: a rank did not stop when told to; ``not_run``: one that it waited for failed."""
RankState: TypeAlias = Literal["idle", "busy", "stopped", "no_answer", "ended", "gpu_lost"]
"""What a rank does now; ``stopped``: a signal or a debugger has stopped its process."""
PartState: TypeAlias = Literal["queued", "running", "ok", "failed", "released", "interrupted", "ended", "not_run"]
"""What has become of a cell on one rank. ``released``: it waited for others in a collective, until that was ended;
``ended``: its process is gone."""


class ErrorData(TypedDict):
    """What a rank has raised."""

    name: str
    """Of the exception; ``RankEnded`` if the process is gone."""
    message: str
    traceback: str
    """Without colours; may be empty."""
    waited: str
    """Where it waited for others when it was released, and so raised this; else empty."""


class LastError(ErrorData):
    """The last one of a rank."""

    cell: int
    """Number of the cell."""


class _Text(TypedDict, total=False):
    text: str
    """What it has shown, without colours."""
    truncated: bool
    """Is the beginning of `text` left out?"""
    same_text_as: int
    """In place of `text`: the rank that has shown the same."""


class PartData(_Text):
    """A cell on one rank. Without `text` and `same_text_as` its output was not asked for (``-S``)."""

    state: PartState
    seconds: float | None
    """That it took; None: not known, or not yet."""
    error: ErrorData | None


class CellData(TypedDict):
    """A cell, by rank."""

    schema: int
    number: int
    outcome: CellOutcome | None
    """None: it has not ended."""
    seconds: float
    ranks: dict[str, PartData]
    """By the number of the rank, as JSON has keys."""


class CellStatus(TypedDict):
    """A cell in the list of cells."""

    number: int
    ranks: list[int]
    state: Literal["queued", "running", "ended"]
    outcome: CellOutcome | None
    background: bool
    seconds: float
    """That it has run so far, or took."""
    submitted: float
    """Seconds since 1970, as the next two."""
    began: float | None
    ended: float | None
    first_line: str
    error: str | None
    """What it has raised, in short."""


class GpuFigures(TypedDict):
    """Bytes of GPU memory, as torch counts them on a rank; `total` is the GPU's."""

    allocated: int | None
    reserved: int | None
    total: int | None


class RankStatus(TypedDict):
    """A rank, now."""

    rank: int
    host: str
    pid: int
    device: str
    """``cpu``, or ``GPU 2`` as its host counts them."""
    memory: int | None
    """Bytes that its process holds, or None if it did not answer."""
    gpu: GpuFigures | None
    state: RankState
    doing: str
    """What it does for ddip, or how it goes on if it is stopped; empty while it runs a cell, or nothing."""
    busy_for: float | None
    """Seconds."""
    cell: int | None
    """Number of the cell that it runs."""


class DeviceStatus(TypedDict):
    """What ranks compute on."""

    device: str
    host: str
    ranks: list[int]
    memory_total: int | None
    """Bytes; None on the CPU, and if no rank of it has answered."""


class GroupStatus(TypedDict):
    """The group as a whole."""

    size: int
    backend: str
    healthy: bool
    """Not if a cell has left it unusable, or a rank is gone. ddip forms it again before the next cell, if it can."""
    app: str | None
    hosts: list[str]


class Status(TypedDict):
    """All of it."""

    schema: int
    group: GroupStatus | None
    """None: there is none."""
    ranks: list[RankStatus]
    devices: list[DeviceStatus]
    cells: list[CellStatus]
    """The last ones, the oldest first, also of former groups."""
    errors: dict[str, LastError]
    """The last error of each rank that has had one in these cells."""
