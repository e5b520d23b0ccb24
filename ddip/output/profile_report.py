"""The report of a profiled cell: a table and a bar for each rank, as text and as HTML."""

from __future__ import annotations

import html as markup
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ddip.errors import ranks_text
from ddip.output.profile_figures import PARTS, Collective, Profile, RankProfile

NAMES = {"loading": "data loading"}
LETTERS = dict(zip(PARTS, "#=.%-", strict=True))
"""Of the bars in a terminal: by the parts."""
COLOURS = dict(zip(PARTS, ("#4c9a5b", "#4878cf", "#e0a13a", "#9467bd", "#b8b8b8"), strict=True))
WIDTH = 60
"""Of a bar in a terminal."""
MOST_KINDS = 5
NOBODY_SHARE = 0.02
"""Of the time of the cell: who waits less than that has waited for nobody."""
MUCH = 0.5
"""Of what others have waited for the slowest rank: one for which they waited as long is as slow."""
ENDED_SHARE = 0.8
"""Of the time of the others: a rank that took less has left them alone."""
NUMBERS = 'style="text-align: right; white-space: nowrap"'
WORDS = 'style="text-align: left; white-space: nowrap"'


def text(profile: Profile) -> str:
    """For a terminal, and where a saved notebook cannot show HTML."""
    lines = [_title(profile)]
    if profile.ranks:
        lines += _columns([_head(), *map(_row, profile.ranks.values())])
        longest = max(each.seconds for each in profile.ranks.values())
        lines += [f"rank {rank}  {_bar(each, longest)}" for rank, each in profile.ranks.items()]
        lines.append("  ".join(f"{LETTERS[part]} {_name(part)}" for part in PARTS))
    kinds = _kinds(profile.collectives)
    if kinds:
        lines += _columns([_kinds_head(), *kinds])
    return "\n".join([*lines, *remarks(profile)])


def html(profile: Profile) -> str:
    """For a page; it needs no script, and no file."""
    parts = [f"<div><b>{markup.escape(_title(profile))}</b></div>"]
    if profile.ranks:
        parts += [_html_table([_head(), *map(_row, profile.ranks.values())]), _plot(profile.ranks)]
    kinds = _kinds(profile.collectives)
    if kinds:
        parts.append(_html_table([_kinds_head(), *kinds]))
    parts += [f"<div>{markup.escape(line)}</div>" for line in remarks(profile)]
    return f'<div class="ddip-profile">{"".join(parts)}</div>'


def remarks(profile: Profile) -> list[str]:
    """Who is slow, and why; what was not recorded; and where the traces are."""
    found = [*_slowest_rank(profile), *_slowest_collective(profile)]
    notes: dict[str, list[int]] = defaultdict(list)
    for rank, each in profile.ranks.items():
        if each.note:
            notes[f"recorded only the first {_seconds(each.seconds)}: {each.note}"].append(rank)
    for rank, why in profile.missing.items():
        notes[f"no profile: {why}"].append(rank)
    found += [f"{ranks_text(ranks)}: {note}" for note, ranks in notes.items()]
    if profile.folder is not None and profile.ranks:
        merged = f"; all ranks for ui.perfetto.dev: {profile.merged.name}" if profile.merged else ""
        found.append(f"traces, one a rank: {profile.folder}{merged}")
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
        return [f"no rank is slow all along: they waited for each other, up to {_seconds(waited)}"]
    others = [rank for rank in profile.ranks if rank != slowest]
    who = f"rank {others[0]} waited" if len(others) == 1 else "the others waited up to"
    return [f"slowest: rank {slowest}; {who} {_seconds(waited)} for it{_more_than_others(profile.ranks, slowest)}"]


def _more_than_others(ranks: Mapping[int, RankProfile], slowest: int) -> str:
    """What the slowest rank does longer than the others."""
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
    return f", while it {what}, {_seconds(more[most])} more than {whom}"


def _slowest_collective(profile: Profile) -> list[str]:
    slowest = profile.slowest_collective
    if slowest is None:
        return []
    waited = ""
    if slowest.waiting > 0.1 * slowest.seconds:
        who = "ranks that never came" if slowest.last is None else f"rank {slowest.last}"
        waited = f", {_seconds(slowest.waiting)} of that waiting for {who}"
    return [f"slowest collective: {slowest}: {_seconds(slowest.seconds)}{waited}"]


