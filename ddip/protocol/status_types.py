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
"""Maximum number of characters of a rank's output; longer output is cut to its end."""

CellOutcome: TypeAlias = Literal["ok", "user_error", "rank_died", "stuck", "interrupted", "timeout", "not_run"]
"""Outcome of a cell. ``stuck``: a rank did not stop on request; ``not_run``: the cell left the queue without
running."""
RankState: TypeAlias = Literal["idle", "busy", "stopped", "no_answer", "ended", "gpu_lost"]
"""Current state of a rank. ``stopped``: a signal or a debugger has stopped its process."""
PartState: TypeAlias = Literal["queued", "running", "ok", "failed", "released", "interrupted", "ended", "not_run"]
"""State of a cell on one rank. ``released``: ddip aborted the collective in which it waited for other ranks; ``ended``:
the process of the rank has ended."""


class ErrorData(TypedDict):
    """An error that a rank has raised."""

    name: str
    """Class name of the exception; ``RankEnded`` if the process of the rank has ended."""
    message: str
    """Message of the exception; may be empty."""
    traceback: str
    """Traceback without colour codes; may be empty."""
    waited: str
    """Location at which the rank waited for other ranks, such as in a collective, if that wait failed because ddip
    aborted it or the other ranks were lost; empty if the rank's own code raised the error."""


class LastError(ErrorData):
    """The most recent error of a rank, with the keys of `ErrorData`."""

    cell: int
    """Number of the cell that raised the error."""


class PartText(TypedDict, total=False):
    """Output of a cell on one rank; without keys if it was not requested (``-S``)."""

    text: str
    """Output of the rank, without colour codes."""
    truncated: bool
    """True if `text` lacks the beginning of the output."""
    same_text_as: int
    """Number of the rank that has shown the same output; replaces `text`."""


class PartData(PartText):
    """State and output of a cell on one rank, with the keys of `PartText`."""

    state: PartState
    """State of the cell on this rank."""
    seconds: float | None
    """Duration of the cell on this rank; None if it is unknown or the cell still runs."""
    error: ErrorData | None
    """Error of the rank; None if it has raised none."""


class CellData(TypedDict):
    """A cell and its result on each rank."""

    schema: int
    """Version of this schema, which is raised if a key is removed or changes its meaning."""
    number: int
    """Number of the cell."""
    outcome: CellOutcome | None
    """Outcome of the cell; None until it has ended."""
    seconds: float
    """Seconds since the cell began, or its duration once it has ended."""
    ranks: dict[str, PartData]
    """Result per rank; the keys are rank numbers as strings, since JSON requires string keys."""


class CellStatus(TypedDict):
    """State of one cell, without its output."""

    number: int
    """Number of the cell."""
    ranks: list[int]
    """Ranks that run the cell."""
    state: Literal["queued", "running", "ended"]
    """Current state; a queued cell waits for earlier cells of its ranks to end."""
    outcome: CellOutcome | None
    """Outcome of the cell; None until it has ended."""
    background: bool
    """True for a cell that runs in the background (``%%dip --bg``, `Group.start`)."""
    seconds: float
    """Seconds since the cell began, or its duration once it has ended; 0 while it is queued."""
    submitted: float
    """Time of submission, in seconds since 1970."""
    began: float | None
    """Time when the cell began, in seconds since 1970; None while it is queued."""
    ended: float | None
    """Time when the cell ended, in seconds since 1970; None until then."""
    first_line: str
    """First non-empty line of the code, cut to 60 characters."""
    error: str | None
    """Message of the error, without tracebacks and cut to 2,000 characters; None if there is no error."""


class GpuFigures(TypedDict):
    """GPU memory of a rank, as torch counts it; None means unknown."""

    allocated: int | None
    """Memory in tensors, in bytes."""
    reserved: int | None
    """Memory that torch's allocator holds, in bytes."""
    total: int | None
    """Memory of the whole GPU, in bytes."""


class RankStatus(TypedDict):
    """Current state of a rank."""

    rank: int
    """Number of the rank."""
    host: str
    """Name of its host."""
    pid: int
    """PID of its process."""
    device: str
    """Device of the rank, which is ``cpu``, or for example ``GPU 2`` with the GPU's number on its host."""
    memory: int | None
    """Resident memory of the process, in bytes; None if the rank did not reply."""
    gpu: GpuFigures | None
    """Memory of its GPU; None on the CPU, and if the rank did not reply."""
    state: RankState
    """Current state.

    ``idle`` and ``busy``: the rank replies. ``stopped``: a signal or a debugger has stopped its process. ``no_answer``:
    it did not reply within 2 seconds. ``ended``: its process has ended. ``gpu_lost``: it can no longer use its GPU.
    """
    doing: str
    """Operation that the rank runs for ddip, or how to continue a stopped rank; empty while the rank runs a cell or is
    idle."""
    busy_for: float | None
    """Seconds since the rank became busy; None while it is idle."""
    cell: int | None
    """Number of the cell that the rank runs; None if it runs none."""


class DeviceStatus(TypedDict):
    """A device that ranks compute on."""

    device: str
    """Device name, which is ``cpu``, or for example ``GPU 2`` with the GPU's number on its host."""
    host: str
    """Name of the host."""
    ranks: list[int]
    """Ranks on the device."""
    memory_total: int | None
    """Memory of the GPU, in bytes; None for the CPU, and if no rank on the device has replied."""


class GroupStatus(TypedDict):
    """State of the whole group."""

    size: int
    """Number of ranks."""
    backend: str
    """Backend of ``torch.distributed``."""
    healthy: bool
    """False if the process group cannot be used, or a rank or its GPU is lost. Before the next cell, ddip rebuilds the
    process group; lost ranks need a repair."""
    app: str | None
    """Name of the prepared app; None without one."""
    hosts: list[str]
    """Names of the hosts that have ranks."""


class Status(TypedDict):
    """State of the group, its ranks, devices and cells."""

    schema: int
    """Version of this schema, which is raised if a key is removed or changes its meaning."""
    group: GroupStatus | None
    """State of the group as a whole; None if there is no group."""
    ranks: list[RankStatus]
    """State of each rank, in rank order; empty if there is no group."""
    devices: list[DeviceStatus]
    """Devices of the ranks, each once; empty if there is no group."""
    cells: list[CellStatus]
    """Most recent cells, oldest first, including cells of former groups."""
    errors: dict[str, LastError]
    """Most recent error of each rank that has raised one in these cells. Keys are rank numbers as strings, since JSON
    requires string keys."""
