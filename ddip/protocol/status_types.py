"""JSON data about a group and its cells for other programs.

``protocol/schemas`` has JSON schemas of the same data. `SCHEMA` is raised when a key that a program may rely on is
removed or changes its meaning. New keys do not raise it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

SCHEMA = 1
CELL_MIME = "application/vnd.ddip.cell+json"
"""MIME type of the `CellData` that accompanies the HTML of a cell."""
ANSWER_MIME = "application/vnd.ddip.answer+json"
"""MIME type of a kernel's answer to a program: JSON of ``{"ok": ...}`` or ``{"error": ..., "message": ...}``."""
TOO_LATE = "TooLate"
"""Error of a request that had timed out before the kernel reached it; the kernel did nothing."""
TEXT_CHARACTERS = 20_000
"""Maximum length of a rank's output; of longer output, the end is kept."""

CellOutcome: TypeAlias = Literal["ok", "user_error", "rank_died", "stuck", "interrupted", "timeout", "not_run"]
"""Outcome of a cell. ``stuck``: a rank did not stop on request; ``not_run``: a cell that it waited for failed."""
RankState: TypeAlias = Literal["idle", "busy", "stopped", "no_answer", "ended", "gpu_lost"]
"""Current state of a rank. ``stopped``: a signal or a debugger has stopped its process."""
PartState: TypeAlias = Literal["queued", "running", "ok", "failed", "released", "interrupted", "ended", "not_run"]
"""State of a cell on one rank. ``released``: it waited for other ranks in a collective, which ddip then aborted;
``ended``: the process of the rank is gone."""


class ErrorData(TypedDict):
    """An error that a rank has raised."""

    name: str
    """Class name of the exception; ``RankEnded`` if the process is gone."""
    message: str
    traceback: str
    """Traceback without colour codes; may be empty."""
    waited: str
    """Location at which the rank waited for others, if ddip aborted the wait and so raised this error; or empty."""


class LastError(ErrorData):
    """The most recent error of a rank."""

    cell: int
    """Number of the cell."""


class _Text(TypedDict, total=False):
    text: str
    """Output of the rank, without colour codes."""
    truncated: bool
    """True if `text` lacks the beginning of the output."""
    same_text_as: int
    """Number of the rank that has shown the same output; replaces `text`."""


class PartData(_Text):
    """A cell on one rank. `text` and `same_text_as` are missing if its output was not requested (``-S``)."""

    state: PartState
    seconds: float | None
    """Duration of the cell on this rank; None: unknown, or still running."""
    error: ErrorData | None


class CellData(TypedDict):
    """A cell and its result on each rank."""

    schema: int
    number: int
    outcome: CellOutcome | None
    """Outcome of the cell; None: it has not ended."""
    seconds: float
    ranks: dict[str, PartData]
    """Result per rank; the keys are rank numbers as strings, since JSON requires string keys."""


class CellStatus(TypedDict):
    """Entry in the list of cells."""

    number: int
    ranks: list[int]
    state: Literal["queued", "running", "ended"]
    outcome: CellOutcome | None
    background: bool
    seconds: float
    """Seconds that the cell has run so far, or took."""
    submitted: float
    """Time of submission, seconds since 1970; `began` and `ended` use the same clock."""
    began: float | None
    ended: float | None
    first_line: str
    error: str | None
    """Short form of the error that the cell raised."""


class GpuFigures(TypedDict):
    """GPU memory of a rank in bytes, as torch counts it; `total` is the size of the GPU's memory."""

    allocated: int | None
    reserved: int | None
    total: int | None


class RankStatus(TypedDict):
    """Current state of a rank."""

    rank: int
    host: str
    pid: int
    device: str
    """``cpu``, or ``GPU 2`` with the GPU's number on its host."""
    memory: int | None
    """Bytes of memory that the process uses; None if it did not answer."""
    gpu: GpuFigures | None
    state: RankState
    doing: str
    """Work of the rank for ddip, or how to let a stopped rank continue; empty while it runs a cell or is idle."""
    busy_for: float | None
    """Seconds since the cell or request began; None while the rank is idle."""
    cell: int | None
    """Number of the running cell."""


class DeviceStatus(TypedDict):
    """A device that ranks compute on."""

    device: str
    host: str
    ranks: list[int]
    memory_total: int | None
    """Bytes; None for the CPU, and if no rank on the device has answered."""


class GroupStatus(TypedDict):
    """State of the whole group."""

    size: int
    backend: str
    healthy: bool
    """False if a cell has left the group unusable or a rank is gone. ddip tries to rebuild it before the next cell."""
    app: str | None
    hosts: list[str]


class Status(TypedDict):
    """State of the group, its ranks, devices and cells."""

    schema: int
    group: GroupStatus | None
    """State of the group, or None if there is no group."""
    ranks: list[RankStatus]
    devices: list[DeviceStatus]
    cells: list[CellStatus]
    """Most recent cells, oldest first, including those of former groups."""
    errors: dict[str, LastError]
    """Most recent error of each rank that has raised one in these cells."""
