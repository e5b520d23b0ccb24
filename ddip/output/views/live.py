"""One stream of one rank, for the views that show it as it comes: what is finished, and what may still change.

    text  -->  finished     handed out once, by `write` or `end`
          -->  bar          overwritten again and again, until an ordinary line follows; then handed out by `write`
          -->  flood        from where the rank begins to leave lines out; shown when the cell has ended

The views that keep what a rank has shown have a `RankTranscript` instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ddip.output.area import GONE, CellOutputArea, new_id
from ddip.output.terminal_text import MOVES, Screen, moves

LIVE_SECONDS = 0.1
"""How often something that changes in place is sent again."""


@dataclass(frozen=True)
class Finished:
    """What will not change any more, in the order in which it was written."""

    bar: str | None
    """One that has ended, as it was in the end; without the end of its last line."""
    text: str


class LiveStream:
    """What has been written so far.

    `in_place`: bars are kept back, for the page can change what it shows; otherwise they are text, which a terminal
    obeys. `whole_lines`: so are lines that have no end yet, and what overwrites itself within them.
    """

    def __init__(self, limit: int, *, in_place: bool, whole_lines: bool = False) -> None:
        self._limit = limit
        self._in_place = in_place
        self._whole_lines = whole_lines
        self._lines = 0
        """Finished."""
        self._open = self._new_line()
        """The line without an end, where only whole lines are finished."""
        self._bar: Screen | None = None
        self.flood: Screen | None = None

    def _new_line(self) -> Screen:
        """With room for all that a rank sends before it leaves something out, and for what it writes slowly then."""
        return Screen(2 * self._limit)

    def write(self, text: str, line: int | None = None, cut: int = 0) -> Finished:
        """More text; with `line` it replaces the end of what was there (``Screen.jump``)."""
        if line is not None:
            self.flood = self.flood or Screen(self._limit)
            self.flood.jump(line - self._lines, text, cut)
            return Finished(None, "")
        if self.flood is not None:
            self.flood.write(text)
            return Finished(None, "")
        bar = None
        if self._in_place and self._bar is not None and not moves(text) and not self._bar.unfinished:
            bar = self._end_bar()  # bars within bars come in pieces
        finished = self._write(text)
        self._lines += finished.count("\n")
        return Finished(bar, finished)

    def _write(self, text: str) -> str:
        """Returns what is finished."""
        begins = self._bar is None and moves(text)
        if self._bar is None and not self._whole_lines:
            if not (begins and self._in_place):
                return text
            before, text = _before_what_moves(text)
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
        if finished and not self._bar.unfinished:  # it was one line, and has its end
            self._open, self._bar = self._bar, None  # with the colour, and the blanks, that the next line begins with
        return finished

    def _end_bar(self) -> str | None:
        if self._bar is None:
            return None
        screen, self._bar = self._bar, None
        self._lines += screen.text.count("\n")
        return screen.text.rstrip("\n")

    def end(self) -> Finished:
        """Nothing more will be written into the last line, nor into a bar."""
        bar = self._end_bar()
        if not self._in_place and bar is not None:
            return Finished(None, bar)
        rest, self._open = self._open.text, self._new_line()
        return Finished(bar, rest)

    @property
    def bar(self) -> str | None:
        """As it is now; None where nothing changes."""
        if self._bar is None:
            return None
        return self._bar.live_text(0) if self._bar.left_out else self._bar.text


class ThrottledDisplay:
    """A display that changes, seldom enough for any page."""

    def __init__(self, page: CellOutputArea) -> None:
        self._page = page
        self._id = new_id()
        self._shown: str | None = None
        self._next = 0.0

    def show(self, text: str, at_once: bool = False) -> None:
        """Show `text` in place of what was shown; unless `at_once`, only if that is long enough ago."""
        if text == self._shown or (not at_once and time.monotonic() < self._next):
            return
        self._page.show({"text/plain": text} if text else GONE, display_id=self._id, update=self._shown is not None)
        self._shown = text
        self._next = time.monotonic() + LIVE_SECONDS

    @property
    def is_there(self) -> bool:
        """Does the page show anything here?"""
        return bool(self._shown)


def _before_what_moves(text: str) -> tuple[str, str]:
    """The lines before the first in which something moves, and the rest."""
    found = MOVES.search(text)
    assert found is not None
    begin = text.rfind("\n", 0, found.start()) + 1
    return text[:begin], text[begin:]
