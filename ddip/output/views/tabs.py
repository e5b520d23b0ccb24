"""The output of several ranks as tabs, in HTML and CSS alone, so that a saved notebook shows them without ddip.

The tabs are three outputs of the cell (``tab_page.py``):

    buttons   a hidden radio button per rank; never changes, so that the user's selection survives all updates
    labels    select a button; change only if a rank ends or fails, because a page loses a click on a label that is
              replaced while the mouse button is down
    content   the output of the ranks, which may change ten times per second
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ddip.errors import RankError
from ddip.output.area import GONE, CellOutputArea, new_id
from ddip.output.page import tab_page
from ddip.output.page.bundles import LIVE_CHARACTERS, comparable_items, fits_in_tab, to_tab
from ddip.output.page.colours import to_html
from ddip.output.page.tab_page import Tab
from ddip.output.terminal_text import strip_escapes
from ddip.output.transcript import WIDGET, Bundle, Display, is_ours, own_id, plain_of
from ddip.output.views.below import Below, can_move
from ddip.output.views.views import TranscriptView

REDRAW_SECONDS = 0.1
"""Minimum seconds between two updates of the tabs."""
REDRAW_BYTES = 300_000
"""Maximum bytes per second of updates: Jupyter's server drops messages above a rate, 1 MB/s by default."""


