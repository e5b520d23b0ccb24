"""The table of ``%dipcheck``, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ddip.errors import ranks_text
from ddip.output.tables.tables import align_rows, html_table

HEAD = ("object", "what was found", "what to do")


@dataclass(frozen=True)
class CheckRow:
    """One object, what was found, and what to do about it."""

    name: str
    what: str
    todo: str


@dataclass(frozen=True)
class CheckTable:
    """The result of a check of `size` ranks; a front end displays it as HTML or as text."""

    rows: Sequence[CheckRow]
    objects: int
    """Number of variables and random generators that were compared."""
    size: int

    @property
    def summary(self) -> str:
        """The line that is shown if nothing was found."""
        return f"{self.objects} objects equal on {self.size} ranks"

    def __str__(self) -> str:
        if not self.rows:
            return self.summary
        return align_rows([HEAD, *((row.name, row.what, row.todo) for row in self.rows)])

    def to_html(self) -> str:
        """Return the table as HTML."""
        if not self.rows:
            return f"<p>{html.escape(self.summary)}</p>"
        return html_table([HEAD, *((row.name, row.what, row.todo) for row in self.rows)])


def on_ranks(ranks: Sequence[int], size: int) -> str:
    """Return a prefix that names `ranks`; empty if these are all ranks.

    >>> on_ranks([1], 2), on_ranks([0, 1], 2)
    ('rank 1: ', '')
    """
    return "" if len(ranks) == size else f"{ranks_text(list(ranks))}: "
