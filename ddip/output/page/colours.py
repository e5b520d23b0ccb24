"""Convert terminal colours to HTML that is readable on light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from ddip.output.terminal_text import ESCAPE, STYLE

Colour: TypeAlias = list[float]
"""Red, green and blue from 0 to 1."""
COLOURS = ["#3e424d", "#e75c58", "#00a250", "#ddb62b", "#208ffb", "#d160c4", "#60c6c8", "#c5c1b4"]
BRIGHT = ["#282c36", "#b22b31", "#007427", "#b27d12", "#0065ca", "#a03196", "#258f8f", "#a1a6b2"]
CONTRAST = 4.5
"""Minimum contrast ratio of text (WCAG 2.1, level AA)."""
PAGES: list[tuple[Colour, Colour]] = [
    ([0.13, 0.13, 0.13], [1.0, 1.0, 1.0]),
    ([0.13, 0.11, 0.11], [1.0, 0.867, 0.867]),
    ([1.0, 1.0, 1.0], [0.067, 0.067, 0.067]),
    ([1.0, 1.0, 1.0], [0.316, 0.122, 0.106]),
    ([0.231, 0.231, 0.231], [1.0, 1.0, 1.0]),
    ([0.231, 0.231, 0.231], [0.98, 0.892, 0.892]),
    ([0.8, 0.8, 0.8], [0.122, 0.122, 0.122]),
    ([0.8, 0.8, 0.8], [0.233, 0.146, 0.146]),
]
"""Colours of text and background of stdout and stderr, in the light and dark themes of JupyterLab and VS Code."""


def to_html(text: str) -> str:
    """Convert `text` with ANSI colours to HTML for a ``<pre>``."""
    parts: list[str] = []
    state: dict[str, str] = {}
    end = 0
    for found in STYLE.finditer(text):
        parts.append(_styled_span(text[end : found.start()], state))
        state = _state_after(state, found[1])
        end = found.end()
    parts.append(_styled_span(text[end:], state))
    return "".join(parts)


def _styled_span(text: str, state: dict[str, str]) -> str:
    text = html.escape(ESCAPE.sub("", text), quote=False)
    if not text or not state:
        return text
    return f'<span style="{_style_css(tuple(state.items()))}">{text}</span>'


@lru_cache(maxsize=1024)
def _style_css(state: tuple[tuple[str, str], ...]) -> str:
    """Return the CSS of `state`, with colours that are readable on every page."""
    style = dict(state)
    ground, colour = style.get("background"), style.get("color")
    if ground is not None:
        behind = _parse_rgb(ground)
        if colour is None or contrast_ratio(_parse_rgb(colour), behind) < CONTRAST:
            style["color"] = max("#000", "#fff", key=lambda ink: contrast_ratio(_parse_rgb(ink), behind))
    elif colour is not None:
        style["color"] = (
            f"{colour};color:color-mix(in srgb,{colour} {_readable_share(_parse_rgb(colour))}%,currentColor)"
        )
    if ground is not None or colour is not None:
        style.pop("opacity", None)  # the colour already shows the faint style
    return ";".join(f"{key}:{value}" for key, value in style.items())


def _readable_share(colour: Colour) -> int:
    """Return the highest percentage of `colour` in the text colour that is readable on all `PAGES`."""
    for share in range(100, 0, -5):
        if all(
            contrast_ratio(
                [share / 100 * new + (1 - share / 100) * old for new, old in zip(colour, text, strict=True)], page
            )
            >= CONTRAST
            for text, page in PAGES
        ):
            return share
    return 0


def _parse_rgb(colour: str) -> Colour:
    """Parse ``#rgb``, ``#rrggbb`` or ``rgb(r,g,b)``."""
    if colour.startswith("rgb"):
        return [min(255, int(part)) / 255 for part in colour[4:-1].split(",")]
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    return [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]


def contrast_ratio(first: Colour, second: Colour) -> float:
    """Return the contrast ratio of two colours, from 1 to 21, as WCAG 2.1 defines it."""
    dark, light = sorted((_relative_luminance(first), _relative_luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def _relative_luminance(colour: Colour) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


TURNS_ON = {
    1: ("font-weight", "bold"),
    2: ("opacity", ".8"),
    3: ("font-style", "italic"),
    4: ("text-decoration", "underline"),
}
"""CSS property and value that each ANSI code turns on."""
TURNS_OFF = {
    22: ("font-weight", "opacity"),
    23: ("font-style",),
    24: ("text-decoration",),
    39: ("color",),
    49: ("background",),
}
"""CSS properties that each ANSI code turns off."""


def _state_after(state: dict[str, str], codes: str) -> dict[str, str]:
    state = dict(state)
    numbers = iter([int(code or 0) for code in codes.split(";")])
    for number in numbers:
        if number == 0:
            state = {}
        elif number in TURNS_ON:
            key, value = TURNS_ON[number]
            state[key] = value
        elif number in TURNS_OFF:
            for key in TURNS_OFF[number]:
                state.pop(key, None)
        else:
            part, colour = _parse_colour(number, numbers)
            if colour:
                state[part] = colour
    return state


def _parse_colour(number: int, numbers: Iterator[int]) -> tuple[str, str]:
    """Return the CSS property and the colour of the ANSI code `number`, which may take more `numbers`.

    The colour is empty for an unknown code.
    """
    part = "color" if number // 10 in (3, 9) else "background"
    if number in (38, 48):
        return part, _extended_colour(numbers)
    colours = {3: COLOURS, 4: COLOURS, 9: BRIGHT, 10: BRIGHT}.get(number // 10, [])
    return part, colours[number % 10] if number % 10 < len(colours) else ""


def _extended_colour(numbers: Iterator[int]) -> str:
    """Parse an extended colour: an index of 256 colours, or red, green and blue."""
    kind = next(numbers, 0)
    if kind == 2:
        return "rgb({},{},{})".format(*(next(numbers, 0) for _ in range(3)))
    if kind != 5:
        return ""
    number = next(numbers, 0)
    if number < 16:
        return (COLOURS + BRIGHT)[number]
    if number < 232:
        steps = [0, 95, 135, 175, 215, 255]
        number -= 16
        return f"rgb({steps[number // 36]},{steps[number // 6 % 6]},{steps[number % 6]})"
    grey = 8 + 10 * (number - 232)
    return f"rgb({grey},{grey},{grey})"
