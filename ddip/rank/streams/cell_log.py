"""``%%dip --log``: a file in which a rank keeps what one cell writes, whole, whoever looks at it.

A thread of the cell may write later: the files of the last cells stay open.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import IO

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
KEPT = 50
"""Cells whose files are open."""
_logs: dict[str, CellLog] = {}
"""By the id of the cell's request."""


class CellLog:
    """Of one cell of this rank. What cannot be written is in `failed`, and the cell goes on without the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.failed = ""
        self._file: IO[str] | None = None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # on another host it may not be there
            Path(path).write_bytes(b"")
            # for appending: a thread of a former cell with the same file may still write into it
            self._file = Path(path).open("a", encoding="utf-8", errors="backslashreplace", newline="")  # noqa: SIM115
        except OSError as error:
            self._give_up(error)

    def write(self, text: str) -> None:
        """More of it; it is in the file when this returns."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:  # the disk may be full
            self._give_up(error)

    def close(self) -> None:
        """Nothing more comes."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what it could not write before
                file.close()

    def _give_up(self, error: OSError) -> None:
        self.failed = f"{type(error).__name__}: {error}"
        self.close()


def begin(request: str, prefix: str, rank: int) -> None:
    """Keep what the cell of this request writes on `rank` in a file whose name begins with `prefix`."""
    _logs[request] = CellLog(f"{prefix}.{rank}.log")
    if len(_logs) > KEPT:
        _logs.pop(next(iter(_logs))).close()


def has(request: str) -> bool:
    """Has the cell of this request a log?"""
    return request in _logs


def write(request: str, text: str) -> None:
    """The cell of this request has written `text`."""
    if request in _logs:
        _logs[request].write(text)


def end(request: str, traceback: list[str]) -> str:
    """The cell has ended, with an error if there is a `traceback`, which is added without colours. Returns what to say
    if not all of it could be written."""
    log = _logs[request]
    if traceback:
        log.write(ANSI.sub("", "\n".join([*traceback, ""])))
    return f"ddip: {log.path} could not be written: {log.failed}\n" if log.failed else ""