def _title(profile: Profile) -> str:
    if not profile.ranks:
        return "no rank has a profile of the cell"
    longest = max(each.seconds for each in profile.ranks.values())
    return f"where the time of the cell went: {ranks_text(list(profile.ranks))}, {_seconds(longest)}"


def _head() -> list[str]:
    return ["rank", "seconds", *map(_name, PARTS), "in Python"]


def _row(each: RankProfile) -> list[str]:
    shares = [f"{getattr(each, part):.2f} ({_share(getattr(each, part), each.seconds)})" for part in PARTS]
    return [str(each.rank), f"{each.seconds:.2f}", *shares, f"{each.python:.2f}"]


def _kinds_head() -> list[str]:
    return ["collective", "times", "seconds", "waiting", "begun last by"]


def _kinds(collectives: Sequence[Collective]) -> list[list[str]]:
    """Collectives of one kind together: those that take longest."""
    kinds: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for each in collectives:
        kinds[each.kind, each.group].append(each)
    rows = sorted(kinds.items(), key=lambda item: -sum(each.seconds for each in item[1]))
    several = len({each.group for each in collectives}) > 1
    found = []
    for (kind, group), its in rows[:MOST_KINDS]:
        last: dict[int, int] = defaultdict(int)
        for each in its:
            if each.last is not None:
                last[each.last] += 1
        most = max(last, key=lambda rank: last[rank], default=None)
        name = f"{kind}, {group}" if several else kind
        who = "" if most is None else f"rank {most} ({last[most]} of {len(its)})"
        sums = [f"{sum(each.seconds for each in its):.2f}", f"{sum(each.waiting for each in its):.2f}"]
        found.append([name, str(len(its)), *sums, who])
    return found


def _name(part: str) -> str:
    return NAMES.get(part, part)


def _share(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.0f} %" if whole > 0 else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    words = [not any(row[i][:1].isdigit() for row in rows[1:]) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if is_words else cell.rjust(width)
            for cell, width, is_words in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in rows
    ]


def _bar(each: RankProfile, longest: float) -> str:
    """Its length is the time of the rank."""
    bar, until = "", 0.0
    for part in PARTS:
        until += getattr(each, part)
        bar += LETTERS[part] * (round(WIDTH * until / longest) - len(bar) if longest > 0 else 0)
    return f"|{bar.ljust(WIDTH)}|"


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    first = "".join(f"<th {WORDS if i == 0 else NUMBERS}>{markup.escape(cell)}</th>" for i, cell in enumerate(head))
    rest = "".join(
        "<tr>"
        + "".join(f"<td {WORDS if i == 0 else NUMBERS}>{markup.escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in body
    )
    return f"<table><thead><tr>{first}</tr></thead><tbody>{rest}</tbody></table>"


def _plot(ranks: Mapping[int, RankProfile]) -> str:
    """A stacked bar for each rank."""
    longest = max(each.seconds for each in ranks.values()) or 1.0
    height, left, width = 18, 60, 540
    shapes = []
    for row, (rank, each) in enumerate(ranks.items()):
        x, y = float(left), row * (height + 4)
        shapes.append(f'<text x="0" y="{y + 13}" font-size="12" fill="currentColor">rank {rank}</text>')
        for part in PARTS:
            wide = width * getattr(each, part) / longest
            told = f"rank {rank}: {_name(part)} {_seconds(getattr(each, part))}"
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height}" fill="{COLOURS[part]}">'
                f"<title>{told}</title></rect>"
            )
            x += wide
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:1em"><span style="display:inline-block;width:.8em;height:.8em;'
        f'background:{COLOURS[part]}"></span> {_name(part)}</span>'
        for part in PARTS
    )
    size = f'width="{left + width}" height="{len(ranks) * (height + 4)}"'
    label = 'role="img" aria-label="where the time of each rank went"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>{"".join(shapes)}</svg><div>{legend}</div>'
