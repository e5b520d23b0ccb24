"""The figures of a profiled cell, and its report: a table and a bar per rank, as text and as HTML."""

from __future__ import annotations

import html as markup
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddip.errors import ranks_text
from ddip.output.tables.tables import align_rows, html_table
from ddip.protocol.collective import kind_text

PARTS = ("compute", "communication", "waiting", "loading", "idle")
"""Parts of a rank's time, which add up to the whole."""


@dataclass(frozen=True)
class RankProfile:
    """The time of a rank by activity, in seconds."""

    rank: int
    seconds: float
    """Recorded time."""
    compute: float
    """Time in operations of torch and in Python, and of kernels on a GPU."""
    communication: float
    """Time in collectives that all ranks had begun, without computing anything meanwhile."""
    waiting: float
    """Time in collectives that another rank had not begun yet."""
    loading: float
    """Time spent waiting for the next batch of a ``DataLoader``."""
    idle: float
    """Time in which the main thread did none of these, for example slept, read a file or waited for a process."""
    python: float
    """Part of `compute` in which no operation was running."""
    trace: Path | None = None
    note: str = ""
    """Reason why the recording ended before the cell; empty if it did not."""


@dataclass(frozen=True)
class Collective:
    """One collective of a group of ranks."""

    group: str
    """Readable name of the process group."""
    number: int
    """Sequence number in its group, from 1, as in torch."""
    op: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the input tensors; empty if unknown."""
    dtype: str
    seconds: float
    """Duration on the rank where it took longest."""
    waiting: float
    """Longest time that a rank waited in it for the last rank without computing anything."""
    last: int | None
    """The rank that began it last; None if some ranks did not begin it, or are unknown."""

    @property
    def kind(self) -> str:
        """Operation, shapes and data type as text."""
        return kind_text(self.op, self.shapes, self.dtype)

    def __str__(self) -> str:
        return f"number {self.number} of {self.group}, {self.kind}"


@dataclass(frozen=True)
class Profile:
    """The profile of a cell, which a notebook shows as a table and a plot."""

    ranks: Mapping[int, RankProfile]
    collectives: Sequence[Collective]
    """Collectives in the order in which they began."""
    waited_for: Mapping[int, float] = field(default_factory=dict)
    """Longest time in seconds that another rank waited for each rank."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """Ranks without a profile, and the reason."""
    folder: Path | None = None
    merged: Path | None = None
    """Trace of all ranks in one file, for Perfetto."""

    @property
    def slowest_rank(self) -> int | None:
        """The rank for which others waited longest; if none did, the rank that took longest."""
        if self.waited_for and max(self.waited_for.values()) > 0:
            return max(self.waited_for, key=lambda rank: self.waited_for[rank])
        if len(self.ranks) < 2:
            return None
        return max(self.ranks, key=lambda rank: self.ranks[rank].seconds)

    @property
    def slowest_collective(self) -> Collective | None:
        """The collective that took longest."""
        return max(self.collectives, key=lambda each: each.seconds, default=None)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": report_text(self), "text/html": report_html(self)}


NAMES = {"loading": "data loading"}
RANK_HEAD = ["rank", "seconds", *(NAMES.get(part, part) for part in PARTS), "in Python"]
KIND_HEAD = ["collective", "count", "seconds", "waiting", "begun last by"]
LETTERS = dict(zip(PARTS, "#=.%-", strict=True))
"""Characters of the bars in a terminal, by part."""
COLOURS = dict(zip(PARTS, ("#4c9a5b", "#4878cf", "#e0a13a", "#9467bd", "#b8b8b8"), strict=True))
WIDTH = 60
"""Characters of a bar in a terminal."""
MOST_KINDS = 5
NOBODY_SHARE = 0.02
"""Share of the cell's time below which waiting is ignored."""
MUCH = 0.5
"""A rank counts as equally slow if others waited for it for more than this share of their wait for the slowest rank."""
ENDED_SHARE = 0.8
"""Share of the others' time below which a rank has ended before them."""


