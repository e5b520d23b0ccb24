"""Describe cells as plain data: one cell by rank, or as one entry of a list."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ddip.group.cells.cell import Cell
from ddip.output.area import Bundle
from ddip.output.cells.cell_data import Part, cell_data, rank_texts, state_of
from ddip.output.terminal_text import strip_escapes
from ddip.protocol.status_types import CELL_MIME, TEXT_CHARACTERS, CellData, CellOutcome, CellStatus
from ddip.protocol.text import escape_surrogates

log = logging.getLogger("ddip")

ERROR_CHARACTERS = 2_000


def data_of(
    cell: Cell,
    outcome: CellOutcome | None = None,
    most: int = TEXT_CHARACTERS,
    only: Collection[int] | None = None,
) -> CellData:
    """Return a cell's output and state on each of its ranks, or on those in `only`, as data for JSON.

    `outcome` overrides the cell's own, if it is known before the cell is marked as ended. Each rank's text is cut to
    its last `most` characters, and marked as cut.
    """
    outcome = outcome or cell.outcome
    output_texts = rank_texts(cell.recording.messages(), cell.show_ranks, cell.display.max_output_chars, most)
    has_begun = cell.state != "queued" and outcome != "not_run"
    is_output_lost = cell.recording.left_out > 0
    parts = {}
    for rank in cell.ranks if only is None else only:
        error = cell.errors.get(rank)
        text, cut = output_texts.get(rank, (None, False))
        state = state_of(error, rank in cell.replied, outcome, has_begun)
        parts[rank] = Part(state, cell.seconds_by_rank.get(rank), error, text, cut or is_output_lost)
    return cell_data(cell.number, outcome, cell.seconds, parts)


def cell_bundle(cell: Cell, rich: bool, outcome: CellOutcome | None = None) -> Bundle:
    """Return the MIME bundle with the data of `cell` to send beside the HTML of its output.

    `outcome` as in `data_of`. Empty if the user has turned it off, the page is not `rich`, or the output is malformed.
    """
    if not (cell.display.cell_json and rich):
        return {}
    try:
        return {CELL_MIME: data_of(cell, outcome)}
    except Exception as error:  # malformed output of a rank must not end the cell
        log.warning("%s is not there as data: %s: %s", cell.text, type(error).__name__, error)
        return {}


def status_of(cell: Cell) -> CellStatus:
    """Return the entry of `cell` in a list of cells."""
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
        "first_line": escape_surrogates(cell.first_line),
        "error": escape_surrogates(strip_escapes(cell.message))[:ERROR_CHARACTERS] or None,
    }
