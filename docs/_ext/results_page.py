"""Tables of benchmark results in the pages, from ``benchmarks/RESULTS.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from markdown_directive import MarkdownDirective, markdown_table

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import figures
from figures import Result

YARDSTICKS = {
    "%makedip -r",
    "a round trip of the network",
    "from one",
    "idle ranks",
    "import torch",
    "import torch.distributed by ssh, on both",
    "no fault",
    "on one",
    "one process",
    "pickle and one copy",
    "the model, 2 cores",
    "two processes, apart",
    "without it",
}
"""Comparisons that are not other ways to do the same."""


class Results(MarkdownDirective):
    """Directive ``dip-results``: some rows of a section over the number of ranks, with their comparisons.

    Each line of its content is a row of the section; without content, all are shown.
    """

    required_arguments = 1
    final_argument_whitespace = True

    def lines(self) -> list[str]:
        """Return the table, and a line with the machine and the day."""
        section = self.arguments[0]
        found = [result for result in figures.read_results() if result.section == section]
        names = list(self.content) or list(dict.fromkeys(result.what for result in found))
        unknown = set(names) - {result.what for result in found}
        if unknown:
            raise self.error(f"benchmarks/RESULTS.md, {section}: no row {', '.join(sorted(unknown))}")
        chosen = [result for name in names for result in found if result.what == name]
        return [*_table(chosen), *_caption([section])]


class WholeTables(MarkdownDirective):
    """Directive ``dip-tables``: all tables of a section, as ``RESULTS.md`` has them."""

    required_arguments = 1
    final_argument_whitespace = True

    def lines(self) -> list[str]:
        """Return the tables, and a line with the machine and the day."""
        return [*figures.read_tables(self.arguments[0]), *_caption(self.arguments)]


def _table(results: Sequence[Result]) -> list[str]:
    """Return a table with a column per number of ranks, and a row for ddip and each comparison."""
    sizes = sorted({result.ranks for result in results})
    shared = all(one.peers == other.peers for one in results for other in results if one.ranks == other.ranks)
    rows: dict[str, dict[int, str]] = {}
    for result in results:
        rows.setdefault(f"**ddip**: {result.what}, {result.unit}", {})[result.ranks] = result.median
        for peer, value in () if shared else result.peers.items():
            rows.setdefault(f"{peer}: {result.what}, {result.unit}", {})[result.ranks] = value
    for result in results if shared else ():
        for peer, value in result.peers.items():
            rows.setdefault(f"{peer}, {result.unit}", {})[result.ranks] = value
    return markdown_table(["", *map(_ranks_text, sizes)], ([name, *map(row.get, sizes)] for name, row in rows.items()))


class PeersAhead(MarkdownDirective):
    """Directive ``dip-peers-ahead``: all results in which another tool has the smaller median."""

    def lines(self) -> list[str]:
        """Return the table, and a line with the machine and the days."""
        results = figures.read_results()
        ahead = [
            (result, peer)
            for what in dict.fromkeys(result.what for result in results)
            for result in results
            for peer, ratio in result.ratios.items()
            if result.what == what and float(ratio) > 1 and peer not in YARDSTICKS
        ]
        sizes = sorted({result.ranks for result, _ in ahead})
        rows: dict[tuple[str, str], dict[int, str]] = {}
        for result, peer in ahead:
            pair = f"{result.median} / {result.peers[peer]}"
            rows.setdefault((f"{result.what}, {result.unit}", peer), {})[result.ranks] = pair
        heads = ["ddip / the other tool", "ahead", *map(_ranks_text, sizes)]
        table = markdown_table(heads, ([*key, *map(row.get, sizes)] for key, row in rows.items()))
        return [*table, *_caption(result.section for result, _ in ahead)]


def _caption(sections: Iterable[str]) -> list[str]:
    """Return a line with the machines and the days of the runs."""
    runs = figures.read_runs()
    lines = {f"{machine}; {day}" for day, machine in (runs[section] for section in sections)}
    return ["", f"Medians. {'; '.join(sorted(lines))}.", ""]


def _ranks_text(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"
