"""Cells as plain data: one by rank, and one line of a list."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ddip.group.cells.cell import Cell
from ddip.output.area import Bundle
from ddip.output.cells.cell_data import Part, cell_data, state_of, texts
from ddip.output.terminal_text import plain
from ddip.protocol.status_types import CELL_MIME, TEXT_CHARACTERS, CellData, CellOutcome, CellStatus
from ddip.protocol.text import readable

log = logging.getLogger("ddip")

ERROR_CHARACTERS = 2_000


def data_of(
    cell: Cell,
    outcome: CellOutcome | None = None,
    most: int = TEXT_CHARACTERS,
    only: Collection[int] | None = None,
) -> CellData:
    """What each of its ranks, or of `only` these, has shown so far, and what has become of it there; `outcome`: that is
    known already. Of each rank's text the `most` last characters are there."""
    outcome = outcome or cell.outcome
    shown = texts(cell.recording.messages(), cell.show_ranks, cell.display.max_output_chars, most)
    begun = cell.state != "queued" and outcome != "not_run"
    lost = cell.recording.left_out > 0
    parts = {}
    for rank in cell.ranks if only is None else only:
        error = cell.errors.get(rank)
        text, cut = shown.get(rank, (None, False))
        state = state_of(error, rank in cell.replied, outcome, begun)
        parts[rank] = Part(state, cell.seconds_by_rank.get(rank), error, text, cut or lost)
    return cell_data(cell.number, outcome, cell.seconds, parts)


def beside(cell: Cell, rich: bool, outcome: CellOutcome | None = None) -> Bundle:
    """The same, to go beside the HTML of its output; nothing if the user wants none, or the page is not `rich`."""
    if not (cell.display.cell_json and rich):
        return {}
    try:
        return {CELL_MIME: data_of(cell, outcome)}
    except Exception as error:  # what a rank has shown may be odd, and must not end the cell
        log.warning("%s is not there as data: %s: %s", cell.text, type(error).__name__, error)
        return {}


def status_of(cell: Cell) -> CellStatus:
    """Its line in a list."""
    return {
        "number": cell.number,
        "ranks": list(cell.ranks),
        "state": cell.state,
        "outcome": cell.outcome,
        "background": cell.background,
        "seconds": round(cell.seconds, 3),
        "submitted": cell.submitted,
        "began": cell.began,
        "ended": cell.ended,
        "first_line": readable(cell.first_line),
        "error": readable(plain(cell.message))[:ERROR_CHARACTERS] or None,
    }
