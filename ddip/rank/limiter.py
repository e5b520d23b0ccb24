"""Of a flood that a cell writes only the beginning and the end leave the rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

TICK_SECONDS = 0.25
"""How often something of a flood is sent, so that a person sees that it goes on."""
TICK_CHARACTERS = 2_000


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