def report_text(profile: Profile) -> str:
    """Return the report as text, for a terminal and for pages without HTML."""
    lines = [_title_text(profile)]
    if profile.ranks:
        lines.append(_align_table([RANK_HEAD, *map(_rank_row, profile.ranks.values())]))
        longest = max(each.seconds for each in profile.ranks.values())
        lines += [f"rank {rank}  {_text_bar(each, longest)}" for rank, each in profile.ranks.items()]
        lines.append("  ".join(f"{LETTERS[part]} {_part_name(part)}" for part in PARTS))
    kinds = _kind_rows(profile.collectives)
    if kinds:
        lines.append(_align_table([KIND_HEAD, *kinds]))
    return "\n".join([*lines, *profile_remarks(profile)])


def report_html(profile: Profile) -> str:
    """Return the report as HTML, without scripts and external files."""
    parts = [f"<div><b>{markup.escape(_title_text(profile))}</b></div>"]
    if profile.ranks:
        parts += [
            html_table([RANK_HEAD, *map(_rank_row, profile.ranks.values())], range(1, 8)),
            _svg_plot(profile.ranks),
        ]
    kinds = _kind_rows(profile.collectives)
    if kinds:
        parts.append(html_table([KIND_HEAD, *kinds], range(1, 5)))
    parts += [f"<div>{markup.escape(line)}</div>" for line in profile_remarks(profile)]
    return f'<div class="ddip-profile">{"".join(parts)}</div>'


def profile_remarks(profile: Profile) -> list[str]:
    """Return notes on slow ranks and collectives, on what was not recorded, and on the trace files."""
    found = [*_slowest_rank(profile), *_slowest_collective(profile)]
    notes: dict[str, list[int]] = defaultdict(list)
    for rank, each in profile.ranks.items():
        if each.note:
            notes[f"recorded only the first {_seconds_text(each.seconds)}: {each.note}"].append(rank)
    for rank, why in profile.missing.items():
        notes[f"no profile: {why}"].append(rank)
    found += [f"{ranks_text(ranks)}: {note}" for note, ranks in notes.items()]
    if profile.folder is not None and profile.ranks:
        merged = f"; all ranks for ui.perfetto.dev: {profile.merged.name}" if profile.merged else ""
        found.append(f"traces, one per rank: {profile.folder}{merged}")
    return found


def _slowest_rank(profile: Profile) -> list[str]:
    slowest = profile.slowest_rank
    if slowest is None:
        return []
    cell = max(each.seconds for each in profile.ranks.values())
    waited = profile.waited_for.get(slowest, 0.0)
    if waited <= NOBODY_SHARE * cell:
        return ["no rank kept the others waiting"] if profile.collectives else []
    second = max((seconds for rank, seconds in profile.waited_for.items() if rank != slowest), default=0.0)
    if second > MUCH * waited:
        return [f"no rank is consistently slow: the ranks waited for each other, up to {_seconds_text(waited)}"]
    others = [rank for rank in profile.ranks if rank != slowest]
    who = f"rank {others[0]} waited" if len(others) == 1 else "the others waited up to"
    return [f"slowest: rank {slowest}; {who} {_seconds_text(waited)} for it{_more_than_others(profile.ranks, slowest)}"]


def _more_than_others(ranks: Mapping[int, RankProfile], slowest: int) -> str:
    """Describe the activity on which the slowest rank spends more time than the others."""
    others = [each for rank, each in ranks.items() if rank != slowest]
    if not others or slowest not in ranks:
        return ""
    if ranks[slowest].seconds < ENDED_SHARE * min(each.seconds for each in others):
        return ", which had ended before"
    more = {
        part: getattr(ranks[slowest], part) - sum(getattr(each, part) for each in others) / len(others)
        for part in ("compute", "loading", "idle")
    }
    most = max(more, key=lambda part: more[part])
    if more[most] <= NOBODY_SHARE * ranks[slowest].seconds:
        return ""
    what = {"compute": "computed", "loading": "loaded data", "idle": "was idle"}[most]
    whom = f"rank {others[0].rank}" if len(others) == 1 else "the others"
    return f", while it {what}, {_seconds_text(more[most])} more than {whom}"


