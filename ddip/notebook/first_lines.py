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
    r"""Remove what is above the ``%%dip`` of a cell, if that is only comments; IPython calls this for each cell.

    A cell without more lines gets an empty one, as IPython would refuse it: ``%%dip -a mends`` needs no code.

    >>> begin_with_dip(["# train\n", " %%dip\n", "fit()\n"])
    ['%%dip\n', 'fit()\n']
    >>> begin_with_dip(["# not a magic\n", "fit()\n"])
    ['# not a magic\n', 'fit()\n']
    """
    cell = skip_comments("".join(lines))
    if not DIP.match(cell):
        return lines
    found = cell.splitlines(keepends=True)
    return found if len(found) > 1 else [f"{cell.rstrip()}\n", "\n"]
