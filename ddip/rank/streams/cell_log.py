"""Log files of ``%%dip --log``: each holds the complete output of one cell on one rank, even if no one views it.

The files of the last cells stay open, since a thread may write after its cell has ended.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import IO

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
MAX_OPEN_LOGS = 50
"""Number of last cells whose files stay open."""
_logs: dict[str, CellLog] = {}
"""Open logs, by the id of the cell's request."""


class CellLog:
    """The log file of one cell on this rank.

    If writing fails, `failed` holds the error and the cell continues without the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.failed = ""
        self._file: IO[str] | None = None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # the folder may be missing on another host
            Path(path).write_bytes(b"")
            # append: a thread of an earlier cell with the same file may still write to it
            self._file = Path(path).open("a", encoding="utf-8", errors="backslashreplace", newline="")  # noqa: SIM115
        except OSError as error:
            self._record_failure(error)

    def write(self, text: str) -> None:
        """Append `text` and flush it to the file."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:  # the disk may be full
            self._record_failure(error)

    def close(self) -> None:
        """Close the file; later writes are ignored."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # closing flushes again, which fails as the write did
                file.close()

    def _record_failure(self, error: OSError) -> None:
        self.failed = f"{type(error).__name__}: {error}"
        self.close()


def open_log(request: str, prefix: str, rank: int) -> None:
    """Open and empty the log ``{prefix}.{rank}.log`` for output of the cell with this `request` id.

    Beyond MAX_OPEN_LOGS, the oldest log is closed. Never raises: `finish_log` reports an error.
    """
    _logs[request] = CellLog(f"{prefix}.{rank}.log")
    if len(_logs) > MAX_OPEN_LOGS:
        _logs.pop(next(iter(_logs))).close()


def has_log(request: str) -> bool:
    """Return whether the cell with this `request` id has a log."""
    return request in _logs


def write_text(request: str, text: str) -> None:
    """Append `text` to the log of the cell with this `request` id, if it has one."""
    if request in _logs:
        _logs[request].write(text)


def finish_log(request: str, traceback: list[str]) -> str:
    """Append the lines of `traceback` without ANSI colors when the cell has ended; it must have a log.

    Returns a message for the user if the log could not be written, otherwise an empty string. The file stays open.
    """
    log = _logs[request]
    if traceback:
        log.write(ANSI.sub("", "\n".join([*traceback, ""])))
    return f"ddip: {log.path} could not be written: {log.failed}\n" if log.failed else ""
