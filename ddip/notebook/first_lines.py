"""Find the magic with which a cell begins; every decision about a cell's magic uses this.

IPython accepts a cell magic only at the very beginning of a cell. Users write a comment above it, or indent it.
"""

from __future__ import annotations

import re

DIP = re.compile(r"%%dip(?!\w)")
NO_CODE = re.compile(r"\s*(?:#.*)?\n?")
"""An empty line, or a line with only a comment."""


def skip_comments(text: str) -> str:
    """Return the cell from its first line of code on, without the indentation of that line."""
    lines = text.splitlines(keepends=True)
    while lines and NO_CODE.fullmatch(lines[0]):
        del lines[0]
    return "".join(lines).lstrip()


def begin_with_dip(lines: list[str]) -> list[str]:
    r"""Remove comments and empty lines above the ``%%dip`` of a cell, and its indentation.

    >>> begin_with_dip(["# train\n", " %%dip\n", "fit()\n"])
    ['%%dip\n', 'fit()\n']
    >>> begin_with_dip(["# not a magic\n", "fit()\n"])
    ['# not a magic\n', 'fit()\n']
    """
    cell = skip_comments("".join(lines))
    return cell.splitlines(keepends=True) if DIP.match(cell) else lines


def fill_empty_cell(lines: list[str]) -> list[str]:
    """Add an empty line to a ``%%dip`` that stands alone.

    IPython would refuse such a cell, although ``%%dip -a patches`` needs no code.
    """
    return [f"{lines[0].rstrip()}\n", "\n"] if len(lines) == 1 and DIP.match(lines[0]) else lines


fill_empty_cell.has_side_effects = True  # type: ignore[attr-defined]  # not used to find out whether input is complete
TRANSFORMERS = (begin_with_dip, fill_empty_cell)
"""The functions that IPython calls in turn for each cell while ddip is loaded."""
