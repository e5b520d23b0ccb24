"""What each rank does just now, as data, and as the table of ``%dipwatch``: text, and HTML without a script."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ddip.errors import ranks_text
from ddip.output.page.tab_page import BEGIN_HIDDEN, END_HIDDEN
from ddip.output.tables.tables import aligned, size_text
from ddip.protocol.location import StackLocation

RankState: TypeAlias = Literal["busy", "idle", "ended", "stopped", "GPU lost", "no answer"]
"""``stopped``: by a signal or a debugger. ``no answer``: it lives, and C code may hold its interpreter."""
LIKE_THE_LEAST = 0.1
"""Ranks whose waiting shares differ by no more wait as much."""
MUCH_MORE = 0.2
"""By how much larger a share the others must wait for a straggler."""
PLACE_CHARACTERS = 60
"""Of a line of code, in text."""


@dataclass(frozen=True)
class RankVitals:
    """One rank; None: not known. Sizes are in bytes, shares from 0 to 1, rates those of the last seconds."""

    rank: int
    host: str
    pid: int
    device: str
    state: RankState
    doing: str = ""
    """What it does for ddip, or how it goes on if it is stopped; empty while it runs a cell, or nothing."""
    cell: int | None = None
    """Number of the cell that it runs."""
    seconds: float | None = None
    """Since that has begun; of a rank that is idle, those that the last cell took."""
    place: StackLocation | None = None
    """Where it is in that cell."""
    steps: int | None = None
    """That optimizers have taken since the process began."""
    steps_per_second: float | None = None
    collectives: int | None = None
    """Begun in the groups that it is in."""
    collectives_per_second: float | None = None
    bars: tuple[tuple[int, int | None], ...] = ()
    """How far its progress bars are, and of how much, the outermost first."""
    waited: float | None = None
    """Share of the last seconds that it has waited for other ranks in collectives; None on GPUs, too."""
    cores: float | None = None
    """That it uses, with its children."""
    memory: int | None = None
    gpu_use: float | None = None
    gpu_memory: int | None = None
    """Of the device, by all its processes."""
    gpu_memory_total: int | None = None
    gpu_temperature: int | None = None
    """Degrees Celsius."""


def stragglers(ranks: Iterable[RankVitals]) -> list[int]:
    """For whom do the others wait? Those ranks of a cell, at most half of them, that wait least, while each of the
    others waits for a much larger share of its time. Where all wait about equally, it is for the network: nobody."""
    return sorted(rank for waited in _waited(ranks) for rank in _slow(waited))


def _waited(ranks: Iterable[RankVitals]) -> list[dict[int, float]]:
    """The shares of the ranks of each cell."""
    by_cell: dict[int | None, dict[int, float]] = {}
    for rank in ranks:
        if rank.state == "busy" and not rank.doing and rank.waited is not None:
            by_cell.setdefault(rank.cell, {})[rank.rank] = rank.waited
    return list(by_cell.values())


def _slow(waited: dict[int, float]) -> list[int]:
    least = min(waited.values())
    slow = [rank for rank, share in waited.items() if share <= least + LIKE_THE_LEAST]
    others = [share for rank, share in waited.items() if rank not in slow]
    most = max(waited[rank] for rank in slow)
    return slow if 0 < len(slow) <= len(others) and min(others) >= most + MUCH_MORE else []


def _straggler_text(waited: dict[int, float], slow: Sequence[int]) -> str:
    """Of the ranks of one cell."""
    others = [rank for rank in waited if rank not in slow]
    most, least = max(waited[rank] for rank in slow), min(waited[rank] for rank in others)
    who = "is the straggler: it waits" if len(slow) == 1 else "are the stragglers: they wait"
    own = _percent(most) if len(slow) == 1 else f"{_percent(most)} or less"
    theirs = f"{ranks_text(others)} {_percent(least)}" if len(others) == 1 else f"the others {_percent(least)} or more"
    return f"{ranks_text(slow)} {who} {own} of the time in collectives, {theirs}"


# -- the table


@dataclass(frozen=True)
class _Column:
    head: str
    text: Callable[[RankVitals], str]
    is_number: bool = True
    share: Callable[[RankVitals], float | None] = lambda rank: None
    """Of the column that is filled, from 0 to 1."""


def table_text(ranks: Sequence[RankVitals]) -> str:
    """For a terminal: a line a rank, and what is to be said of them."""
    slow = stragglers(ranks)
    columns = _columns(ranks)
    rows = [[column.head for column in columns]]
    rows += [[_cut(column.text(rank)) for column in columns] for rank in ranks]
    for row, mark in zip(rows, ["", *("◀" if rank.rank in slow else "" for rank in ranks)], strict=True):
        row[0] += mark
    numbers = [number for number, column in enumerate(columns) if column.is_number]
    return "\n".join([aligned(rows, numbers), *_notes(ranks)])


def table_html(ranks: Sequence[RankVitals]) -> str:
    """For a page."""
    slow = stragglers(ranks)
    columns = _columns(ranks)
    head = "".join(f"<th{_class('ddip-number' * c.is_number)}>{html.escape(c.head)}</th>" for c in columns)
    rows = "".join(
        f"<tr{_class('ddip-slow' * (rank.rank in slow))}>{''.join(_cell(column, rank) for column in columns)}</tr>"
        for rank in ranks
    )
    notes = "".join(f"<div>{html.escape(note)}</div>" for note in _notes(ranks))
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


def _cell(column: _Column, rank: RankVitals) -> str:
    text, share = html.escape(column.text(rank)), column.share(rank)
    kind = "ddip-number" if column.is_number else ""
    if column.head == "state":
        kind = {"busy": "ddip-busy", "idle": ""}.get(rank.state, "ddip-bad")
    title = ""
    if column.head == "where" and text:
        kind, title = "ddip-where", f' title="{text}"'  # where the column is too narrow
    filled = "" if share is None else f' style="--share:{round(100 * min(1.0, max(0.0, share)))}"'
    return f"<td{_class(kind)}{title}{filled}>{text}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _columns(ranks: Sequence[RankVitals]) -> list[_Column]:
    """Those in which a rank has anything."""
    return [column for column in COLUMNS if any(column.text(rank) for rank in ranks)]


def _notes(ranks: Sequence[RankVitals]) -> list[str]:
    """What stands below the table."""
    notes = [_straggler_text(waited, slow) for waited in _waited(ranks) if (slow := _slow(waited))]
    return notes + [f"rank {rank.rank}: {rank.doing}" for rank in ranks if rank.state == "stopped"]


def _state(rank: RankVitals) -> str:
    return f"busy, {rank.doing}" if rank.state == "busy" and rank.doing else rank.state


def _time(rank: RankVitals) -> str:
    if rank.seconds is None:
        return ""
    return f"last {time_text(rank.seconds)}" if rank.state != "busy" else time_text(rank.seconds)


def time_text(seconds: float) -> str:
    """``7 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds < 10:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _rate(rank: RankVitals) -> str:
    """Steps; of ranks that take none, collectives."""
    for rate, what in ((rank.steps_per_second, "steps/s"), (rank.collectives_per_second, "collectives/s")):
        if rate:
            return f"{rate:.{0 if rate >= 100 else 1 if rate >= 10 else 2}f} {what}"
    return ""


