"""Text with the colours of a terminal as HTML that can be read in light and in dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from ddip.output.terminal_text import ESCAPE, STYLE

Colour: TypeAlias = list[float]
"""Red, green and blue, from 0 to 1."""
COLOURS = ["#3e424d", "#e75c58", "#00a250", "#ddb62b", "#208ffb", "#d160c4", "#60c6c8", "#c5c1b4"]
BRIGHT = ["#282c36", "#b22b31", "#007427", "#b27d12", "#0065ca", "#a03196", "#258f8f", "#a1a6b2"]
CONTRAST = 4.5
"""Of text, at least (WCAG 2.1, level AA)."""
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
"""Text, and what is behind it, in the light and the dark theme of JupyterLab and of VS Code: of stdout and stderr."""


def to_html(text: str) -> str:
    """`text` with its colours, for a ``<pre>``."""
    parts: list[str] = []
    state: dict[str, str] = {}
    end = 0
    for found in STYLE.finditer(text):
        parts.append(_span(text[end : found.start()], state))
        state = _state_after(state, found[1])
        end = found.end()
    parts.append(_span(text[end:], state))
    return "".join(parts)


def _span(text: str, state: dict[str, str]) -> str:
    text = html.escape(ESCAPE.sub("", text), quote=False)
    if not text or not state:
        return text
    return f'<span style="{_css(tuple(state.items()))}">{text}</span>'


@lru_cache(maxsize=1024)
def _css(state: tuple[tuple[str, str], ...]) -> str:
    """The style of `state`, readable on every page."""
    style = dict(state)
    ground, colour = style.get("background"), style.get("color")
    if ground is not None:
        behind = _parts(ground)
        if colour is None or contrast(_parts(colour), behind) < CONTRAST:
            style["color"] = max("#000", "#fff", key=lambda other: contrast(_parts(other), behind))
    elif colour is not None:
        style["color"] = f"{colour};color:color-mix(in srgb,{colour} {_share(_parts(colour))}%,currentColor)"
    if ground is not None or colour is not None:
        style.pop("opacity", None)  # the colour is faint enough
    return ";".join(f"{key}:{value}" for key, value in style.items())


def _share(colour: Colour) -> int:
    """Per cent of `colour` in the text's own that can be read on each of `PAGES`."""
    for share in range(100, 0, -5):
        if all(
            contrast([share / 100 * new + (1 - share / 100) * own for new, own in zip(colour, text, strict=True)], page)
            >= CONTRAST
            for text, page in PAGES
        ):
            return share
    return 0


def _parts(colour: str) -> Colour:
    """Red, green and blue, from 0 to 1."""
    if colour.startswith("rgb"):
        return [min(255, int(part)) / 255 for part in colour[4:-1].split(",")]
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    return [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]


def contrast(one: Colour, other: Colour) -> float:
    """From 1 to 21, as the Web Content Accessibility Guidelines 2.1 define it."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Colour) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


ON = {
    1: ("font-weight", "bold"),
    2: ("opacity", ".8"),
    3: ("font-style", "italic"),
    4: ("text-decoration", "underline"),
}
"""What of a style each code turns on."""
OFF = {
    22: ("font-weight", "opacity"),
    23: ("font-style",),
    24: ("text-decoration",),
    39: ("color",),
    49: ("background",),
}
"""And off."""


def _state_after(state: dict[str, str], codes: str) -> dict[str, str]:
    state = dict(state)
    numbers = iter([int(code or 0) for code in codes.split(";")])
    for number in numbers:
        if number == 0:
            state = {}
        elif number in ON:
            key, value = ON[number]
            state[key] = value
        elif number in OFF:
            for key in OFF[number]:
                state.pop(key, None)
        else:
            part, colour = _colour(number, numbers)
            if colour:
                state[part] = colour
    return state


def _colour(number: int, numbers: Iterator[int]) -> tuple[str, str]:
    """What `number`, and those after it, colour, and how; no colour if it is none."""
    part = "color" if number // 10 in (3, 9) else "background"
    if number in (38, 48):
        return part, _extended(numbers)
    colours = {3: COLOURS, 4: COLOURS, 9: BRIGHT, 10: BRIGHT}.get(number // 10, [])
    return part, colours[number % 10] if number % 10 < len(colours) else ""


def _extended(numbers: Iterator[int]) -> str:
    """One of 256 colours, or three parts."""
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
