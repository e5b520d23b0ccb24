"""The output of several ranks with a label before each line."""

from __future__ import annotations

from collections.abc import Mapping

from ddip.errors import RankError
from ddip.output.area import GONE, CellOutputArea, flush_streams, new_id
from ddip.output.page.bundles import only_loads_library
from ddip.output.transcript import WIDGET, Bundle, add_label, is_ours, own_id
from ddip.output.views.below import label_of
from ddip.output.views.live import Finished, LiveStream, ThrottledDisplay
from ddip.output.views.views import View

COLOURS = (36, 35, 33, 32, 34, 31)


class Labels(View):
    """A view that prints whole lines, each labelled with its rank; bars change in place, one per rank.

    The output of a single rank cannot be cleared in it.
    """

    def __init__(self, page: CellOutputArea, limit: int) -> None:
        self._page = page
        self._limit = limit
        self._streams: dict[tuple[int, str], LiveStream] = {}
        self._finished_bars: list[str] = []
        """Lines of finished bars, shown together with the bars that still run."""
        self._display: ThrottledDisplay | None = None
        self._drawn: list[str] = []
        self._closed = False
        self._widgets: dict[str, tuple[str, str]] = {}
        """Display IDs of the label and of the widget, by model ID."""
        self._values: dict[int, tuple[Bundle, Bundle]] = {}
        """Values of the cell's last line, shown at the end in rank order."""

    def text(self, rank: int, stream: str, text: str, line: int | None, cut: int = 0) -> None:
        """Print the finished lines of a rank's stream with its label, and keep an unfinished line until it ends.

        With `line` and `cut`, as in `Screen.jump`, `text` replaces the end of the stream, and is shown later.
        """
        if line is None:
            self._show_value(rank)
        for name in ("stdout", "stderr"):
            if (rank, name) not in self._streams:
                self._streams[rank, name] = LiveStream(self._limit, in_place=self._page.rich, whole_lines=True)
        self._show(rank, stream, self._streams[rank, stream].write(text, line, cut))

    def _show(self, rank: int, stream: str, finished: Finished) -> None:
        if finished.bar is not None:
            self._finished_bars += self._label_bar(rank, finished.bar)
            if all(other.bar is None for other in self._streams.values()):  # the next bar begins a new display
                if self._finished_bars or self._display:
                    (self._display or ThrottledDisplay(self._page)).show("\n".join(self._finished_bars), at_once=True)
                self._finished_bars, self._display = [], None
        if finished.text:
            self._erase()
            self._page.write(stream, "".join(f"{line}\n" for line in self._label_lines(rank, finished.text)))

    def _bars(self) -> list[str]:
        """Return the lines of the running bars, by rank."""
        streams = sorted(self._streams.items(), key=lambda item: item[0][0])
        bars = [(rank, stream.bar) for (rank, _), stream in streams]
        return [line for rank, bar in bars if bar is not None for line in self._label_bar(rank, bar)]

    def _label_lines(self, rank: int, text: str) -> list[str]:
        return [f"{self._label(rank)} {line}" for line in text.splitlines()]

    def _label_bar(self, rank: int, bar: str) -> list[str]:
        """Label the lines of a bar, without empty lines of bars that have erased themselves."""
        return self._label_lines(rank, "\n".join(line for line in bar.splitlines() if line.strip()))

    def _label(self, rank: int) -> str:
        label = f"[rank {rank}]"
        return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{label}\x1b[0m" if self._page.terminal else label

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Show the bundle below a label."""
        self._show_value(rank)
        self.ended(rank, False)
        self._erase()
        if self._page.rich and WIDGET in data:
            ids = (new_id(), own_id(rank, display_id) or new_id())
            self._widgets[data[WIDGET].get("model_id")] = ids
            self._page.show(label_of(rank), None, ids[0])
            self._page.show(data, metadata, ids[1])
            return
        if not only_loads_library(data):
            self._page.write("stdout", f"{self._label(rank)}\n")
        self._page.show(data, metadata, own_id(rank, display_id))

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Update a display in place on a page; do nothing in a terminal."""
        closed = is_ours(display_id) and all(display_id != shown for _, shown in self._widgets.values())
        if self._page.rich and not closed:
            self._page.show(data, metadata, own_id(rank, display_id), update=True)

    def result(self, rank: int, number: int, data: Bundle, metadata: Bundle) -> None:
        """Keep the value of the last line until its rank shows more or the cell ends."""
        self._show_value(rank)
        self.ended(rank, False)
        self._values[rank] = add_label(f"Out[{rank}:{number}]:", data), metadata
        if self._closed:
            self._show_value(rank)

    def _show_value(self, rank: int) -> None:
        if rank in self._values:
            self._erase()
            self._page.show(*self._values.pop(rank))

    def widget_closed(self, rank: int, model: str) -> None:
        """Remove a closed widget and its label."""
        for display_id in self._widgets.pop(model, ()):
            self._page.show(GONE, None, display_id, update=True)

    def ended(self, rank: int, failed: bool) -> None:
        """Print the rank's last lines, even without a newline."""
        for (other, name), stream in self._streams.items():
            if other == rank:
                self._show(rank, name, stream.end())

    def draw(self) -> None:
        """Update the bars."""
        lines = self._bars()
        if self._page.rich and (lines or self._display):
            self._display = self._display or ThrottledDisplay(self._page)
            self._display.show("\n".join(self._finished_bars + lines))
        elif self._page.terminal and not self._page.closed and lines != self._drawn:
            self._erase()
            self._page.write("stdout", "".join(f"{line}\n" for line in lines))
            self._drawn = lines
        flush_streams()

    def _erase(self) -> None:
        """Erase the bars at the bottom of a terminal."""
        if self._drawn:
            self._page.write("stdout", f"\x1b[{len(self._drawn)}F\x1b[J")
            self._drawn = []

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """Print unfinished lines, ends of truncated text, and values; return False: `note` is not shown."""
        for rank in sorted({rank for rank, _ in self._streams}):
            self.ended(rank, rank in errors)
        self._erase()
        for (rank, name), stream in sorted(self._streams.items()):
            flood, stream.flood = stream.flood, None
            if flood is not None:
                self._show(rank, name, Finished(None, f"{flood.left_out}\n{flood.end_text}".lstrip("\n")))
        for rank in sorted(self._values):
            self._show_value(rank)
        self._closed = True
        flush_streams()
        return False
