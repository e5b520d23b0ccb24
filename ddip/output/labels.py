"""The output of several ranks with a label before each line."""

from __future__ import annotations

from collections.abc import Mapping

from ddip.errors import RankError
from ddip.output.area import CellOutputArea, flush
from ddip.output.terminal_text import Screen, moves
from ddip.output.transcript import Bundle, labelled, own_id
from ddip.output.views import ThrottledDisplay

COLOURS = (36, 35, 33, 32, 34, 31)


class Labels:
    """Each line with its rank, none torn by another's; bars change in place, one a rank."""

    def __init__(self, page: CellOutputArea, limit: int) -> None:
        self._page = page
        self._limit = limit
        self._screens: dict[tuple[int, str], Screen] = {}
        self._floods: dict[tuple[int, str], Screen] = {}
        self._lines: dict[tuple[int, str], int] = {}
        self._bars: dict[tuple[int, str], str] = {}
        """What each bar that is under way shows."""
        self._ended: list[str] = []
        """Lines of bars that have ended, beside others that have not."""
        self._live: ThrottledDisplay | None = None
        self._drawn: list[str] = []

    def text(self, rank: int, stream: str, text: str, line: int | None) -> None:
        """Whole lines at once; the rest when it comes."""
        key = rank, stream
        if line is not None:
            flood = self._floods.setdefault(key, Screen(self._limit))
            flood.jump(line - self._lines.get(key, 0), text)
        elif key in self._floods:
            self._floods[key].write(text)
        else:
            self._write_lines(rank, stream, text)

    def _write_lines(self, rank: int, stream: str, text: str) -> None:
        key = rank, stream
        screen = self._screens.setdefault(key, Screen(self._limit))
        if self._page.rich and key in self._bars and not moves(text) and not screen.unfinished:
            self._end_line(rank, stream)  # its bar has ended
            screen = self._screens[key] = Screen(self._limit)
        if moves(text):
            self._bars[key] = ""
        screen.write(text)
        if self._page.rich and key in self._bars:
            return
        whole = screen.take()
        self._lines[key] = self._lines.get(key, 0) + whole.count("\n")
        if whole and not screen.unfinished:
            self._bars.pop(key, None)
        self._write(rank, stream, whole)

    def _write(self, rank: int, stream: str, lines: str) -> None:
        if lines:
            self._erase()
            self._page.write(stream, "".join(f"{self._label(rank)} {line}\n" for line in lines.splitlines()))

    def _label(self, rank: int) -> str:
        label = f"[rank {rank}]"
        return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{label}\x1b[0m" if self._page.terminal else label

    def _heading(self, rank: int) -> None:
        for stream in ("stdout", "stderr"):
            self._end_line(rank, stream)
        self._erase()
        self._page.write("stdout", f"{self._label(rank)}\n")

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Below a label."""
        self._heading(rank)
        self._page.show(data, metadata, own_id(rank, display_id))

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """In place; a terminal cannot."""
        if self._page.rich:
            self._page.show(data, metadata, own_id(rank, display_id), update=True)

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """Its label says the rank."""
        for stream in ("stdout", "stderr"):
            self._end_line(rank, stream)
        self._erase()
        self._page.show(labelled(f"Out[{rank}:{number}]:", data), metadata)

    def clear(self, rank: int, wait: bool) -> None:
        """Not possible for one rank alone: what it has shown stays."""

    def section(self, rank: int) -> None:
        """It keeps nothing."""

    def ended(self, rank: int, failed: bool) -> None:
        """Its last lines may have no end."""
        for stream in ("stdout", "stderr"):
            self._end_line(rank, stream)

    def draw(self) -> None:
        """The bars."""
        for key in self._bars:
            if key in self._screens:
                self._bars[key] = self._screens[key].text.rstrip("\n")
        lines = [f"{self._label(rank)} {row}" for (rank, _), text in self._bars.items() for row in text.splitlines()]
        if self._page.rich and lines:
            self._live = self._live or ThrottledDisplay(self._page)
            self._live.show("\n".join(self._ended + lines))
        elif self._page.terminal and not self._page.closed and lines != self._drawn:
            self._erase()
            self._page.write("stdout", "".join(f"{line}\n" for line in lines))
            self._drawn = lines
        flush()

    def _erase(self) -> None:
        """Take away the bars that are drawn at the bottom of a terminal."""
        if self._drawn:
            self._page.write("stdout", f"\x1b[{len(self._drawn)}F\x1b[J")
            self._drawn = []

    def _end_line(self, rank: int, stream: str) -> None:
        """No more will be written into the last line."""
        key = rank, stream
        screen = self._screens.pop(key, None)
        bar = self._bars.pop(key, None)
        text = "" if screen is None else screen.text.rstrip("\n")
        if bar is not None and self._page.rich:
            self._lines[key] = self._lines.get(key, 0) + text.count("\n") + 1
            self._ended += [f"{self._label(rank)} {row}" for row in text.splitlines()]
            if not self._bars:  # leave them, and begin anew with the next
                (self._live or ThrottledDisplay(self._page)).show("\n".join(self._ended), at_once=True)
                self._ended, self._live = [], None
        elif text:
            self._write(rank, stream, text)

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """Lines without an end, and the ends of floods."""
        for rank, stream in sorted(self._screens):
            self._end_line(rank, stream)
        self._erase()
        for (rank, stream), flood in sorted(self._floods.items()):
            note_text = f"… {flood.skipped:,} lines left out …\n"
            self._write(rank, stream, note_text + flood.end_text)
        self._floods = {}
        flush()
        return False
