"""What a view of a cell's output is, and the plainest: one rank, as it comes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from ddip.errors import RankError
from ddip.output.area import CellOutputArea, flush, new_id
from ddip.output.terminal_text import MOVES, Screen, moves
from ddip.output.transcript import Bundle, RankTranscript, labelled

LIVE_SECONDS = 0.1
"""How often something that changes in place is sent again."""


class View(Protocol):
    """Lays out what ranks show."""

    def text(self, rank: int, stream: str, text: str, line: int | None) -> None:
        """Text of a stream; with `line` it replaces the end of what was there (``Screen.jump``)."""

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """A MIME bundle."""

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Something displayed before has changed."""

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """The value of the cell's last line."""

    def clear(self, rank: int, wait: bool) -> None:
        """The rank clears its output."""

    def section(self, rank: int) -> RankTranscript | None:
        """Where the view keeps what the rank has shown, if it does."""

    def ended(self, rank: int, failed: bool) -> None:
        """The rank has finished the cell."""

    def draw(self) -> None:
        """Nothing more is waiting: bring the page up to date."""

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """The cell has ended; returns whether the note is shown."""


class ThrottledDisplay:
    """A display that changes, seldom enough for any page."""

    def __init__(self, page: CellOutputArea) -> None:
        self._page = page
        self._id = new_id()
        self._shown: str | None = None
        self._next = 0.0

    def show(self, text: str, at_once: bool = False) -> None:
        if text == self._shown or (not at_once and time.monotonic() < self._next):
            return
        self._page.show({"text/plain": text}, display_id=self._id, update=self._shown is not None)
        self._shown = text
        self._next = time.monotonic() + LIVE_SECONDS


class _Stream:
    """One stream of one rank, shown as it comes; bars and floods change in place, where the page can do that."""

    def __init__(self, page: CellOutputArea, name: str, limit: int) -> None:
        self._page = page
        self._name = name
        self._limit = limit
        self._lines = 0
        self._bar: tuple[Screen, ThrottledDisplay] | None = None
        self._flood: tuple[Screen, ThrottledDisplay] | None = None

    def write(self, text: str, line: int | None) -> None:
        if line is not None:
            if self._flood is None:
                self._flood = Screen(self._limit), ThrottledDisplay(self._page)
            self._flood[0].jump(line - self._lines, text)
        elif self._flood is not None:
            self._flood[0].write(text)
        elif self._page.rich and self._goes_into_bar(text):
            self._write_bar(text)
        else:
            self._lines += text.count("\n")
            self._page.write(self._name, text)

    def _goes_into_bar(self, text: str) -> bool:
        """A bar ends when what follows it is an ordinary line: bars within bars come in pieces."""
        if moves(text):
            return True
        if self._bar is not None and not self._bar[0].unfinished:
            self.end_bar()
        return self._bar is not None

    def _write_bar(self, text: str) -> None:
        if self._bar is None:
            found = MOVES.search(text)
            assert found is not None
            begin = text.rfind("\n", 0, found.start()) + 1
            before, text = text[:begin], text[begin:]
            self._lines += before.count("\n")
            self._page.write(self._name, before)
            self._bar = Screen(self._limit), ThrottledDisplay(self._page)
        self._bar[0].write(text)
        self.draw()  # the first time at once: what comes next shall be below it

    def end_bar(self) -> None:
        """Show the bar as it is in the end."""
        if self._bar is not None:
            (screen, live), self._bar = self._bar, None
            self._lines += screen.text.count("\n")
            live.show(screen.text.rstrip("\n"), at_once=True)

    def draw(self) -> None:
        for screen, live in filter(None, (self._bar, self._flood if self._page.rich else None)):
            live.show(screen.live_text(0) if screen.skipped else screen.text)

    def close(self) -> None:
        self.end_bar()
        if self._flood is not None:
            screen, live = self._flood
            note = f"… {screen.skipped:,} lines left out …"
            if self._page.rich:
                live.show(note, at_once=True)
            else:
                self._page.write(self._name, f"{note}\n")
            self._page.write(self._name, screen.end_text)
            self._flood = None


class Plain:
    """One rank, as if the cell had run in the notebook."""

    def __init__(self, page: CellOutputArea, limit: int) -> None:
        self._page = page
        self._streams = {name: _Stream(page, name, limit) for name in ("stdout", "stderr")}

    def text(self, rank: int, stream: str, text: str, line: int | None) -> None:
        """Write the text where the cell's own would go."""
        self._streams[stream].write(text, line)

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Show the bundle as if the cell had displayed it here."""
        self._page.show(data, metadata, display_id)

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Change what was shown with `display_id`."""
        self._page.show(data, metadata, display_id, update=True)

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """With its label, in the text."""
        self._page.show(labelled(f"Out[{rank}:{number}]:", data), metadata)

    def clear(self, rank: int, wait: bool) -> None:
        """The cell's output."""
        for stream in self._streams.values():
            stream.end_bar()
        self._page.clear(wait)

    def section(self, rank: int) -> None:
        """It keeps nothing."""

    def ended(self, rank: int, failed: bool) -> None:
        """Does nothing: one rank needs no mark of its end."""

    def draw(self) -> None:
        """Bars and floods."""
        for stream in self._streams.values():
            stream.draw()
        flush()

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """What changed in place is finished."""
        for stream in self._streams.values():
            stream.close()
        flush()
        return False
