"""What a rank writes: sent soon, not sent where nobody looks, and of a flood only the beginning and the end.

ipykernel hands text to a thread that sends it every so often. What is done here is done in that thread, so that a loop
of prints costs what it costs in a notebook's own kernel.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ipykernel.iostream import OutStream
from ipykernel.zmqshell import ZMQDisplayPublisher

from ddip.rank.stacks import is_users

TICK_SECONDS = 0.25
"""How often something of a flood is sent, so that a person sees that it goes on."""
TICK_CHARACTERS = 2_000
DESCRIPTORS = {"stdout": 1, "stderr": 2}
LINE = 1_000
"""Characters of a line that is written in one piece by what a cell has forked."""
CELLS = 50
"""Cells whose budgets are kept, for what their threads write later."""


@dataclass(frozen=True)
class Chunk:
    """A part of what a cell wrote to one stream."""

    text: str
    line: int | None = None
    """None: it follows what was sent before. Else it replaces the end of that, and begins at this line, from 0."""


@dataclass
class OutputLimiter:
    """How much of what one cell writes to one stream is sent: `limit` characters, then the end of it."""

    limit: int
    _written: int = 0
    _sent: int = 0
    """Characters up to the end of what was sent last."""
    _lines: int = 0
    _above: int = 0
    """Characters written above the limit."""
    _end: str = ""
    """The last of them."""
    _ticked: float = field(default_factory=time.monotonic)

    def take(self, text: str) -> Chunk | None:
        """What to send when `text` has been written; None: nothing now."""
        if not text:
            return None
        room = self.limit - self._written
        self._written += len(text)
        self._lines += text.count("\n")
        if self._written <= self.limit:
            self._sent = self._written
            return Chunk(text)
        if room > 0:  # the last whole lines that fit; the rest is above the limit
            begin = text.rfind("\n", 0, room) + 1
            self._sent = self._written - len(text) + begin
            self._above = len(text) - begin
            self._end = text[begin:][-(self.limit // 2) :]
            return Chunk(text[:begin])
        self._above += len(text)
        self._end = (self._end + text)[-(self.limit // 2) :]
        now = time.monotonic()
        if now < self._ticked + TICK_SECONDS:
            return None
        self._ticked = now
        new = self._written - self._sent
        self._sent = self._written
        return Chunk(self._end[-new:]) if new <= TICK_CHARACTERS else self._last(TICK_CHARACTERS)

    def rest(self) -> Chunk | None:
        """The end of a flood; None if there was none."""
        if self._written <= self.limit:
            return None
        self._sent = self._written
        return self._last(self.limit // 2)

    def _last(self, most: int) -> Chunk:
        text = self._end[-most:]
        if len(text) < self._above:  # not all: whole lines
            text = text[text.find("\n") + 1 :]
        return Chunk(text, self._lines - text.count("\n"))


_cell: ContextVar[dict[str, Any]] = ContextVar("ddip_cell")
"""Header of the request whose output this is: of a task, the one in which it was made."""


class _OfThreads:
    """Whoever starts a thread is its cell: ipykernel would take the cell that runs when the thread writes."""

    _latest: dict[str, Any] = {}

    @property
    def parent_header(self) -> dict[str, Any]:
        try:
            return _cell.get()
        except LookupError:
            return getattr(threading.current_thread(), "ddip_cell", None) or self._latest

    @parent_header.setter
    def parent_header(self, value: dict[str, Any]) -> None:
        _cell.set(value)
        self._latest = value


class RankStream(_OfThreads, OutStream):  # type: ignore[misc]
    """stdout or stderr of a rank."""

    flush_interval = 0.04
    _writer: RankStream | None = None
    """Which of the two was written to last; of both."""
    _line: deque[tuple[RankStream, dict[str, Any], str]] = deque()
    """What was written to one before the other was written to, in order; of both."""
    _forked = False
    """Is this process one that a cell has forked? Asked with each write, and quicker than the number of the process."""
    _unfinished = ""
    """In what a cell has forked: the line that is being written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        os.register_at_fork(after_in_child=lambda: setattr(self, "_forked", True))

    def write(self, string: str) -> int:
        """What the other stream still holds was written before, and leaves before: whichever is flushed first.

        What a cell has forked writes lines to the descriptor, which this rank reads and shows: the sockets are not its.
        """
        if self._forked:
            self._unfinished += string
            if string.endswith(("\n", "\r")) or len(self._unfinished) > LINE:
                self._write_through()
            return len(string)
        before = RankStream._writer
        if before is not self:
            RankStream._writer = self
            if before is not None:
                before._line_up()
        super().write(string)
        return len(string)

    def _write_through(self) -> None:
        left, self._unfinished = self._unfinished.encode("utf-8", "backslashreplace"), ""
        while left:
            left = left[os.write(DESCRIPTORS[self.name], left) :]

    def _line_up(self) -> None:
        self._line.extend((self, parent, text) for parent, text in self._flush_buffers())

    def close(self) -> None:
        """A cell that closes it has written all that it wants to; the next one writes here, too."""
        self.flush()

    def begin_cell(self, header: dict[str, Any], limit: int) -> None:
        """The cell of the request with this header may show `limit` characters; 0: nobody looks."""
        self._budgets[header["msg_id"]] = OutputLimiter(limit)
        if len(self._budgets) > CELLS:
            del self._budgets[next(iter(self._budgets))]

    def end_cell(self, header: dict[str, Any]) -> None:
        """Send the end of what the cell wrote, with the next flush: ipykernel flushes before it answers."""
        self._ended.append(header)
        if getattr(sys, self.name) is not self:
            self.pub_thread.schedule(self._flush)

    @cached_property
    def _budgets(self) -> dict[str, OutputLimiter]:
        return {}

    @cached_property
    def _ended(self) -> deque[dict[str, Any]]:
        return deque()

    def _flush(self) -> None:
        if not self._is_master_process():
            self._write_through()
            return  # what the buffers hold is the parent's, which sends it
        self._flush_pending = False
        self._subprocess_flush_pending = False
        self._line_up()
        while self._line:
            stream, parent, text = self._line.popleft()
            stream._show(text, parent)
        while self._ended:
            header = self._ended.popleft()
            rest = self._budgets[header["msg_id"]].rest()
            if rest is not None:
                self._send(rest, header)

    def _show(self, text: str, parent: dict[str, Any]) -> None:
        budget = self._budgets.get(parent.get("msg_id", ""))
        if budget is None:
            self._send(Chunk(text), parent)
        elif budget.limit:
            piece = budget.take(text)
            if piece is not None:
                self._send(piece, parent)

    def _send(self, piece: Chunk, parent: dict[str, Any]) -> None:
        if not piece.text:
            return
        content = {"name": self.name, "text": piece.text}
        if piece.line is not None:
            content["line"] = piece.line
        self.session.send(self.pub_thread, self.session.msg("stream", content, parent=parent), ident=self.topic)


