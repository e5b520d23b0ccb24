"""Limit the output that a rank sends: only the beginning and the end of a flood of text."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

TICK_SECONDS = 0.25
"""Interval at which the end of a flood is sent, so that the user sees that the cell is still writing."""
TICK_CHARACTERS = 2_000
"""Characters sent at most per interval."""
LINE_END = re.compile(r"\r?\n|\r")
"""End of a line; ``\\r`` also ends one, so that the states of a progress bar do not add up to a long line."""
LINE_BEGIN = 1_000
"""Characters sent of a long line at the end of the head, even if earlier lines took more than half of the limit."""


@dataclass(frozen=True)
class Chunk:
    """A piece of the text that a cell wrote to one stream."""

    text: str
    line: int | None = None
    """Number of the line at which this text begins, from 0, replacing the tail sent before; None to append it."""
    cut: int = 0
    """Number of characters left out of that line before this text."""
    breaks: bool = False
    """True if the text sent before ends within a line, so that a newline must be sent first."""


@dataclass
class OutputLimiter:
    """Select the text of one cell and stream that is sent: a head of `limit` characters, then the tail.

    Only long lines are split; their middle is left out.
    """

    limit: int
    _written: int = 0
    """Characters written."""
    _sent: int = 0
    """Characters written up to the end of the last chunk."""
    _lines: int = 0
    """Line ends written, and those that were inserted before a gap."""
    _column: int = 0
    """Length of the last line that was sent before any gap; 0 if the next text overwrites it."""
    _tail: str = ""
    """The last characters written after the text that was sent without a gap."""
    _tail_cut: int = 0
    """Characters left out of the first line of the tail, since they were dropped and not sent before."""
    _has_gap: bool = False
    """True if text has been left out."""
    _last_tick: float = field(default_factory=time.monotonic)

    def take(self, text: str) -> Chunk | None:
        """Note that the cell has written `text`; return the chunk to send now, or None."""
        if not text:
            return None
        room = self.limit - self._written
        self._written += len(text)
        self._lines += text.count("\n")
        if self._written <= self.limit:
            return self._append_chunk(text)
        if room > 0:
            fits = self._length_of_head(text, room)
            chunk = self._append_chunk(text[:fits])
            self._sent = self._written - len(text) + fits
            self._add_to_tail(text[fits:])
            return chunk
        self._add_to_tail(text)
        now = time.monotonic()
        if now < self._last_tick + TICK_SECONDS:
            return None
        self._last_tick = now
        new = self._written - self._sent
        if new > TICK_CHARACTERS or new > len(self._tail):
            return self._tail_chunk(TICK_CHARACTERS)
        self._sent = self._written
        return Chunk(self._tail[-new:]) if self._has_gap else self._append_chunk(self._tail)

    def rest(self) -> Chunk | None:
        """Return the tail of a flood, or None if everything has been sent."""
        if self._written <= self.limit:
            return None
        if self._has_gap or self._written - self._sent > len(self._tail):
            return self._tail_chunk(self.limit // 2)
        return self._append_chunk(self._tail) if self._tail else None

    def _length_of_head(self, text: str, room: int) -> int:
        """Return how many characters of `text`, at most `room`, belong to the head.

        They are whole lines and, if the next line is longer than a quarter of the limit, the first part of that.
        """
        begin = _begin_of_last_line(text[:room])
        end = _end_of_line(text, room) or len(text)
        if (0 if begin else self._column) + end - begin <= self.limit // 4:
            return begin
        half = self.limit // 2 - (self.limit - room)  # the other half is for the tail
        return min(room, max(begin + min(LINE_BEGIN, self.limit // 4), half))

    def _append_chunk(self, text: str) -> Chunk:
        """Return a chunk that is appended to the text sent before, and clear the tail."""
        begin = _begin_of_last_line(text)
        self._column = (0 if begin else self._column) + len(text) - begin
        if text[begin - 1 : begin] == "\r":
            self._column = 0
        self._sent, self._tail, self._tail_cut = self._written, "", 0
        return Chunk(text)

    def _add_to_tail(self, text: str) -> None:
        """Append `text` to the tail and keep its last ``limit // 2`` characters."""
        whole = self._tail + text
        over = max(0, len(whole) - self.limit // 2)
        self._tail, self._tail_cut = whole[over:], _missing_after(self._tail_cut, whole[:over])

    def _tail_chunk(self, most: int) -> Chunk:
        """Return the last `most` characters of the tail as a chunk that replaces the tail sent before."""
        breaks = not self._has_gap and self._column > 0
        self._lines += breaks
        self._has_gap, self._sent = True, self._written
        over = max(0, len(self._tail) - most)
        text, cut = self._tail[over:], _missing_after(self._tail_cut, self._tail[:over])
        end = _end_of_line(text, 0)
        if cut and end and cut + end <= most // 2:  # the cut line is short: begin with the next one
            text, cut = text[end:], 0
        return Chunk(text, self._lines - text.count("\n"), cut, breaks)


def _begin_of_last_line(text: str) -> int:
    """Return the position at which the last line of `text` begins; a ``\\r`` begins a new line."""
    return max(text.rfind("\n"), text.rfind("\r")) + 1


def _end_of_line(text: str, at: int) -> int:
    """Return the position after the end of the line that contains `at`; 0 if `text` does not have its end."""
    found = LINE_END.search(text, at)
    return found.end() if found else 0


def _missing_after(cut: int, dropped: str) -> int:
    """Return how many leading characters the remaining line lacks once `dropped` is discarded.

    `cut` characters of its first line were already missing before `dropped`.
    """
    begin = _begin_of_last_line(dropped)
    return len(dropped) - begin + (0 if begin else cut)
