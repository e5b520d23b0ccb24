"""Split one stream of one rank into finished text and text that may still change, for the views that show it live.

    text  -->  finished     returned once, by `write` or `end`
          -->  bar          overwritten repeatedly until an ordinary line follows, then returned by `write`
          -->  flood        text from where the rank begins to omit lines; shown at the end of the cell

The views that keep the output of a rank use a `RankTranscript` instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ddip.output.area import GONE, CellOutputArea, new_id
from ddip.output.terminal_text import MOVES, Screen, moves_cursor

LIVE_SECONDS = 0.1
"""Minimum seconds between two updates of a display."""


@dataclass(frozen=True)
class Finished:
    """Output that does not change any more: first a bar, then text."""

    bar: str | None
    """Final form of a finished bar, without its last newline."""
    text: str


class LiveStream:
    """One stream of one rank.

    `in_place`: bars are kept apart, because the page can change its outputs; otherwise they are text, with control
    characters for a terminal. `whole_lines`: unfinished lines are also kept, with text that overwrites itself in them.
    """

    def __init__(self, limit: int, *, in_place: bool, whole_lines: bool = False) -> None:
        self._limit = limit
        self._in_place = in_place
        self._whole_lines = whole_lines
        self._lines = 0
        """Number of finished lines."""
        self._open = self._new_line()
        """The unfinished line, if only whole lines are returned."""
        self._bar: Screen | None = None
        self.flood: Screen | None = None

    def _new_line(self) -> Screen:
        """Return a screen large enough for all text that a rank sends before it omits any."""
        return Screen(2 * self._limit)

    def write(self, text: str, line: int | None = None, cut: int = 0) -> Finished:
        """Add text, and return the finished output.

        If `line` is given, the text replaces the end of the stream from that line on (``Screen.jump``).
        """
        if line is not None:
            self.flood = self.flood or Screen(self._limit)
            self.flood.jump(line - self._lines, text, cut)
            return Finished(None, "")
        if self.flood is not None:
            self.flood.write(text)
            return Finished(None, "")
        bar = None
        if self._in_place and self._bar is not None and not moves_cursor(text) and not self._bar.unfinished:
            bar = self._end_bar()  # not while the bar is unfinished: nested bars come in pieces
        finished = self._write(text)
        self._lines += finished.count("\n")
        return Finished(bar, finished)

    def _write(self, text: str) -> str:
        """Add text and return the finished part."""
        begins = self._bar is None and moves_cursor(text)
        if self._bar is None and not self._whole_lines:
            if not (begins and self._in_place):
                return text
            before, text = _split_at_first_move(text)
            self._open.write(text)
        else:
            before = ""
            (self._bar or self._open).write(text)
        if begins:
            self._bar, self._open = self._open, self._new_line()
        if self._bar is None:
            return self._open.take()
        if self._in_place:
            return before
        finished = self._bar.take()
        if finished and not self._bar.unfinished:  # the bar's line is finished
            self._open, self._bar = self._bar, None  # keeps the colour and blanks with which the next line begins
        return finished

    def _end_bar(self) -> str | None:
        if self._bar is None:
            return None
        screen, self._bar = self._bar, None
        self._lines += screen.text.count("\n")
        return screen.text.rstrip("\n")

    def end(self) -> Finished:
        """Finish the last line and the bar, and return them."""
        bar = self._end_bar()
        if not self._in_place and bar is not None:
            return Finished(None, bar)
        rest, self._open = self._open.text, self._new_line()
        return Finished(bar, rest)

    @property
    def bar(self) -> str | None:
        """Current form of the bar; None if there is none."""
        if self._bar is None:
            return None
        return self._bar.live_text(0) if self._bar.left_out else self._bar.text


class ThrottledDisplay:
    """A display that is updated at most once per `LIVE_SECONDS`."""

    def __init__(self, page: CellOutputArea) -> None:
        self._page = page
        self._id = new_id()
        self._shown: str | None = None
        self._next = 0.0

    def show(self, text: str, at_once: bool = False) -> None:
        """Show `text` in place of the previous one; unless `at_once`, skip it if that is too recent."""
        if text == self._shown or (not at_once and time.monotonic() < self._next):
            return
        self._page.show({"text/plain": text} if text else GONE, display_id=self._id, update=self._shown is not None)
        self._shown = text
        self._next = time.monotonic() + LIVE_SECONDS

    @property
    def is_visible(self) -> bool:
        """True if the page shows text in this display."""
        return bool(self._shown)


def _split_at_first_move(text: str) -> tuple[str, str]:
    """Split `text` before the first line that moves the cursor."""
    found = MOVES.search(text)
    assert found is not None
    begin = text.rfind("\n", 0, found.start()) + 1
    return text[:begin], text[begin:]
