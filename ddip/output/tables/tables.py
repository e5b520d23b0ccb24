"""Text and tables about ranks and cells for people; imports only the standard library and plain data of ddip."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddip.errors import ranks_text
from ddip.protocol.location import Stack, StackLocation


def size_text(size: float | None) -> str:
    """Format a number of bytes, such as ``1.5 GB``; empty for None."""
    if size is None:
        return ""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


SLOW_SECONDS, SLOW_SHARE = 0.1, 0.1
"""Minimum lag behind the fastest rank for the slowest to be named: in seconds, and as a share of the cell's time."""


def places_text(places: Mapping[int, StackLocation | None]) -> str:
    """Format the positions of ranks, one line per position; None: the rank does not answer."""
    together: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        text = "no answer" if place is None else f"{place}: {place.source}" if place.source else str(place)
        if place is not None and place.collective:
            text += f"\n    {place.collective}"
        together.setdefault(text, []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in together.items())


def advise_on_stuck(stuck: Sequence[int]) -> str:
    """Return advice for the user about ranks that do not stop."""
    those = "that rank" if len(stuck) == 1 else "those ranks"
    return (
        f"wait until {'it returns' if len(stuck) == 1 else 'they return'} from there, or type %makedip --repair: "
        f"it replaces the processes of {those}; the others keep their variables"
    )


def cut_off_text(cut_off: Mapping[int, bool]) -> str:
    """Return a warning about ranks whose GPU work was cut off; `cut_off` is True for these."""
    ranks, good = ([rank for rank, was in sorted(cut_off.items()) if was is which] for which in (True, False))
    from_where = f"from {ranks_text(good[:1])}, or from a checkpoint" if good else "from a checkpoint"
    return (
        f"{ranks_text(ranks)}: GPU work was cut off, and its results may be wrong (parameters, optimizer state); copy "
        f"them {from_where}, before you continue"
    )


def where_text(seconds: Mapping[int, float], *, name_slowest: bool = True) -> str:
    """Format the ranks and duration of a cell, with the slowest rank if it clearly lags.

    Empty without `seconds`. `seconds`: duration by rank. `name_slowest` is False for a failed cell: the rank that took
    longest may only have waited for the one that failed.
    """
    if not seconds:
        return ""
    slowest = max(seconds, key=seconds.__getitem__)
    took, behind = seconds[slowest], seconds[slowest] - min(seconds.values())
    text = f"{ranks_text(list(seconds))} · {took:.{2 if took < 10 else 1}f} s"
    is_slow = name_slowest and behind >= max(SLOW_SECONDS, SLOW_SHARE * took)
    return f"{text} · slowest: rank {slowest}" if is_slow else text


def stack_of(answer: dict[str, Any]) -> Stack:
    """Convert a rank's answer about its threads to a `Stack`."""
    return Stack(**{**answer, "place": StackLocation(**answer["place"])})


def stacks_text(stacks: Mapping[int, Stack | None]) -> str:
    """Format all threads of each rank; ranks with equal stacks share a section."""
    together: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        if stack is None:
            text = "  no answer"
        else:
            text = "\n".join(f"  {name}:\n{_indent_lines(frames)}" for name, frames in stack.threads.items())
        together.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_text(ranks)}\n{text}" for text, ranks in together.items())


def _indent_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


@dataclass(frozen=True)
class RankInfo:
    """Process, device, memory and activity of a rank, as ``%makedip -i`` shows them.

    An attribute is None if it is unknown, such as the memory of a rank that did not reply.
    """

    rank: int
    """Number of the rank."""
    host: str
    """Name of its host."""
    pid: int
    """PID of its process."""
    device: str
    """Device of the rank, which is ``cpu``, or for example ``GPU 2`` with the GPU's number on its host."""
    memory: int | None
    """Resident memory of the process, in bytes."""
    gpu_allocated: int | None
    """GPU memory in tensors, in bytes, as torch counts it; None on the CPU."""
    gpu_reserved: int | None
    """GPU memory that torch's allocator holds, in bytes; None on the CPU."""
    gpu_total: int | None
    """Memory of the GPU, in bytes; None on the CPU."""
    state: str
    """Current state, one of ``idle``, ``busy``, ``stopped``, ``ended``, ``no answer`` and ``GPU lost``."""
    seconds: float | None
    """Duration of the last cell, in seconds."""
    doing: str = ""
    """Operation that the rank runs for ddip, or how to continue a stopped rank; empty while the rank runs a cell or is
    idle."""
    busy_for: float | None = None
    """Seconds since the rank became busy; None while it is idle."""

    @property
    def state_text(self) -> str:
        """State, current operation and its duration, as one phrase."""
        if self.state == "stopped":
            return self.doing
        doing = f", {self.doing}" if self.doing else ""
        return f"{self.state}{doing}" + ("" if self.busy_for is None else f" for {self.busy_for:.0f} s")


