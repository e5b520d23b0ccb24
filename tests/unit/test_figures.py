"""Figures in README.md and the pages, against the results of the benchmarks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import figures

HALF = "9.5 s<!-- figure: Start / start: to the first all_reduce / 4 -->"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda path: path.name)
def test_a_page_has_the_measured_figures(page: Path) -> None:
    assert figures.update_figures(page.read_text()) == page.read_text()


def test_every_row_of_the_results_can_be_cited() -> None:
    page = figures.RESULTS.read_text()
    results = figures.read_results()
    assert len(results) == len(re.findall(r"^\| .+, .+ \| \d+ \| ", page, re.MULTILINE))
    assert sum(len(result.ratios) for result in results) == page.count("**") // 2


def test_a_figure_keeps_its_decimals() -> None:
    measured = float(figures.known_figures()["Start / start: to the first all_reduce / 4"])
    assert figures.update_figures(HALF).startswith(f"{measured:.1f} s<!--")


@pytest.mark.parametrize(
    "text", [HALF.replace("/ 4 -->", "/ 5 -->"), HALF.removeprefix("9.5 s")], ids=["no such row", "no number"]
)
def test_a_comment_without_its_figure_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="figure"):
        figures.update_figures(text)
