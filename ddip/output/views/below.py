"""What the tabs cannot hold, below them: widgets, and what needs a script or a renderer of its own.

    wanted, by rank  --`_arrange`-->  rows: label, display, display, label, display  --`_send`-->  outputs of the page

An output of a page stays where it is, but its content can be changed: a widget that comes for rank 0 when rank 1 has
one takes its place, and rank 1's moves to the next. A widget bears that: the page has its state elsewhere. What runs a
script is shown where it stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddip.output.area import GONE, CellOutputArea, new_id
from ddip.output.page.bundles import loads
from ddip.output.transcript import WIDGET, Bundle, Display, own_id


def label_of(rank: int) -> Bundle:
    """What stands above the displays of a rank."""
    return {"text/html": f'<div style="font-size:.85em;opacity:.8">rank {rank}</div>', "text/plain": f"[rank {rank}]"}


def moves(item: Display) -> bool:
    """Can it be shown in another place later, as if it had always been there?"""
    return WIDGET in item.data


@dataclass(eq=False)
class _Row:
    """The label of a rank, or one of its displays."""

    rank: int
    label: Bundle | None = None
    item: Display | None = None
    """None: the row is free."""


@dataclass(eq=False)
class _Output:
    """One of the page."""

    display_id: str
    sent: tuple[Bundle, Bundle | None] | None = None
    """What it shows: data and metadata, themselves."""


def _is_another_widget(before: Bundle, after: Bundle) -> bool:
    """Are both widgets, and not the same? JupyterLab leaves the one before in its place, unseen, and hides the place
    when that one closes.
    """
    models = [data[WIDGET].get("model_id") for data in (before, after) if WIDGET in data]
    return len(models) == 2 and models[0] != models[1]


class Below:
    """The outputs below the tabs: by rank, each rank with its label, which is there only while there is anything below
    it."""

    def __init__(self, page: CellOutputArea) -> None:
        self._page = page
        self._rows: list[_Row] = []
        self._outputs: list[_Output] = []

    def show(self, wanted: Mapping[int, Sequence[Display]]) -> None:
        """These, by rank, and no others."""
        there = {id(item) for items in wanted.values() for item in items}
        for row in self._rows:
            if row.item is not None and id(row.item) not in there:
                row.item = None
        shown = {id(row.item) for row in self._rows}
        for rank, items in wanted.items():
            for number, item in enumerate(items):
                if id(item) not in shown:
                    self._arrange(rank, item, items[:number])
        self._send()

    def has(self, item: Display) -> bool:
        """Is it shown?"""
        return any(row.item is item for row in self._rows)

    def _arrange(self, rank: int, item: Display, before: Sequence[Display]) -> None:
        """Find a row for `item`, which follows those `before` it."""
        begin, end = self._block(rank)
        follows = [at for at in range(begin + 1, end) if any(self._rows[at].item is one for one in before)]
        at = follows[-1] + 1 if follows else begin + 1
        if begin < end and at < end and self._rows[at].item is None:
            self._rows[at].item = item
            return
        new = [_Row(rank, item=item)]
        if begin == end:
            at = begin
            new.insert(0, _Row(rank, label=label_of(rank)))
        if any(row.item is not None and not moves(row.item) for row in self._rows[at:]):
            at = len(self._rows)  # what is there cannot move
            if len(new) == 1 and self._rows[-1].rank != rank:
                new.insert(0, _Row(rank, label=label_of(rank)))
        self._rows[at:at] = new

    def _block(self, rank: int) -> tuple[int, int]:
        """Begin and end of the last rows of `rank`; equal, where they would be, if there are none."""
        begins = [at for at, row in enumerate(self._rows) if row.label is not None]
        ends = [*begins[1:], len(self._rows)]
        for begin, end in zip(reversed(begins), reversed(ends), strict=False):
            if self._rows[begin].rank == rank:
                return begin, end
        after = next((begin for begin in begins if self._rows[begin].rank > rank), len(self._rows))
        return after, after

    def _send(self) -> None:
        for at, row in enumerate(self._rows):
            data, metadata = self._content(at)
            if at == len(self._outputs):
                self._outputs.append(_Output(self._new_id(row)))
            output = self._outputs[at]
            if output.sent is None or output.sent[0] is not data or output.sent[1] is not metadata:
                if output.sent is not None and _is_another_widget(output.sent[0], data):
                    self._page.show(GONE, None, output.display_id, update=True)
                self._page.show(data, metadata, output.display_id, update=output.sent is not None)
                output.sent = (data, metadata)

    def _content(self, at: int) -> tuple[Bundle, Bundle | None]:
        row = self._rows[at]
        if row.item is not None:
            return row.item.data, row.item.metadata
        if row.label is not None:
            for below in self._rows[at + 1 :]:
                if below.label is not None:
                    break
                if below.item is not None and not loads(below.item.data):
                    return row.label, None
        return GONE, None

    def _new_id(self, row: _Row) -> str:
        """The rank's own, by which a later cell may change it; not for what may be elsewhere then."""
        own = None if row.item is None or moves(row.item) else own_id(row.rank, row.item.display_id)
        taken = own is None or any(output.display_id == own for output in self._outputs)
        return new_id() if own is None or taken else own
