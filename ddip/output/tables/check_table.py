"""The table of ``%dipcheck``, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ddip.errors import ranks_text
from ddip.output.tables.tables import align_rows, html_table

HEAD = ("object", "what was found", "what to do")


MOST_NAMES = 5
"""Most variables to name in one line."""


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
    by_design: Sequence[str] = ()
    """Paths of values that differ as they did after good cells, which counts as intended."""

    @property
    def summary(self) -> str:
        """The line that is shown if nothing was found.

        >>> CheckTable([], 12, 2).summary
        '12 objects equal on 2 ranks'
        >>> CheckTable([], 12, 2, ["loss"]).summary
        '12 objects compared on 2 ranks; equal, except loss, where cells that ended well had left different values'
        """
        objects = f"{self.objects} object{'s' * (self.objects != 1)}"
        if not self.by_design:
            return f"{objects} equal on {self.size} ranks"
        more = f" and {len(self.by_design) - MOST_NAMES} more" if len(self.by_design) > MOST_NAMES else ""
        return (
            f"{objects} compared on {self.size} ranks; equal, except {', '.join(self.by_design[:MOST_NAMES])}{more}, "
            "where cells that ended well had left different values"
        )

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
