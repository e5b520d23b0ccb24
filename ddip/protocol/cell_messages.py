"""A cell on its way to a rank, and the rank's answer: messages of ddip's own on the channel of requests.

Jupyter's ``execute_request`` costs twice as much on the rank, and ipyparallel's handling of its answer in the notebook.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ddip.protocol.reports import CellReport

REQUEST = "ddip_cell_request"
REPLY = "ddip_cell_reply"
"""Types of the two messages; the kernel itself makes the second of the first where a cell is aborted on its way."""


class Asked(TypedDict, total=False):
    """What a rank must know of a cell besides its code."""

    number: int
    """The one that the user sees."""
    name: str
    """The same on all ranks."""
    ranks: list[int]
    """Which run it."""
    rich: bool
    """Can the notebook show HTML?"""
    limit: int
    """Characters that may be shown; 0: nobody looks."""
    log: str
    """With what the names of the files begin to which all that ranks write goes, too."""
    profile: str
    """Folder for the traces of a profile."""


class CellRequest(TypedDict):
    """Content of the first message."""

    code: str
    silent: bool
    """It has no output, and is in no history."""
    history: bool
    asked: Asked


class CellReply(TypedDict, total=False):
    """Content of the second message."""

    status: Literal["ok", "error", "aborted"]
    """Aborted: it was stopped before it began."""
    ename: str
    evalue: str
    traceback: list[str]
    payload: list[dict[str, Any]]
    """Pages of help, and the like."""
    report: CellReport
    """Missing where the rank could not make it, and for silent cells."""
    silent: bool
    """Has nothing been shown? Then no message follows that the output has ended."""
