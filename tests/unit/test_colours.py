"""Terminal colours as HTML: their values, and their contrast."""

from __future__ import annotations

import re

import pytest

from ddip.output.page.colours import to_html

PAGES = {
    "light": ((33, 33, 33), (255, 255, 255)),
    "light, stderr": ((33, 29, 29), (255, 221, 221)),
    "dark": ((255, 255, 255), (17, 17, 17)),
    "dark, stderr": ((255, 255, 255), (81, 31, 27)),
    "light, VS Code": ((59, 59, 59), (255, 255, 255)),
    "light, stderr, VS Code": ((59, 59, 59), (250, 228, 228)),
    "dark, VS Code": ((204, 204, 204), (31, 31, 31)),
    "dark, stderr, VS Code": ((204, 204, 204), (60, 37, 37)),
}
CODES = [f"38;5;{number}" for number in range(256)] + [*map(str, range(30, 38)), *map(str, range(90, 98))]
CODES += ["38;2;255;255;255", "38;2;0;0;0", "38;2;255;255;0", "38;2;300;0;0"]


def rgb_of(colour: str) -> list[float]:
    if colour.startswith("#"):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        return [int(digits[at : at + 2], 16) for at in (0, 2, 4)]
    return [min(255, int(part)) for part in colour[4:-1].split(",")]


def contrast_ratio(first: list[float], second: list[float]) -> float:
    def luminance(colour: list[float]) -> float:
        linear = [c / 3294.6 if c <= 10.31 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(luminance(first), luminance(second)) / min(luminance(first), luminance(second))


def test_colours_become_html() -> None:
    assert to_html("a < b") == "a &lt; b"
    red = to_html("\x1b[31mred\x1b[39m, \x1b[1;38;5;196mbold\x1b[0m \x1b[38;2;1;2;3mx")
    assert re.sub(r";color:color-mix\(in srgb,(#\w+|rgb\([0-9,]+\)) \d+%,currentColor\)", "", red) == (
        '<span style="color:#e75c58">red</span>, <span style="font-weight:bold;color:rgb(255,0,0)">bold</span> '
        '<span style="color:rgb(1,2,3)">x</span>'
    )


def test_text_keeps_its_background_and_stays_readable() -> None:
    assert to_html("\x1b[43;30mx") == '<span style="background:#ddb62b;color:#3e424d">x</span>'
    assert to_html("\x1b[43;92mx") == '<span style="background:#ddb62b;color:#000">x</span>'
    assert to_html("\x1b[44mx") == '<span style="background:#208ffb;color:#000">x</span>'
    assert to_html("\x1b[40mx") == '<span style="background:#3e424d;color:#fff">x</span>'


@pytest.mark.parametrize("page", PAGES)
def test_every_colour_can_be_read_on_every_page(page: str) -> None:
    text, behind = PAGES[page]
    for code in CODES:
        found = re.search(r"color-mix\(in srgb,(.*) (\d+)%,currentColor\)", to_html(f"\x1b[{code};2mx"))
        assert found is not None and "opacity" not in found.string
        share = int(found[2]) / 100
        seen = [share * new + (1 - share) * own for new, own in zip(rgb_of(found[1]), text, strict=True)]
        assert contrast_ratio(seen, list(behind)) > 4.45, code


def test_faint_text_can_be_read() -> None:
    assert to_html("\x1b[2mx") == '<span style="opacity:.8">x</span>'
