"""Diagnose from outside why a rank's process ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddip.cluster import limits

LOG_LINES = 12
"""Number of log lines that an error shows."""
CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"}
"""Signals with which faulty C code ends its process."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of this host, or of the control group that confines this process; bytes."""

    total: int
    available: int
    kills: int
    """Number of processes that the kernel has killed for lack of memory."""

    @classmethod
    def now(cls) -> HostMemory:
        """Read the current figures: those of the control group if it has a limit, else those of the host."""
        memory = psutil.virtual_memory()
        total, available = int(memory.total), int(memory.available)
        files = [Path("/proc/vmstat"), *(group / "memory.events" for group in limits.control_groups())]
        limit, used = limits.control_group("memory")
        if 0 < limit < total:
            total, available = limit, min(available, limit - used)
        kills = max(_count_kills(file) for file in files)
        return cls(total, available, kills)


def _count_kills(file: Path) -> int:
    """Return the number of processes that were killed for lack of memory, from a file of the kernel."""
    try:
        words = file.read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def exit_text(code: int | None) -> str:
    """Return how a process ended, such as ``SIGKILL`` or ``exit code 3``; None is an unknown code."""
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {int(code)}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def cause_text(code: int | None, held: int | None, before: HostMemory, now: HostMemory) -> str:
    """Return the likely cause of a process's end, in words.

    `code`: exit code, or the negative signal number; None: unknown. `held`: the process's last known memory in bytes;
    `before`, `now`: memory of its host before it started, and now.
    """
    name = exit_text(code)
    if name in CRASHES:
        return "a crash in C code, such as an extension's or a driver's"
    if name == "SIGKILL":
        figures = f"{_gigabytes_text(now.available)} of {_gigabytes_text(now.total)} GB are free now"
        if held is not None:
            figures = f"its last known memory use was {_gigabytes_text(held)} GB; {figures}"
        if now.kills > before.kills:
            return f"the OOM killer ended it, or another process ({figures})"
        short = now.available < now.total / 10 or (held is not None and held > now.total / 2)
        who = "probably killed by the OOM killer" if short else "killed from outside, or by the OOM killer"
        return f"{who} ({figures})"
    if code is not None and code >= 0:
        return "the cell, or a library, ended the process, as os._exit does"
    return "someone ended it"


def log_end(text: str, count: int) -> list[str]:
    """Return the last `count` lines of a log; after a crash, those before it and the crashed thread's inner frames."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("Fatal Python error"):  # from faulthandler; the crashed thread follows, innermost first
            stack = next((j for j in range(i, len(lines)) if lines[j].startswith("Current thread")), i + 1)
            return [*lines[max(0, i - count) : i], line, *lines[stack : stack + count - 1]]
    return lines[-count:]


class EngineLogs:
    """The logs of engines, kept even after ipyparallel has removed the files."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        self._last_words: dict[int, str] = {}
        self._remote_marks: dict[int, Callable[[], None]] = {}
        self._begins: dict[int, int] = {}
        """Size of each log in bytes when the last cell was sent."""

    def opened(self, engine: int, path: Path) -> None:
        """Note that `engine` has started and writes to `path`."""
        self._paths[engine] = path

    def opened_elsewhere(self, engine: int, mark: Callable[[], None]) -> None:
        """Note that `engine` has started on another host.

        `mark` limits its log to lines written after the call.
        """
        self._remote_marks[engine] = mark

    def cell_begins(self, engine: int) -> None:
        """Note that a cell is sent to `engine`, so that `tail` omits earlier lines."""
        if engine in self._remote_marks:
            self._remote_marks[engine]()
        with contextlib.suppress(KeyError, OSError):  # not started, or ended
            self._begins[engine] = self._paths[engine].stat().st_size

    def closed(self, engine: int, text: str) -> None:
        """Note that `engine` has ended, with `text` in its log."""
        self._last_words[engine] = text

    def tail(self, engine: int) -> list[str]:
        """Return the last lines that `engine` has logged since its last cell was sent, or else since it started.

        After a crash, return the lines that show where it happened. The log of an engine on another host is empty until
        that engine has ended.
        """
        try:
            log = self._paths[engine].read_bytes()
        except (KeyError, OSError):  # not started, or ended
            log = self._last_words.get(engine, "").encode(errors="replace")
        begin = self._begins.get(engine, 0)
        if begin <= len(log):  # else the log was truncated during the cell
            log = log[begin:]
        return log_end(log.decode(errors="replace"), LOG_LINES)

    def text(self, engine: int) -> str:
        """Return the `tail` of the engine's log as the end of an error message, with a separator."""
        lines = self.tail(engine)
        return "\nend of an engine's log:\n  " + "\n  ".join(lines) if lines else "; its log is empty"


def _gigabytes_text(size: int) -> str:
    return f"{size / 1e9:.1f}"