def _slowest_collective(profile: Profile) -> list[str]:
    slowest = profile.slowest_collective
    if slowest is None:
        return []
    waited = ""
    if slowest.waiting > 0.1 * slowest.seconds:
        who = "ranks that never joined it" if slowest.last is None else f"rank {slowest.last}"
        waited = f", {_seconds_text(slowest.waiting)} of that waiting for {who}"
    return [f"slowest collective: {slowest}: {_seconds_text(slowest.seconds)}{waited}"]


def _title_text(profile: Profile) -> str:
    if not profile.ranks:
        return "no rank has a profile of the cell"
    longest = max(each.seconds for each in profile.ranks.values())
    return f"where the time of the cell went: {ranks_text(list(profile.ranks))}, {_seconds_text(longest)}"


def _rank_row(each: RankProfile) -> list[str]:
    shares = [f"{getattr(each, part):.2f} ({_share_text(getattr(each, part), each.seconds)})" for part in PARTS]
    return [str(each.rank), f"{each.seconds:.2f}", *shares, f"{each.python:.2f}"]


def _kind_rows(collectives: Sequence[Collective]) -> list[list[str]]:
    """Return a table row for each of the MOST_KINDS kinds of collectives that take longest in total."""
    kinds: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for each in collectives:
        kinds[each.kind, each.group].append(each)
    rows = sorted(kinds.items(), key=lambda item: -sum(each.seconds for each in item[1]))
    several = len({each.group for each in collectives}) > 1
    found = []
    for (kind, group), members in rows[:MOST_KINDS]:
        last: dict[int, int] = defaultdict(int)
        for each in members:
            if each.last is not None:
                last[each.last] += 1
        most = max(last, key=lambda rank: last[rank], default=None)
        name = f"{kind}, {group}" if several else kind
        who = "" if most is None else f"rank {most} ({last[most]} of {len(members)})"
        sums = [f"{sum(each.seconds for each in members):.2f}", f"{sum(each.waiting for each in members):.2f}"]
        found.append([name, str(len(members)), *sums, who])
    return found


def _part_name(part: str) -> str:
    return NAMES.get(part, part)


def _share_text(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.0f} %" if whole > 0 else "-"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _align_table(rows: Sequence[Sequence[str]]) -> str:
    return align_rows(rows, [i for i in range(len(rows[0])) if any(row[i][:1].isdigit() for row in rows[1:])])


def _text_bar(each: RankProfile, longest: float) -> str:
    """Draw a bar of characters, whose length is proportional to the rank's time."""
    bar, until = "", 0.0
    for part in PARTS:
        until += getattr(each, part)
        bar += LETTERS[part] * (round(WIDTH * until / longest) - len(bar) if longest > 0 else 0)
    return f"|{bar.ljust(WIDTH)}|"


def _svg_plot(ranks: Mapping[int, RankProfile]) -> str:
    """Draw a stacked bar per rank as SVG, with a legend."""
    longest = max(each.seconds for each in ranks.values()) or 1.0
    height, left, width = 18, 60, 540
    shapes = []
    for row, (rank, each) in enumerate(ranks.items()):
        x, y = float(left), row * (height + 4)
        shapes.append(f'<text x="0" y="{y + 13}" font-size="12" fill="currentColor">rank {rank}</text>')
        for part in PARTS:
            bar_width = width * getattr(each, part) / longest
            tooltip = f"rank {rank}: {_part_name(part)} {_seconds_text(getattr(each, part))}"
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{bar_width:.1f}" height="{height}" fill="{COLOURS[part]}">'
                f"<title>{tooltip}</title></rect>"
            )
            x += bar_width
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:1em"><span style="display:inline-block;width:.8em;height:.8em;'
        f'background:{COLOURS[part]}"></span> {_part_name(part)}</span>'
        for part in PARTS
    )
    size = f'width="{left + width}" height="{len(ranks) * (height + 4)}"'
    label = 'role="img" aria-label="where the time of each rank went"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>{"".join(shapes)}</svg><div>{legend}</div>'