class RankDisplay(_OfThreads, ZMQDisplayPublisher):  # type: ignore[misc]
    """What a rank displays."""

    def _flush_streams(self) -> None:
        """What was written before is above it, also where something has taken the place of `sys.stdout` that keeps a
        flush to itself, as that of rich does while it draws a bar."""
        super()._flush_streams()
        last = RankStream._writer  # what the other one held has left before
        if last is not None and last not in (sys.stdout, sys.stderr):
            last.flush()


def threads_belong_to_their_cells() -> None:
    """From here on each thread knows the cell in which it was started, and so do the threads that it starts."""
    start = threading.Thread.start

    def start_in_cell(self: threading.Thread) -> None:
        self.ddip_cell = getattr(sys.stdout, "parent_header", None)  # type: ignore[attr-defined]
        start(self)

    threading.Thread.start = start_in_cell  # type: ignore[method-assign]


class _OfACell:
    """A stream that a cell has put in place of stdout or stderr, and which may fail at any time: its disk may be full.

    ipykernel flushes it after each request, and if that raised, the answer would be lost.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except Exception:
            if is_users(sys._getframe()):
                raise


def mend(stdout: RankStream, stderr: RankStream) -> None:
    """Put these back where a cell has left a stream in their place that cannot be written to."""
    for name, ours in (("stdout", stdout), ("stderr", stderr)):
        left = getattr(sys, name)
        known = isinstance(left, _OfACell) and not getattr(left, "closed", False)
        if known or (left is ours and not vars(ours).keys() & {"write", "flush"}):
            continue  # as it was; to try it would cost a turn of the output thread
        try:
            left.write("")
            left.flush()
            if left is not ours:
                setattr(sys, name, _OfACell(left))
        except Exception as error:
            for replaced in ("write", "flush"):
                vars(ours).pop(replaced, None)
            setattr(sys, name, ours)
            what = f"the cell left a sys.{name} that cannot be written to ({type(error).__name__})"
            stderr.write(f"ddip: {what}; the former one is back\n")
