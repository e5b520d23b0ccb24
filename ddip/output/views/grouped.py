"""The output of several ranks in sections, shown at the end of the cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddip.errors import RankError, ranks_text
from ddip.output.area import CellOutputArea, flush_streams
from ddip.output.page.bundles import comparable_items
from ddip.output.transcript import Bundle, Display, RankTranscript, Text, is_ours, plain_of
from ddip.output.views.views import TranscriptView


class Grouped(TranscriptView):
    """A view with one section per rank at the end of the cell; ranks with equal output share a section."""

    def __init__(self, page: CellOutputArea, ranks: Sequence[int], limit: int) -> None:
        super().__init__(page, ranks, limit)
        self._limit = limit
        self._closed = False
        self._bars: set[str] = set()
        """Display IDs of the bars on the page."""

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Change a display that is kept, or a bar that is on the page."""
        if not self._sections[rank].update(data, metadata, display_id) and display_id in self._bars:
            self._page.show(data, metadata, display_id, update=True)

    def draw(self) -> None:
        """Show late output; do nothing while the cell runs."""
        if self._closed:
            self.close({}, "")

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """Show the output of each rank, and drop it, so that late output is shown separately; return False.

        Errors and `note` are not part of this view.
        """
        groups: list[_MergedRanks] = []
        for rank, section in self._sections.items():
            shown = comparable_items(section.items)
            equal = None if section.has_widgets else next((group for group in groups if group.shown == shown), None)
            if section.empty:
                continue
            if equal is None:
                groups.append(_MergedRanks([rank], shown, section))
            else:
                equal.ranks.append(rank)
        for group in groups:
            self._page.write("stdout", f"── {ranks_text(group.ranks)} ──\n")
            for item in group.section.items:
                if isinstance(item, Text):
                    if item.blank:
                        continue
                    text = item.screen.text
                    self._page.write(item.stream, text if text.endswith("\n") else f"{text}\n")
                elif isinstance(item, Display):
                    bar = item.display_id if item.display_id is not None and is_ours(item.display_id) else None
                    self._bars |= {bar} if bar is not None else set()
                    self._page.show(item.data, item.metadata, bar)
                else:
                    self._page.write("stdout", plain_of(item.items) + "\n")
        flush_streams()
        self._closed = True
        self._sections = {rank: RankTranscript(self._limit) for rank in self._sections}
        return False


@dataclass
class _MergedRanks:
    """Ranks with equal output, and the transcript of the first."""

    ranks: list[int]
    shown: object
    section: RankTranscript
