"""Messages that carry a cell to a rank and its reply back, on the channel of requests.

They replace Jupyter's ``execute_request``, which costs the rank twice the time, and the notebook the time in which
ipyparallel processes the reply.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ddip.protocol.reports import CellReport

NOTEBOOK_MAGICS = (
    "makedip",
    "autodip",
    "dipush",
    "dipull",
    "dipshards",
    "dipcheck",
    "dipsync",
    "dipcells",
    "dipcell",
    "dipwait",
    "dipdebug",
    "dipstop",
    "dipstack",
    "dipwatch",
    "dipstatus",
    "dipper",
    "dipexport",
    "dipsave",
    "dipload",
)
"""Magics of ddip that a cell on ranks cannot contain; ``%diprun`` is not one."""
REQUEST = "ddip_cell_request"
REPLY = "ddip_cell_reply"
"""Types of the two messages of a cell. ipykernel derives the second from the first when it aborts a queued cell."""


QUESTION = "ddip_question"
"""Type of the message with which a rank asks the user during a cell; its content is an `AskedQuestion`."""
PAUSE = "ddip_pause"
"""Type of the message that a rank has stopped in an IDE, or that it continues: ``is_paused``."""


class AskedQuestion(TypedDict):
    """A question of a rank to the user: a call of ``input()`` or ``getpass``, or the prompt of a debugger."""

    number: int
    """Number of the question, unique on its rank."""
    prompt: str
    is_password: bool
    """True if the typed text must not be shown."""
    is_command: bool
    """True if a debugger asks for its next command."""
    is_post_mortem: bool
    """True if that debugger was opened at an error, so that the code does not go on after it."""
    place: str
    """Place at which the debugger has stopped; empty for other questions."""
    timeout: float | None
    """Seconds that others wait for this rank in a collective, if a group has a timeout that the user has set."""
    text: str
    """Text that the debugger has written since its last question."""


class ScriptFile(TypedDict):
    """The script of a ``%diprun`` cell, as the notebook finds it."""

    folder: str
    """The notebook's working folder, in which a relative path begins and modules are found."""
    digest: str
    """SHA-256 of the script in hexadecimal digits; empty for a module (``-m``), which only the ranks look for."""


class SaveSchedule(TypedDict):
    """The saves that ``%dipsave --every`` has asked for."""

    folder: str
    names: list[str]
    """Variables to save; empty: all."""
    seconds: float
    """Least time between two saves."""


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
    stdin: bool
    """True if someone can answer the questions of ranks."""
    keep_frames: bool
    """True to keep the frames of its error until the next cell begins."""
    debugs: bool
    """True if the cell debugs the error of the last one, whose frames are kept for it."""
    break_on: list[int]
    """Ranks on which ``breakpoint()`` stops; missing: all."""
    profile: str
    """Folder for the traces of a profile."""
    saves: SaveSchedule
    """Saves at the points that the cell marks with ``ddip.save_point``; missing: none."""
    script: ScriptFile
    """Script that the cell runs; missing unless it is a ``%diprun`` cell."""


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
