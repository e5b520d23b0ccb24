"""Code blocks of the README and of the pages in docs/, as a reader pastes them.

The language of a fence says how the block is used::

    python   is a cell, and is run; the text block that follows it is its output, where `...` stands for anything
    sh       is for a terminal, and is not run
    text, toml, yaml, and the directives of Sphinx, such as {toctree}, are not code

A comment on the line above a fence adds to that::

    <!-- raises: CellError -->    the cell fails with this exception
    <!-- types: p x | c -->       these lines are typed at the prompts of the cell; `nothing`: it has stdin
    <!-- file: train.py -->       the block is that file, in the folder of the notebook
    <!-- terminal -->             the block is run by a shell in that folder
    <!-- data: fastai -->         the page needs fastai's small data sets, and is run by ``make test-system``
    <!-- needs: hf -->           the page needs this extra, and is run by ``make test-system``
    <!-- not run: REASON -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [ROOT / f"{name}.md" for name in ("Issues", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^(`{3,})(.*)$")
COMMENT = re.compile(r"^<!-- ([a-z ]+?)(?:: (.*))? -->$")
MARKS = {"raises", "types", "file", "terminal", "data", "needs", "not run"}


@dataclass
class Block:
    """One fenced block of a page."""

    line: int
    """Line number of the fence, from 1."""
    language: str
    marks: dict[str, str]
    text: str = ""
    is_shown: bool = False
    """True if no text stands between this block and the one before it."""
    shows: str = ""
    """Expected output; empty if the page does not state it."""

    @property
    def is_cell(self) -> bool:
        """Return True if the block runs in the notebook."""
        return self.language == "python" and not {"file", "not run"} & set(self.marks)


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of `page`, in order."""
    blocks: list[Block] = []
    fence, above, text_between = "", "", False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        found = FENCE.match(line)
        if fence:  # inside a block
            if found and found[1] == fence and not found[2]:
                fence, text_between = "", False
            else:
                blocks[-1].text += line + "\n"
        elif found:
            fence, language = found[1], found[2].strip()
            mark = COMMENT.match(above)
            blocks.append(Block(number, language, {mark[1]: mark[2] or ""} if mark else {}))
            blocks[-1].is_shown = language == "text" and not text_between
        elif line.strip() and not COMMENT.match(line):
            text_between = True
        above = line
    for block, following in zip(blocks, blocks[1:], strict=False):
        if following.is_shown and (block.is_cell or "terminal" in block.marks):
            block.shows = following.text
    return blocks


def pattern_of(text: str) -> re.Pattern[str]:
    """Return a pattern for the output that a page states.

    `...` matches anything within its line, or any lines if it stands alone.
    """
    lines = []
    for line in text.strip().splitlines():
        wildcard = r"(?s:.*?)" if line.strip() == "..." else r".*?"
        lines.append(wildcard.join(re.escape(part) for part in line.rstrip().split("...")))
    return re.compile(r"[ ]*\n".join(lines))
