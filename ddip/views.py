"""How the output of ranks is laid out where it is not in tabs: as it comes, with labels, or by rank at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddip.errors import RankError, ranks_text
from ddip.page import Page, flush, new_id
from ddip.screen import MOVES, Screen, moves
from ddip.sections import Bundle, Display, Section, Text, labelled, own_id, plain_of

LIVE_SECONDS = 0.1
"""How often something that changes in place is sent again."""
COLOURS = (36, 35, 33, 32, 34, 31)


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

    def section(self, rank: int) -> Section | None:
        """Where the view keeps what the rank has shown, if it does."""

    def ended(self, rank: int, failed: bool) -> None:
        """The rank has finished the cell."""

    def draw(self) -> None:
        """Nothing more is waiting: bring the page up to date."""

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """The cell has ended; returns whether the note is shown."""


class _Live:
    """A display that changes, seldom enough for any page."""

    def __init__(self, page: Page) -> None:
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

    def __init__(self, page: Page, name: str, limit: int) -> None:
        self._page = page
        self._name = name
        self._limit = limit
        self._lines = 0
        self._bar: tuple[Screen, _Live] | None = None
        self._flood: tuple[Screen, _Live] | None = None

    def write(self, text: str, line: int | None) -> None:
        if line is not None:
            if self._flood is None:
                self._flood = Screen(self._limit), _Live(self._page)
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
            self._bar = Screen(self._limit), _Live(self._page)
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

    def __init__(self, page: Page, limit: int) -> None:
        self._page = page
        self._streams = {name: _Stream(page, name, limit) for name in ("stdout", "stderr")}

    def text(self, rank: int, stream: str, text: str, line: int | None) -> None:
        """As it comes."""
        self._streams[stream].write(text, line)

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """As it comes."""
        self._page.show(data, metadata, display_id)

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """In place."""
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
        """Nothing to tell."""

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


class Labels:
    """Each line with its rank, none torn by another's; bars change in place, one a rank."""

    def __init__(self, page: Page, limit: int) -> None:
        self._page = page
        self._limit = limit
        self._screens: dict[tuple[int, str], Screen] = {}
        self._floods: dict[tuple[int, str], Screen] = {}
        self._lines: dict[tuple[int, str], int] = {}
        self._bars: dict[tuple[int, str], str] = {}
        """What each bar that is under way shows."""
        self._ended: list[str] = []
        """Lines of bars that have ended, beside others that have not."""
        self._live: _Live | None = None
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
            self._live = self._live or _Live(self._page)
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
                (self._live or _Live(self._page)).show("\n".join(self._ended), at_once=True)
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


class Grouped:
    """Nothing until the end; then a section for each rank, ranks with the same output together."""

    def __init__(self, page: Page, ranks: Sequence[int], limit: int) -> None:
        self._page = page
        self._limit = limit
        self._sections = {rank: Section(limit) for rank in ranks}
        self._closed = False

    def text(self, rank: int, stream: str, text: str, line: int | None) -> None:
        """Kept."""
        self._sections[rank].text(stream, text, line)

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Kept."""
        self._sections[rank].display(data, metadata, display_id)

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Kept."""
        self._sections[rank].update(data, metadata, display_id)

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """Kept, with its label."""
        self._sections[rank].display(labelled(f"Out[{number}]:", data), metadata)

    def clear(self, rank: int, wait: bool) -> None:
        """Of this rank."""
        self._sections[rank].clear(wait)

    def section(self, rank: int) -> Section:
        """What the rank has shown."""
        return self._sections[rank]

    def ended(self, rank: int, failed: bool) -> None:
        """Nothing to tell."""

    def draw(self) -> None:
        """Nothing, until the cell has ended."""
        if self._closed:
            self.close({}, "")

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """Everything."""
        groups: list[_Same] = []
        for rank, section in self._sections.items():
            shown = _comparable(section)
            same = next((group for group in groups if group.shown == shown), None)
            if not section.items:
                continue
            if same is None:
                groups.append(_Same([rank], shown, section))
            else:
                same.ranks.append(rank)
        for group in groups:
            self._page.write("stdout", f"── {ranks_text(group.ranks)} ──\n")
            for item in group.section.items:
                if isinstance(item, Text):
                    text = item.screen.text
                    self._page.write(item.stream, text if text.endswith("\n") else f"{text}\n")
                elif isinstance(item, Display):
                    self._page.show(item.data, item.metadata)
                else:
                    self._page.write("stdout", plain_of(item.items) + "\n")
        flush()
        self._closed = True
        self._sections = {rank: Section(self._limit) for rank in self._sections}
        return False


@dataclass
class _Same:
    """Ranks that have shown the same."""

    ranks: list[int]
    shown: object
    section: Section


def _comparable(section: Section) -> object:
    return [
        (item.stream, item.screen.text)
        if isinstance(item, Text)
        else item.data
        if isinstance(item, Display)
        else plain_of(item.items)
        for item in section.items
    ]