def info_table(infos: Sequence[RankInfo]) -> str:
    """Return the table of ``%makedip -i``, with a GPU column if any rank has a GPU."""
    head = [
        "rank",
        "host",
        "pid",
        "device",
        "memory",
        "GPU memory allocated / reserved / total",
        "state",
        "last cell took",
    ]
    rows = [
        [
            str(info.rank),
            info.host,
            str(info.pid),
            info.device,
            size_text(info.memory),
            " / ".join(
                size_text(size) for size in (info.gpu_allocated, info.gpu_reserved, info.gpu_total) if size is not None
            ),
            info.state_text,
            "" if info.seconds is None else f"{info.seconds:.2f} s",
        ]
        for info in infos
    ]
    if not any(row[5] for row in rows):
        for row in [head, *rows]:
            del row[5]
    return align_rows([head, *rows])


def align_rows(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Align `rows` of equal length as text; the columns `numbers`, counted from 0, are right-aligned."""
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if number in numbers else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def html_table(
    rows: Sequence[Sequence[str]], numbers: Collection[int] = (), caption: str = "", *, total: bool = False
) -> str:
    """Return `rows` as an HTML table; the first is the head, and with `total` the last is the foot."""
    styles = ["right; white-space: nowrap" if i in numbers else "left" for i in range(len(rows[0]))]

    def row_html(cells: Sequence[str], tag: str) -> str:
        begins = [f'<{tag} style="text-align: {style}">' for style in styles]
        each = zip(begins, map(html.escape, cells), strict=True)
        return f"<tr>{''.join(f'{begin}{text}</{tag}>' for begin, text in each)}</tr>"

    head, *body = rows
    foot = f"<tfoot>{row_html(body.pop(), 'th')}</tfoot>" if total else ""
    title = f'<caption style="text-align: left">{html.escape(caption)}</caption>' if caption else ""
    inner = "".join(row_html(cells, "td") for cells in body)
    return f"<table>{title}<thead>{row_html(head, 'th')}</thead><tbody>{inner}</tbody>{foot}</table>"


def still_text(stuck: Sequence[int], busy: Mapping[int, str]) -> str:
    """Describe `stuck` ranks: each runs an interrupted cell, or the operation in `busy` by rank."""
    running = [rank for rank in stuck if rank not in busy]
    parts = [f"{ranks_text(running)} {_to_be(running)} still running the interrupted cell"] if running else []
    for doing in dict.fromkeys(busy.values()):
        ranks = [rank for rank in busy if busy[rank] == doing]
        parts.append(f"{ranks_text(ranks)} {_to_be(ranks)} still {doing}, which was interrupted")
    return ", and ".join(parts)


def _to_be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def verb_of(ranks: Sequence[int], verb: str) -> str:
    """Return `verb` in the singular or plural form for `ranks`: ``runs`` or ``run``."""
    return f"{verb}s" if len(ranks) == 1 else verb


@dataclass(frozen=True)
class CellRow:
    """A row of the table of cells."""

    number: int
    ranks: Sequence[int]
    state: str
    """State, or outcome of an ended cell, in words."""
    seconds: float
    background: bool
    first_line: str


def cells_table(rows: Sequence[CellRow]) -> str:
    """Format `rows` as a text table with a heading and one line per cell, in the order of `rows`."""
    head = ["cell", "ranks", "state", "seconds", "first line"]
    lines = [
        [
            str(row.number),
            ranks_text(list(row.ranks)).split(" ", 1)[1],
            row.state + (", in the background" if row.background else ""),
            f"{row.seconds:.1f}",
            row.first_line,
        ]
        for row in rows
    ]
    return align_rows([head, *lines])
