"""Keep the figures of README.md and docs/*.md equal to ``RESULTS.md``.

Usage: figures.py          rewrites the figures; ``make bench`` runs it

A comment behind a figure, and behind its unit, says which result it is:

    four ranks start in 0.65 s<!-- figure: Start / start: to the first all_reduce / 4 -->

    SECTION / ROW / RANKS                     the median of ddip
    SECTION / ROW / RANKS / PEER              the median of the peer
    SECTION / ROW / RANKS / ratio to PEER     the ratio of the two
    SECTION / day                             the day of the run

A figure keeps its number of decimals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURE = re.compile(r"(\d[\d.-]*\d|\d)((?:\s?[\w%]+)?\**\s*<!--\s*figure:\s*(.+?)\s*-->)", re.DOTALL)
PEER = re.compile(r"(.+) ([\d.]+)(?: \(\S+ to \S+\))?: \*\*([\d.]+).*\*\*")


@dataclass(frozen=True)
class Result:
    """One row of ``RESULTS.md``: medians, and their ratios to peers."""

    section: str
    what: str
    unit: str
    ranks: int
    median: str
    peers: dict[str, str]
    """Median of each peer."""
    ratios: dict[str, str]
    """Median of ddip's value divided by the peer's."""


def read_results(page: str | None = None) -> list[Result]:
    """Return all rows of ``RESULTS.md``."""
    text = RESULTS.read_text() if page is None else page
    return [result for title, lines in _sections(text) for line in lines if (result := _read_row(title, line))]


def read_runs(page: str | None = None) -> dict[str, tuple[str, str]]:
    """Return the day and the machine of each section's run, such as ``2026-11-24`` and ``2 cores, ...``."""
    text = RESULTS.read_text() if page is None else page
    runs = {title: re.fullmatch(r"On (\S+), with torch \S+, on (.+)\.", lines[1]) for title, lines in _sections(text)}
    return {title: (run[1], run[2]) for title, run in runs.items() if run}


def read_tables(section: str) -> list[str]:
    """Return the lines of a section's tables, with the empty lines between them."""
    lines = dict(_sections(RESULTS.read_text())).get(section, [])
    return [line for line in lines if line.startswith("|") or not line]


def _sections(page: str) -> Iterator[tuple[str, list[str]]]:
    for part in page.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        yield title, lines


def _read_row(section: str, line: str) -> Result | None:
    cells = [cell.strip() for cell in line.strip("|").split(" |")]
    what, _, unit = cells[0].rpartition(", ")
    if len(cells) != 4 or not cells[1].isdigit() or not what:
        return None
    found = [peer for text in cells[3].split("; ") if (peer := PEER.fullmatch(text))]
    peers, ratios = {peer[1]: peer[2] for peer in found}, {peer[1]: peer[3] for peer in found}
    return Result(section, what, unit, int(cells[1]), cells[2].split()[0], peers, ratios)


def known_figures() -> dict[str, str]:
    """Return each figure by the text that a comment names it by."""
    known = {f"{section} / day": day for section, (day, _) in read_runs().items()}
    for result in read_results():
        key = f"{result.section} / {result.what} / {result.ranks}"
        known[key] = result.median
        known |= {f"{key} / {peer}": value for peer, value in result.peers.items()}
        known |= {f"{key} / ratio to {peer}": value for peer, value in result.ratios.items()}
    return known


def update_figures(page: str) -> str:
    """Return `page` with the figures of ``RESULTS.md``; raise ValueError if a comment names none."""
    known = known_figures()

    def current_figure(match: re.Match[str]) -> str:
        key = " ".join(match[3].split())
        if key not in known:
            raise ValueError(f"benchmarks/RESULTS.md has no figure {key!r}")
        if key.endswith("/ day"):
            return known[key] + match[2]
        return f"{float(known[key]):.{len(match[1].partition('.')[2])}f}{match[2]}"

    if len(FIGURE.findall(page)) < len(re.findall(r"<!--\s*figure:", page)):
        raise ValueError("a comment with a figure does not follow a number")
    return FIGURE.sub(current_figure, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(update_figures(path.read_text()))
