"""Of a flood that a cell writes only the beginning and the end leave the rank."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

TICK_SECONDS = 0.25
"""How often something of a flood is sent, so that a person sees that it goes on."""
TICK_CHARACTERS = 2_000
LINE_END = re.compile(r"\r?\n|\r")
"""What is overwritten is a line, too: none of a bar's is long."""
LINE_BEGIN = 1_000
"""Characters of a long line that are sent, though what is before it has taken more than half of what may be."""


@dataclass(frozen=True)
class Chunk:
    """A part of what a cell wrote to one stream."""

    text: str
    line: int | None = None
    """None: it follows what was sent before. Else it replaces the end of that, and begins at this line, from 0."""
    cut: int = 0
    """Characters of that line that are left out before the text."""
    breaks: bool = False
    """Does what was sent before end within a line, which has to be ended first?"""


@dataclass
class OutputLimiter:
    """How much of what one cell writes to one stream is sent: `limit` characters, then the end of it.

    Whole lines, but for those that are long: these are broken in two, with what is left out between.
    """

    limit: int
    _written: int = 0
    _sent: int = 0
    """Characters up to the end of what was sent last."""
    _lines: int = 0
    _column: int = 0
    """Characters of the last line of what follows the beginning without a gap; 0 in one that is overwritten."""
    _end: str = ""
    """The last characters after that."""
    _cut: int = 0
    """Characters of its first line that are before it, and after what was sent without a gap."""
    _gap: bool = False
    """Has something been left out?"""
    _ticked: float = field(default_factory=time.monotonic)

    def take(self, text: str) -> Chunk | None:
        """What to send when `text` has been written; None: nothing now."""
        if not text:
            return None
        room = self.limit - self._written
        self._written += len(text)
        self._lines += text.count("\n")
        if self._written <= self.limit:
            return self._send_on(text)
        if room > 0:
            fits = self._fitting(text, room)
            chunk = self._send_on(text[:fits])
            self._sent = self._written - len(text) + fits
            self._keep(text[fits:])
            return chunk
        self._keep(text)
        now = time.monotonic()
        if now < self._ticked + TICK_SECONDS:
            return None
        self._ticked = now
        new = self._written - self._sent
        if new > TICK_CHARACTERS or new > len(self._end):
            return self._last(TICK_CHARACTERS)
        self._sent = self._written
        return Chunk(self._end[-new:]) if self._gap else self._send_on(self._end)

    def rest(self) -> Chunk | None:
        """The end of a flood; None if there is nothing to add."""
        if self._written <= self.limit:
            return None
        if self._gap or self._written - self._sent > len(self._end):
            return self._last(self.limit // 2)
        return self._send_on(self._end) if self._end else None

    def _fitting(self, text: str, room: int) -> int:
        """How much of `text` belongs to the beginning: the last whole lines that fit, and of a long line a part."""
        begin = _last_line(text[:room])
        end = _line_end(text, room) or len(text)
        if (0 if begin else self._column) + end - begin <= self.limit // 4:
            return begin
        half = self.limit // 2 - (self.limit - room)  # the other half is for the end of it
        return min(room, max(begin + min(LINE_BEGIN, self.limit // 4), half))

    def _send_on(self, text: str) -> Chunk:
        """It follows what was sent before."""
        begin = _last_line(text)
        self._column = (0 if begin else self._column) + len(text) - begin
        if text[begin - 1 : begin] == "\r":
            self._column = 0
        self._sent, self._end, self._cut = self._written, "", 0
        return Chunk(text)

    def _keep(self, text: str) -> None:
        whole = self._end + text
        over = max(0, len(whole) - self.limit // 2)
        self._end, self._cut = whole[over:], _cut_after(self._cut, whole[:over])

    def _last(self, most: int) -> Chunk:
        """The end, without what was sent before the first gap."""
        breaks = not self._gap and self._column > 0
        self._lines += breaks
        self._gap, self._sent = True, self._written
        over = max(0, len(self._end) - most)
        text, cut = self._end[over:], _cut_after(self._cut, self._end[:over])
        end = _line_end(text, 0)
        if cut and end and cut + end <= most // 2:  # not a long line: whole ones
            text, cut = text[end:], 0
        return Chunk(text, self._lines - text.count("\n"), cut, breaks)


def _last_line(text: str) -> int:
    """Where its last line begins, or what overwrites it."""
    return max(text.rfind("\n"), text.rfind("\r")) + 1


def _line_end(text: str, at: int) -> int:
    """Where the line ends in which `at` is, its end included; 0: not in `text`."""
    found = LINE_END.search(text, at)
    return found.end() if found else 0


def _cut_after(cut: int, dropped: str) -> int:
    """How much of a line is missing when `dropped` is, too."""
    begin = _last_line(dropped)
    return len(dropped) - begin + (0 if begin else cut)
