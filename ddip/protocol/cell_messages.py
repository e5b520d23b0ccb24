"""Messages that carry a cell to a rank and its reply back, on the channel of requests.

They replace Jupyter's ``execute_request``, which costs the rank twice the time, and the notebook the time in which
ipyparallel processes the reply.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ddip.protocol.reports import CellReport

REQUEST = "ddip_cell_request"
REPLY = "ddip_cell_reply"
"""Types of the two messages. ipykernel derives the second from the first when it aborts a queued cell."""


class CellOptions(TypedDict, total=False):
    """Facts about a cell that a rank needs besides its code."""

    number: int
    """Number that the user sees."""
    name: str
    """Name of the cell, the same on all ranks."""
    ranks: list[int]
    """Ranks that run the cell."""
    rich: bool
    """True if the notebook can show HTML."""
    limit: int
    """Maximum number of characters to show; 0: the output is not shown."""
    log: str
    """Prefix of the names of the files to which ranks also write their output."""
    profile: str
    """Folder for the traces of a profile."""


class CellRequest(TypedDict):
    """Content of a message of type `REQUEST`."""

    code: str
    silent: bool
    """True if the cell has no output and is left out of the history."""
    history: bool
    asked: CellOptions


class CellReply(TypedDict, total=False):
    """Content of a message of type `REPLY`."""

    status: Literal["ok", "error", "aborted"]
    """Result of the cell; ``aborted``: it was stopped before it began."""
    ename: str
    evalue: str
    traceback: list[str]
    payload: list[dict[str, Any]]
    """Pages for the pager, such as help."""
    report: CellReport
    """Report of the rank; missing if the rank could not make it, and for silent cells."""
    silent: bool
    """True if the cell has shown nothing. Then no message announces the end of its output."""
