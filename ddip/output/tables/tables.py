"""What ddip knows of ranks and cells, as text and tables for people; only the standard library is imported."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddip.errors import ranks_text
from ddip.protocol.location import Stack, StackLocation


def size_text(size: float | None) -> str:
    """Bytes for people: ``1.5 GB``; empty for None."""
    if size is None:
        return ""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


SLOW_SECONDS, SLOW_SHARE = 0.1, 0.1
"""By how much a rank must have ended later than the first to be called slow: in seconds, and as a share of the cell."""


def places_text(places: Mapping[int, StackLocation | None]) -> str:
    """Where each rank is, one line each, ranks at the same place together; None: it does not answer."""
    together: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        text = "no answer" if place is None else f"{place}: {place.source}" if place.source else str(place)
        if place is not None and place.collective:
            text += f"\n    {place.collective}"
        together.setdefault(text, []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in together.items())


def way_out(stuck: Sequence[int]) -> str:
    """What a person can do about ranks that do not stop."""
    those = "that rank" if len(stuck) == 1 else "those ranks"
    return (
        f"wait until {'it returns' if len(stuck) == 1 else 'they return'} from there, or type %makedip --repair: "
        f"it puts new processes in place of {those}, and the others keep their variables"
    )


def cut_off_text(cut_off: Mapping[int, bool]) -> str:
    """What to say of the ranks whose work on the GPU was cut off by a release; False: of this rank nothing was."""
    ranks, good = ([rank for rank, was in sorted(cut_off.items()) if was is which] for which in (True, False))
    from_where = f"from {ranks_text(good[:1])}, or from a checkpoint" if good else "from a checkpoint"
    return (
        f"{ranks_text(ranks)}: work on the GPU was cut off, and what it was to compute may be wrong (parameters, the "
        f"state of an optimizer); copy it {from_where}, before you go on"
    )


def where_text(seconds: Mapping[int, float]) -> str:
    """Which ranks a cell ran on, how long it took, and which of them was the slowest, if that is more than chance."""
    if not seconds:
        return ""
    slowest = max(seconds, key=seconds.__getitem__)
    took, behind = seconds[slowest], seconds[slowest] - min(seconds.values())
    text = f"{ranks_text(list(seconds))} · {took:.{2 if took < 10 else 1}f} s"
    return f"{text} · slowest: rank {slowest}" if behind >= max(SLOW_SECONDS, SLOW_SHARE * took) else text


def stack_of(answer: dict[str, Any]) -> Stack:
    """What a rank tells of its threads, as a `Stack`."""
    return Stack(**{**answer, "place": StackLocation(**answer["place"])})


def stacks_text(stacks: Mapping[int, Stack | None]) -> str:
    """All threads of each rank, ranks with the same stacks together."""
    together: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        if stack is None:
            text = "  no answer"
        else:
            text = "\n".join(f"  {name}:\n{_indented(frames)}" for name, frames in stack.threads.items())
        together.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_text(ranks)}\n{text}" for text, ranks in together.items())


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


@dataclass(frozen=True)
class RankInfo:
    """One rank, as ``%makedip -i`` shows it; sizes in bytes, seconds of the last cell."""

    rank: int
    host: str
    pid: int
    device: str
    memory: int | None
    gpu_allocated: int | None
    gpu_reserved: int | None
    gpu_total: int | None
    state: str
    seconds: float | None
    doing: str = ""
    """What it does for ddip, or how it goes on if it is stopped; empty while it runs a cell, or nothing."""
    busy_for: float | None = None
    """Seconds."""

    @property
    def state_text(self) -> str:
        """The state, what it does, and for how long."""
        if self.state == "stopped":
            return self.doing
        doing = f", {self.doing}" if self.doing else ""
        return f"{self.state}{doing}" + ("" if self.busy_for is None else f" for {self.busy_for:.0f} s")


def info_table(infos: Sequence[RankInfo]) -> str:
    """The table of ``%makedip -i``; the GPU column is there when a rank has one."""
    head = ["rank", "host", "pid", "device", "memory", "GPU memory allocated / reserved / total", "state", "last cell"]
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
    return aligned([head, *rows])


def aligned(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Align `rows` of equally many cells as text; columns of `numbers`, counted from 0, end alike."""
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if number in numbers else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def html_table(
    rows: Sequence[Sequence[str]], numbers: Collection[int] = (), caption: str = "", *, total: bool = False
) -> str:
    """Return `rows` as HTML, the first as the head, and with `total` the last as the foot."""
    styles = ["right; white-space: nowrap" if i in numbers else "left" for i in range(len(rows[0]))]

    def row(cells: Sequence[str], tag: str) -> str:
        begins = [f'<{tag} style="text-align: {style}">' for style in styles]
        each = zip(begins, map(html.escape, cells), strict=True)
        return f"<tr>{''.join(f'{begin}{text}</{tag}>' for begin, text in each)}</tr>"

    head, *body = rows
    foot = f"<tfoot>{row(body.pop(), 'th')}</tfoot>" if total else ""
    title = f'<caption style="text-align: left">{html.escape(caption)}</caption>' if caption else ""
    inner = "".join(row(cells, "td") for cells in body)
    return f"<table>{title}<thead>{row(head, 'th')}</thead><tbody>{inner}</tbody>{foot}</table>"


def still_text(stuck: Sequence[int], busy: Mapping[int, str]) -> str:
    """What `stuck` ranks do; those that are `busy` with something else do not run a cell."""
    running = [rank for rank in stuck if rank not in busy]
    parts = [f"{ranks_text(running)} {_be(running)} still running the interrupted cell"] if running else []
    for doing in dict.fromkeys(busy.values()):
        ranks = [rank for rank in busy if busy[rank] == doing]
        parts.append(f"{ranks_text(ranks)} {_be(ranks)} still {doing}, which was interrupted")
    return ", and ".join(parts)


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def verb_of(ranks: Sequence[int], verb: str) -> str:
    """``run`` or ``runs``, as one says it of `ranks`."""
    return f"{verb}s" if len(ranks) == 1 else verb


@dataclass(frozen=True)
class CellRow:
    """One cell."""

    number: int
    ranks: Sequence[int]
    state: str
    """Also how it has ended, in words."""
    seconds: float
    background: bool
    first_line: str


def cells_table(rows: Sequence[CellRow]) -> str:
    """One line a cell, the oldest first."""
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
    return aligned([head, *lines])