class Tabs(TranscriptView):
    """A view with one tab per rank; at the end of the cell, ranks with equal output share one."""

    def __init__(self, page: CellOutputArea, ranks: Sequence[int], limit: int) -> None:
        super().__init__(page, ranks, limit)
        self._html: dict[int, str] = {}
        self._running = set(ranks)
        self._failed: set[int] = set()
        self._errors: dict[int, str] = {}
        self._id = new_id()
        self._buttons_id, self._labels_id = new_id(), new_id()
        self._below = Below(page)
        self._reserved = False
        """True if the page has outputs for the tabs, above those below them."""
        self._has_buttons = False
        """True if the buttons are on the page; showing them again would reset the user's selection."""
        self._begun = False
        self._next = 0.0
        self._labels = ""
        """HTML of the labels on the page."""
        self._note = ""
        self._done = False

    # -- output of a rank

    def display(self, rank: int, data: Bundle, metadata: Bundle, display_id: str | None) -> None:
        """Show a bundle in the tab if plain HTML can show it, else below the tabs with a label."""
        section = self._sections[rank]
        below = not fits_in_tab(data) and not section.is_area(data.get(WIDGET, {}).get("model_id"))
        section.display(data, metadata, display_id, below)
        self._draw_below()

    def update(self, rank: int, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Update a display, which may be of an earlier cell."""
        if self._sections[rank].update(data, metadata, display_id, not fits_in_tab(data)):
            self._draw_below()
        elif not is_ours(display_id):  # a ddip ID that is not found belongs to a closed bar
            self._page.show(data, metadata, own_id(rank, display_id), update=True)

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the rank's output, at once or before its next output."""
        super().clear(rank, wait)
        self._draw_below()

    def widget_closed(self, rank: int, model: str) -> None:
        """Remove a closed widget."""
        super().widget_closed(rank, model)
        self._draw_below()

    def ended(self, rank: int, failed: bool) -> None:
        """Mark the rank as finished, or failed."""
        self._running.discard(rank)
        if failed:
            self._failed.add(rank)
        self._sections[rank].changed = True
        self._draw_below()

    # -- the page

    def draw(self) -> None:
        """Send the tabs again if they have changed and the last update is long enough ago."""
        self._draw_below()
        now = time.monotonic()
        if now < self._next or not any(section.changed for section in self._sections.values()):
            return
        if not self._begun and not self._has_content:
            return
        for rank, section in self._sections.items():
            if section.changed or rank not in self._html:
                section.changed = False
                self._html[rank] = to_tab(section.items, not self._done)
        sent = self._send()
        self._next = now + max(REDRAW_SECONDS, sent / REDRAW_BYTES)

    def close(self, errors: Mapping[int, RankError], note: str) -> bool:
        """Show the final tabs, merged for ranks with equal output; return True if they show `note`.

        Without any output the tabs are removed, unless they were shown and a rank failed.
        """
        self._done = True
        self._running.clear()
        self._draw_below()
        if not self._has_content and not (self._begun and errors):
            self._remove_tabs()
            return False
        self._errors = {rank: _error_text(error) for rank, error in errors.items() if rank in self._sections}
        self._failed = {rank for rank, error in errors.items() if not error.waited}
        self._note = note
        self._html = {rank: to_tab(section.items, False) for rank, section in self._sections.items()}
        self._send()
        self._next = 0.0
        return True

    def _draw_below(self) -> None:
        """Show the displays below the tabs.

        A display that cannot move waits until all lower ranks have finished, because their displays belong above it.
        """
        wanted: dict[int, list[Display]] = {}
        must_wait = False
        for rank, section in sorted(self._sections.items()):
            wanted[rank] = [
                item for item in section.below if not must_wait or can_move(item) or self._below.contains(item)
            ]
            must_wait = must_wait or rank in self._running
        if any(wanted.values()):
            self.reserve()
        self._below.show(wanted)

    def reserve(self, buttons: bool = False) -> None:
        """Reserve outputs on the page for the tabs; with `buttons`, show the hidden buttons now."""
        if not self._begun and not self._reserved:
            self._reserved, self._has_buttons = True, buttons
            self._page.show(self._buttons if buttons else GONE, None, self._buttons_id)
            self._page.show(GONE, None, self._labels_id)
            self._page.show(GONE, None, self._id)

    @property
    def _buttons(self) -> Bundle:
        return {"text/html": tab_page.buttons_html(self._id, list(self._sections)), "text/plain": ""}

    @property
    def _has_content(self) -> bool:
        return not all(section.empty for section in self._sections.values())

    def _remove_tabs(self) -> None:
        """Remove the tabs from the page, because their output was cleared or erased itself."""
        if self._begun:
            self._begun, self._reserved, self._has_buttons = False, True, False
            self._labels = ""
            for name in (self._buttons_id, self._labels_id, self._id):
                self._page.show(GONE, None, name, update=True)

    def _send(self) -> int:
        """Send the current tabs, and return their size in characters."""
        if not self._begun and not self._has_buttons:
            self._page.show(self._buttons, None, self._buttons_id, update=self._reserved)
        tabs = [
            Tab(
                ranks,
                body,
                failed=bool(self._failed.intersection(ranks)),
                runs=bool(self._running.intersection(ranks)),
                empty=self._sections[ranks[0]].empty and ranks[0] not in self._errors,
            )
            for ranks, body in self._merged_tabs()
        ]
        sent = self._send_labels(tabs)
        page = tab_page.sections_html(self._id, tabs, self._note)
        texts = [f"── {tab.title} ──\n{self._plain_text(tab.ranks[0])}" for tab in tabs]
        text = "\n".join([*texts, self._note] if self._note else texts)
        data = {"text/html": page, "text/plain": text, **self._page.beside}
        self._page.show(data, display_id=self._id, update=self._begun or self._reserved)
        self._begun = True
        return sent + len(page) + len(text)

    def _send_labels(self, tabs: Sequence[Tab]) -> int:
        """Send the labels if they have changed, and return the number of characters sent."""
        labels = tab_page.labels_html(self._id, tabs, self._note)
        if labels == self._labels:
            return 0
        self._labels = labels
        data = {"text/html": labels, "text/plain": ""}
        self._page.show(data, display_id=self._labels_id, update=self._begun or self._reserved)
        return len(labels)

    def _merged_tabs(self) -> list[tuple[list[int], str]]:
        """Return ranks and HTML of each tab; at the end of the cell, ranks with equal output share one."""
        groups: list[tuple[list[int], str]] = []
        shown: list[object] = []
        for rank, section in self._sections.items():
            content = (comparable_items(section.items), self._errors.get(rank)) if self._done else object()
            if content in shown:
                groups[shown.index(content)][0].append(rank)
                continue
            body = self._html.get(rank, "")
            if rank in self._errors:
                body += f"<pre>{to_html(self._errors[rank])}</pre>"
            if not body:
                body = f'<pre class="ddip-none">{"below the tabs" if section.below else "no output"}</pre>'
            groups.append(([rank], body))
            shown.append(content)
        return groups

    def _plain_text(self, rank: int) -> str:
        shown = plain_of(self._sections[rank].items, None if self._done else LIVE_CHARACTERS)
        parts = [shown, strip_escapes(self._errors.get(rank, ""))]
        return "\n".join(part for part in parts if part)


def _error_text(error: RankError) -> str:
    if error.waited:
        return f"was blocked in {error.waited}, until ddip aborted it"
    return error.traceback or str(error)
