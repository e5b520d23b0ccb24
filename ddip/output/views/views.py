"""The base classes of views of a cell's output, and the simplest view: one rank, shown live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ddip.errors import RankError
from ddip.output.area import CellOutputArea, flush_streams
from ddip.output.transcript import Bundle, RankTranscript, add_label
from ddip.output.views.live import Finished, LiveStream, ThrottledDisplay

Errors: TypeAlias = Mapping[int, RankError]
Beside: TypeAlias = Callable[[], Bundle]
"""Returns additional MIME forms of a cell's whole output, sent with its HTML."""


class View:
    """The layout of the output of a cell's ranks; a method that a view does not override does nothing."""

    def text(self, rank: int, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """Add `text` of a stream; if `line` is given, it replaces the stream from there on (``Screen.jump``).

        `stream`: ``stdout`` or ``stderr``; `cut`: number of characters that the rank has left out of that line before
        it.
        """

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Show a MIME bundle."""

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Update an earlier display."""

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """Show the value of the cell's last line, labelled with `number`, that of the cell on the rank."""

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the rank's output; with `wait`, before its next output."""

    def widget_closed(self, rank: int, model: str) -> None:
        """Remove the widget `model`, which the rank has closed."""

    def ended(self, rank: int, failed: bool) -> None:
        """Mark the rank as finished with the cell."""

    def draw(self) -> None:
        """Update the page; called when no message is waiting."""

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """Show the rest of the output at the end of the cell; return True if `errors` and `note` are shown."""
        return False


class TranscriptView(View):
    """A view that keeps the output of each rank in a transcript."""

    def __init__(self, page: CellOutputArea, ranks: Sequence[int], limit: int) -> None:
        self._page = page
        self._sections = {rank: RankTranscript(limit) for rank in ranks}

    def text(self, rank: int, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """Add text of a stream to the rank's transcript."""
        self._sections[rank].text(stream, text, line, cut)

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Add a bundle to the rank's transcript."""
        self._sections[rank].display(data, metadata, display_id)

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """Display the value of the cell's last line with a label."""
        self.display(rank, add_label(f"Out[{number}]:", data), metadata, None)

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the rank's output, at once or before its next output."""
        self._sections[rank].clear(wait)

    def widget_closed(self, rank: int, model: str) -> None:
        """Remove a closed widget."""
        self._sections[rank].close_widget(model)

    def section(self, rank: int) -> RankTranscript:
        """Return the transcript of the rank."""
        return self._sections[rank]


class Plain(View):
    """The output of one rank, shown as if the cell had run in the notebook.

    `changeable`: False for an Output widget of the page, which ignores updates of displays.
    """

    def __init__(self, page: CellOutputArea, limit: int, *, changeable: bool = True) -> None:
        self._page = page
        self._in_place = page.rich and changeable
        self._streams = {name: LiveStream(limit, in_place=self._in_place) for name in ("stdout", "stderr")}
        self._bars: dict[str, ThrottledDisplay] = {}
        self._floods = {name: ThrottledDisplay(page) for name in self._streams}

    def text(self, rank: int, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """Write the text as output of the cell."""
        self._write(stream, self._streams[stream].write(text, line, cut))
        self._draw(stream)  # a new bar appears at once, so that later output is below it

    def _write(self, stream: str, finished: Finished) -> None:
        if finished.bar is not None:
            (self._bars.pop(stream, None) or ThrottledDisplay(self._page)).show(finished.bar, at_once=True)
        if finished.text:
            self._page.write(stream, finished.text)

    @property
    def has_flood(self) -> bool:
        """True if there is an end of truncated text, which `close` shows."""
        return any(stream.flood is not None for stream in self._streams.values())

    def _draw(self, stream: str) -> None:
        bar = self._streams[stream].bar
        if bar is not None:
            self._bars.setdefault(stream, ThrottledDisplay(self._page)).show(bar)

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Show the bundle as if the cell had displayed it here."""
        self._page.show(data, metadata, display_id)

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Update the display with `display_id`."""
        self._page.show(data, metadata, display_id, update=True)

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """Show the value of the cell's last line with a label."""
        self._page.show(add_label(f"Out[{rank}:{number}]:", data), metadata)

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the cell's output."""
        for name, stream in self._streams.items():
            self._write(name, stream.end())
        self._page.clear(wait)

    def draw(self) -> None:
        """Update the bars and the ends of truncated text."""
        for name, stream in self._streams.items():
            self._draw(name)
            if stream.flood is not None and self._in_place:
                self._floods[name].show(stream.flood.live_text(0) if stream.flood.skipped else stream.flood.text)
        flush_streams()

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """Write the final bars and the ends of truncated text; return False: `note` is not shown."""
        for name, stream in self._streams.items():
            self._write(name, stream.end())
            flood, stream.flood = stream.flood, None
            if flood is None:
                continue
            if self._in_place and (flood.left_out or self._floods[name].is_visible):
                self._floods[name].show(flood.left_out, at_once=True)
            elif flood.left_out:
                self._page.write(name, f"{flood.left_out}\n")
            self._page.write(name, flood.end_text)
        flush_streams()
        return False
