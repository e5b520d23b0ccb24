"""The current activity of each rank as data, and the table of ``%dipwatch`` as text and as HTML without scripts."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ddip.errors import ranks_text
from ddip.output.page.tab_page import BEGIN_HIDDEN, END_HIDDEN
from ddip.output.tables.tables import align_rows, size_text
from ddip.protocol.location import StackLocation

RankState: TypeAlias = Literal["busy", "idle", "ended", "stopped", "GPU lost", "no answer"]
"""State of a rank. ``stopped``: a signal or a debugger has stopped its process. ``no answer``: the process is alive,
but C code may hold the GIL."""
LIKE_THE_LEAST = 0.1
"""Maximum difference of waiting shares at which ranks count as waiting equally."""
MUCH_MORE = 0.2
"""Minimum difference between the waiting shares of the others and of a straggler."""
PLACE_CHARACTERS = 60
"""Maximum characters of a cell of the text table, such as a line of code."""


@dataclass(frozen=True)
class RankVitals:
    """The current activity of one rank; None means unknown.

    Sizes are in bytes, shares go from 0 to 1, and rates are averages over the last seconds.
    """

    rank: int
    host: str
    pid: int
    device: str
    state: RankState
    doing: str = ""
    """Operation that it runs for ddip, or how to continue a stopped rank; empty while it runs a cell or is idle."""
    cell: int | None = None
    """Number of the running cell."""
    seconds: float | None = None
    """Seconds since the cell began; for an idle rank, the duration of its last cell."""
    place: StackLocation | None = None
    """Position in the cell."""
    steps: int | None = None
    """Number of optimizer steps since the process began."""
    steps_per_second: float | None = None
    collectives: int | None = None
    """Number of collectives that it has begun in its process groups."""
    collectives_per_second: float | None = None
    bars: tuple[tuple[int, int | None], ...] = ()
    """Position and total of each progress bar, the outermost first."""
    waited: float | None = None
    """Share of the last seconds spent waiting for other ranks in collectives; None if unknown, as on GPUs."""
    cores: float | None = None
    """Number of CPU cores that it and its child processes use."""
    memory: int | None = None
    gpu_use: float | None = None
    gpu_memory: int | None = None
    """GPU memory used by all processes on the device."""
    gpu_memory_total: int | None = None
    gpu_temperature: int | None = None
    """Temperature in degrees Celsius."""


def find_stragglers(ranks: Iterable[RankVitals]) -> list[int]:
    """Return the ranks for which the others wait, in all cells.

    The stragglers of a cell are the ranks that wait least, if they are at most half of its ranks and each of the others
    waits for a much larger share of its time. If all ranks wait about equally, they wait for the network.
    """
    return sorted(rank for waited in _waiting_shares(ranks) for rank in _find_slow(waited))


def _waiting_shares(ranks: Iterable[RankVitals]) -> list[dict[int, float]]:
    """Return the waiting shares of the ranks of each running cell."""
    by_cell: dict[int | None, dict[int, float]] = {}
    for rank in ranks:
        if rank.state == "busy" and not rank.doing and rank.waited is not None:
            by_cell.setdefault(rank.cell, {})[rank.rank] = rank.waited
    return list(by_cell.values())


def _find_slow(waited: dict[int, float]) -> list[int]:
    least = min(waited.values())
    slow = [rank for rank, share in waited.items() if share <= least + LIKE_THE_LEAST]
    others = [share for rank, share in waited.items() if rank not in slow]
    most = max(waited[rank] for rank in slow)
    return slow if 0 < len(slow) <= len(others) and min(others) >= most + MUCH_MORE else []


def _straggler_text(waited: dict[int, float], slow: Sequence[int]) -> str:
    """Describe the stragglers `slow` among the ranks of one cell."""
    others = [rank for rank in waited if rank not in slow]
    most, least = (_percent_text(share) for share in (max(waited[r] for r in slow), min(waited[r] for r in others)))
    who = "is the straggler: it waits" if len(slow) == 1 else "are the stragglers: they wait"
    slow_share = most if len(slow) == 1 or most == "0 %" else f"{most} or less"
    whom = ranks_text(others) if len(others) == 1 else "the others"
    others_share = least if len(others) == 1 or least == "100 %" else f"{least} or more"
    return f"{ranks_text(slow)} {who} {slow_share} of the time in collectives, {whom} {others_share}"


# -- the table


@dataclass(frozen=True)
class _Column:
    head: str
    text: Callable[[RankVitals], str]
    is_number: bool = True
    share: Callable[[RankVitals], float | None] = lambda rank: None
    """Returns how much of the table cell a bar fills, from 0 to 1; None: no bar."""


def table_text(ranks: Sequence[RankVitals]) -> str:
    """Return the table as text, with one line per rank, and notes."""
    slow = find_stragglers(ranks)
    columns = _used_columns(ranks)
    rows = [[column.head for column in columns]]
    rows += [[_shorten_text(column.text(rank)) for column in columns] for rank in ranks]
    for row, mark in zip(rows, ["", *("◀" if rank.rank in slow else "" for rank in ranks)], strict=True):
        row[0] += mark
    numbers = [number for number, column in enumerate(columns) if column.is_number]
    return "\n".join([align_rows(rows, numbers), *_table_notes(ranks)])


def table_html(ranks: Sequence[RankVitals]) -> str:
    """Return the table as HTML, with notes."""
    slow = find_stragglers(ranks)
    columns = _used_columns(ranks)
    head = "".join(f"<th{_class_attribute('ddip-number' * c.is_number)}>{html.escape(c.head)}</th>" for c in columns)
    rows = "".join(
        f"<tr{_class_attribute('ddip-slow' * (rank.rank in slow))}>"
        f"{''.join(_cell_html(column, rank) for column in columns)}</tr>"
        for rank in ranks
    )
    notes = "".join(f"<div>{html.escape(note)}</div>" for note in _table_notes(ranks))
    style = f"{BEGIN_HIDDEN}{RULES}</style>{END_HIDDEN}"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return (
        f'<div class="ddip-live" role="group" aria-label="what the ranks do" tabindex="0">{style}{table}{notes}</div>'
    )


RULES = """
.ddip-live{border-left:2px solid var(--jp-border-color2,var(--vscode-panel-border,#c4c4c4));padding:2px 8px;
 overflow:auto;font-size:var(--jp-code-font-size,13px)}
.ddip-live.ddip-live table{border:0;border-collapse:collapse;margin:0 0 2px;table-layout:auto;color:inherit;
 font-size:inherit;font-variant-numeric:tabular-nums}
.ddip-live.ddip-live tr{background:none!important}
.ddip-live.ddip-live :is(th,td){padding:1px 11px 1px 0;border:0;text-align:left;white-space:nowrap;max-width:none}
.ddip-live.ddip-live th{font-weight:normal;opacity:.8}
.ddip-live.ddip-live .ddip-number{text-align:right}
.ddip-live.ddip-live .ddip-where{max-width:34em;overflow:hidden;text-overflow:ellipsis;
 font-family:var(--jp-code-font-family,var(--notebook-cell-output-font-family,monospace))}
.ddip-live .ddip-slow,.ddip-live .ddip-bad{color:color-mix(in srgb,#d9362b 65%,currentColor)}
.ddip-live .ddip-slow td:first-child{font-weight:bold}
.ddip-live .ddip-busy::before{content:"\\25cf\\a0";content:"\\25cf\\a0" / "";
 color:color-mix(in srgb,#208ffb 60%,currentColor)}
.ddip-live.ddip-live [style*="--share"]{background:linear-gradient(to right,
 color-mix(in srgb,currentColor 34%,transparent) calc(1% * var(--share)),
 color-mix(in srgb,currentColor 9%,transparent) 0) left center/40px 65% no-repeat;padding-left:46px}
"""


def _cell_html(column: _Column, rank: RankVitals) -> str:
    text, share = html.escape(column.text(rank)), column.share(rank)
    kind = "ddip-number" if column.is_number else ""
    if column.head == "state":
        kind = {"busy": "ddip-busy", "idle": ""}.get(rank.state, "ddip-bad")
    title = ""
    if column.head == "where" and text:
        kind, title = "ddip-where", f' title="{text}"'  # readable if the column is too narrow
    filled = "" if share is None else f' style="--share:{round(100 * min(1.0, max(0.0, share)))}"'
    return f"<td{_class_attribute(kind)}{title}{filled}>{text}</td>"


def _class_attribute(name: str) -> str:
    return f' class="{name}"' if name else ""


def _used_columns(ranks: Sequence[RankVitals]) -> list[_Column]:
    """Return the columns in which any rank has a value."""
    return [column for column in COLUMNS if any(column.text(rank) for rank in ranks)]


def _table_notes(ranks: Sequence[RankVitals]) -> list[str]:
    """Return the notes below the table: stragglers and stopped ranks."""
    notes = [_straggler_text(waited, slow) for waited in _waiting_shares(ranks) if (slow := _find_slow(waited))]
    return notes + [f"rank {rank.rank}: {rank.doing}" for rank in ranks if rank.state == "stopped"]


def _state_text(rank: RankVitals) -> str:
    return f"busy, {rank.doing}" if rank.state == "busy" and rank.doing else rank.state


def _time_text(rank: RankVitals) -> str:
    if rank.seconds is None:
        return ""
    return f"last cell {time_text(rank.seconds)}" if rank.state != "busy" else time_text(rank.seconds)


def time_text(seconds: float) -> str:
    """Format seconds as ``7 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    if seconds < 10:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _rate_text(rank: RankVitals) -> str:
    """Format the rate of optimizer steps, or of collectives if the rank takes no steps."""
    for rate, what in ((rank.steps_per_second, "steps/s"), (rank.collectives_per_second, "collectives/s")):
        if rate:
            return f"{rate:.{0 if rate >= 100 else 1 if rate >= 10 else 2}f} {what}"
    return ""


def _bars_text(rank: RankVitals) -> str:
    return " · ".join(f"{done}/{'?' if total is None else total}" for done, total in rank.bars)


def _bar_share(rank: RankVitals) -> float | None:
    if not rank.bars or not rank.bars[0][1]:
        return None
    done, total = rank.bars[0]
    share = done / (total or 1)
    if len(rank.bars) > 1 and rank.bars[1][1]:  # the second bar is the progress within one step of the first
        share += rank.bars[1][0] / (rank.bars[1][1] or 1) / (total or 1)
    return share


def _percent_text(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _gpu_memory_text(rank: RankVitals) -> str:
    if rank.gpu_memory is None:
        return ""
    return f"{size_text(rank.gpu_memory)} of {size_text(rank.gpu_memory_total)}"


def _place_text(rank: RankVitals) -> str:
    """Format the position of a busy rank, without the number of its cell, which has a separate column."""
    place = rank.place
    if place is None or rank.state != "busy":
        return ""
    where = str(place)
    if place.cell is not None and place.cell == rank.cell:
        where = where.replace(f"cell [{place.cell}] ", "", 1)
    return f"{where}: {place.source}" if place.source else where


def _shorten_text(text: str) -> str:
    return text if len(text) <= PLACE_CHARACTERS else f"{text[: PLACE_CHARACTERS - 1]}…"


COLUMNS = (
    _Column("rank", lambda rank: str(rank.rank)),
    _Column("state", _state_text, is_number=False),
    _Column("cell", lambda rank: "" if rank.cell is None else f"[{rank.cell}]"),
    _Column("time", _time_text),
    _Column("rate", _rate_text),
    _Column("bar", _bars_text, share=_bar_share),
    _Column("waits", lambda rank: _percent_text(rank.waited), share=lambda rank: rank.waited),
    _Column("CPU", lambda rank: _percent_text(rank.cores)),
    _Column("memory", lambda rank: size_text(rank.memory)),
    _Column("GPU", lambda rank: _percent_text(rank.gpu_use), share=lambda rank: rank.gpu_use),
    _Column("GPU memory", _gpu_memory_text),
    _Column("°C", lambda rank: "" if rank.gpu_temperature is None else str(rank.gpu_temperature)),
    _Column("where", _place_text, is_number=False),
)
