"""Split the line of ``%diprun`` into its own options and the words of the script, as a shell does."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator
from typing import Any

from ddip.errors import BadInput
from ddip.group.cells.script_file import MAGIC
from ddip.notebook.arguments import COMMENT, DASHES

WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""", re.DOTALL)
QUOTED = re.compile(r"""['"\\]""")
OF_TORCHRUN = re.compile(r"--?(?:nproc|nnodes|node|rdzv|master|max|standalone|start|role|monitor|local)[-_\w]*(?:=.*)?")
"""Options of torchrun, which are settings of the group."""


def split_line(line: str, parser: Any) -> tuple[str, list[str]]:
    """Return the options of ``%diprun`` as typed in `line`, and the script with its arguments.

    With ``-m``, the first of these words is the name of the module. A word without quotes may contain ``~`` and
    wildcards, which are expanded from the notebook's folder. Raises BadInput for options of torchrun, typographic
    dashes, line breaks, and a quote that is not closed.
    """
    line = COMMENT.sub("", line).strip().removesuffix(";")
    words = [found[0] for found in WORD.finditer(line)]
    if "".join(words) != "".join(line.split()) and WORD.sub("", line).strip():
        raise BadInput(f"{MAGIC} {line}: a quote is not closed; type it on both sides of the text, or leave it out")
    takes_value = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    begin = 0
    while begin < len(words) and words[begin].startswith("-"):
        option = words[begin]
        if OF_TORCHRUN.fullmatch(option):
            raise BadInput(f"{MAGIC} {option}: the group's ranks run the script, so leave it out; %makedip sets them")
        begin += 1 + (option in takes_value)
    if begin < len(words) and DASHES.match(words[begin]):
        hyphens = "-" if len(words[begin]) == 2 else "--"
        raise BadInput(f"{MAGIC} {words[begin]}: type {MAGIC} {DASHES.sub(hyphens, words[begin], count=1)}")
    script = [word for typed in words[begin:] for word in _expand_word(typed)]
    if any("\n" in word for word in script):
        raise BadInput(f"{MAGIC} {line}: an argument has several lines; write them to a file, and pass its path")
    return " ".join(words[:begin]), script


def _expand_word(typed: str) -> Iterator[str]:
    """Yield the words that a shell makes of `typed`: it removes quotes, or expands ``~`` and wildcards."""
    if QUOTED.search(typed):
        yield from shlex.split(typed)
    else:
        path = os.path.expanduser(typed)
        yield from sorted(glob.glob(path)) or [path]
