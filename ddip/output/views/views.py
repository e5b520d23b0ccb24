"""What a view of a cell's output is, and the plainest: one rank, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from ddip.errors import RankError
from ddip.output.area import CellOutputArea, flush
from ddip.output.transcript import Bundle, RankTranscript, labelled
from ddip.output.views.live import Finished, LiveStream, ThrottledDisplay

Errors: TypeAlias = Mapping[int, RankError]
Beside: TypeAlias = Callable[[], Bundle]
"""What goes beside a cell's HTML, of all that it has shown."""


class View(Protocol):
    """Lays out what ranks show."""

    def text(self, rank: int, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """Text of a stream; with `line` it replaces the end of what was there (``Screen.jump``)."""

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """A MIME bundle."""

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Something displayed before has changed."""

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """The value of the cell's last line."""

    def clear(self, rank: int, wait: bool) -> None:
        """The rank clears its output."""

    def widget_closed(self, rank: int, model: str) -> None:
        """The rank has closed its widget `model`: the page shows nothing in its place."""

    def section(self, rank: int) -> RankTranscript | None:
        """Where the view keeps what the rank has shown, if it does."""

    def ended(self, rank: int, failed: bool) -> None:
        """The rank has finished the cell."""

    def draw(self) -> None:
        """Nothing more is waiting: bring the page up to date."""

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """The cell has ended; returns whether the note is shown."""


class Plain:
    """One rank, as if the cell had run in the notebook.

    `changeable`: what is shown can be changed; not in an Output widget of the page, which passes over changes.
    """

    def __init__(self, page: CellOutputArea, limit: int, *, changeable: bool = True) -> None:
        self._page = page
        self._in_place = page.rich and changeable
        self._streams = {name: LiveStream(limit, in_place=self._in_place) for name in ("stdout", "stderr")}
        self._bars: dict[str, ThrottledDisplay] = {}
        self._floods = {name: ThrottledDisplay(page) for name in self._streams}

    def text(self, rank: int, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """Write the text where the cell's own would go."""
        self._write(stream, self._streams[stream].write(text, line, cut))
        self._draw(stream)  # a bar the first time at once: what comes next must be below it

    def _write(self, stream: str, finished: Finished) -> None:
        if finished.bar is not None:
            (self._bars.pop(stream, None) or ThrottledDisplay(self._page)).show(finished.bar, at_once=True)
        if finished.text:
            self._page.write(stream, finished.text)

    @property
    def has_flood(self) -> bool:
        """Is there an end of a flood, which is shown when this closes?"""
        return any(stream.flood is not None for stream in self._streams.values())

    def _draw(self, stream: str) -> None:
        bar = self._streams[stream].bar
        if bar is not None:
            self._bars.setdefault(stream, ThrottledDisplay(self._page)).show(bar)

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
        for name, stream in self._streams.items():
            self._write(name, stream.end())
        self._page.clear(wait)

    def widget_closed(self, rank: int, model: str) -> None:
        """Nothing is left of it: it has no label."""

    def section(self, rank: int) -> None:
        """It keeps nothing."""

    def ended(self, rank: int, failed: bool) -> None:
        """Does nothing: one rank needs no mark of its end."""

    def draw(self) -> None:
        """Bars and floods."""
        for name, stream in self._streams.items():
            self._draw(name)
            if stream.flood is not None and self._in_place:
                self._floods[name].show(stream.flood.live_text(0) if stream.flood.skipped else stream.flood.text)
        flush()

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """What changed in place is finished."""
        for name, stream in self._streams.items():
            self._write(name, stream.end())
            flood, stream.flood = stream.flood, None
            if flood is None:
                continue
            if self._in_place and (flood.left_out or self._floods[name].is_there):
                self._floods[name].show(flood.left_out, at_once=True)
            elif flood.left_out:
                self._page.write(name, f"{flood.left_out}\n")
            self._page.write(name, flood.end_text)
        flush()
        return False
