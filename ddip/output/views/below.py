"""The outputs below the tabs: widgets, and displays that need a script or a renderer of their own.

    wanted, by rank  --`_arrange`-->  rows: label, display, display, label, display  --`_send`-->  outputs of the page

An output of a page cannot move, but its content can be replaced: if rank 0 displays a widget when rank 1 already has
one, rank 0's takes its place and rank 1's moves to the next output. Widgets can be moved because the page keeps their
state elsewhere. A display that runs a script stays in its first place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddip.output.area import GONE, CellOutputArea, new_id
from ddip.output.page.bundles import only_loads_library
from ddip.output.transcript import WIDGET, Bundle, Display, own_id


def label_of(rank: int) -> Bundle:
    """Return the label above the displays of a rank."""
    return {"text/html": f'<div style="font-size:.85em;opacity:.8">rank {rank}</div>', "text/plain": f"[rank {rank}]"}


def can_move(item: Display) -> bool:
    """Return True if `item` can move to another output of the page later; only widgets can."""
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
    """An output of the page."""

    display_id: str
    sent: tuple[Bundle, Bundle | None] | None = None
    """Data and metadata that it shows, compared by identity."""


def _is_another_widget(before: Bundle, after: Bundle) -> bool:
    """Return True if both bundles are widgets, and not the same one.

    JupyterLab keeps the replaced widget in its output, hidden, and hides the output when that widget closes.
    """
    models = [data[WIDGET].get("model_id") for data in (before, after) if WIDGET in data]
    return len(models) == 2 and models[0] != models[1]


class Below:
    """The outputs below the tabs, by rank; a rank's label is visible only while a display is below it."""

    def __init__(self, page: CellOutputArea) -> None:
        self._page = page
        self._rows: list[_Row] = []
        self._outputs: list[_Output] = []

    def show(self, wanted: Mapping[int, Sequence[Display]]) -> None:
        """Show the displays in `wanted`, by rank, and remove all others."""
        wanted_ids = {id(item) for items in wanted.values() for item in items}
        for row in self._rows:
            if row.item is not None and id(row.item) not in wanted_ids:
                row.item = None
        shown = {id(row.item) for row in self._rows}
        for rank, items in wanted.items():
            for number, item in enumerate(items):
                if id(item) not in shown:
                    self._arrange(rank, item, items[:number])
        self._send()

    def contains(self, item: Display) -> bool:
        """Return True if `item` is shown."""
        return any(row.item is item for row in self._rows)

    def _arrange(self, rank: int, item: Display, before: Sequence[Display]) -> None:
        """Give `item` a row after the displays `before` it: a free one, or a new one."""
        begin, end = self._rows_of_rank(rank)
        follows = [at for at in range(begin + 1, end) if any(self._rows[at].item is earlier for earlier in before)]
        at = follows[-1] + 1 if follows else begin + 1
        if begin < end and at < end and self._rows[at].item is None:
            self._rows[at].item = item
            return
        new = [_Row(rank, item=item)]
        if begin == end:
            at = begin
            new.insert(0, _Row(rank, label=label_of(rank)))
        if any(row.item is not None and not can_move(row.item) for row in self._rows[at:]):
            at = len(self._rows)  # a display after this row cannot move
            if len(new) == 1 and self._rows[-1].rank != rank:
                new.insert(0, _Row(rank, label=label_of(rank)))
        self._rows[at:at] = new

    def _rows_of_rank(self, rank: int) -> tuple[int, int]:
        """Return the indices of the last block of rows of `rank`: its first row, and the row after its last.

        A row is a label or a display; a block begins with the label of its rank. If the rank has no block, both are the
        index at which to insert one.
        """
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
                if below.item is not None and not only_loads_library(below.item.data):
                    return row.label, None
        return GONE, None

    def _new_id(self, row: _Row) -> str:
        """Return the rank's display ID, by which a later cell may update the output, else a new ID.

        The rank's ID does not serve a display that can move, nor if another output already has it.
        """
        rank_id = None if row.item is None or can_move(row.item) else own_id(row.rank, row.item.display_id)
        is_taken = rank_id is None or any(output.display_id == rank_id for output in self._outputs)
        return new_id() if rank_id is None or is_taken else rank_id