def _bars(rank: RankVitals) -> str:
    return " · ".join(f"{done}/{'?' if total is None else total}" for done, total in rank.bars)


def _bar_share(rank: RankVitals) -> float | None:
    if not rank.bars or not rank.bars[0][1]:
        return None
    done, total = rank.bars[0]
    share = done / (total or 1)
    if len(rank.bars) > 1 and rank.bars[1][1]:  # an epoch of many
        share += rank.bars[1][0] / (rank.bars[1][1] or 1) / (total or 1)
    return share


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _memory(rank: RankVitals) -> str:
    if rank.gpu_memory is None:
        return ""
    return f"{size_text(rank.gpu_memory)} of {size_text(rank.gpu_memory_total)}"


def _place(rank: RankVitals) -> str:
    """The cell that runs has a column of its own."""
    place = rank.place
    if place is None or rank.state != "busy":
        return ""
    where = str(place)
    if place.cell is not None and place.cell == rank.cell:
        where = where.replace(f"cell [{place.cell}] ", "", 1)
    return f"{where}: {place.source}" if place.source else where


def _cut(text: str) -> str:
    return text if len(text) <= PLACE_CHARACTERS else f"{text[: PLACE_CHARACTERS - 1]}…"


COLUMNS = (
    _Column("rank", lambda rank: str(rank.rank)),
    _Column("state", _state, is_number=False),
    _Column("cell", lambda rank: "" if rank.cell is None else f"[{rank.cell}]"),
    _Column("time", _time),
    _Column("rate", _rate),
    _Column("bar", _bars, share=_bar_share),
    _Column("waits", lambda rank: _percent(rank.waited), share=lambda rank: rank.waited),
    _Column("CPU", lambda rank: _percent(rank.cores)),
    _Column("memory", lambda rank: size_text(rank.memory)),
    _Column("GPU", lambda rank: _percent(rank.gpu_use), share=lambda rank: rank.gpu_use),
    _Column("GPU memory", _memory),
    _Column("°C", lambda rank: "" if rank.gpu_temperature is None else str(rank.gpu_temperature)),
    _Column("where", _place, is_number=False),
)
