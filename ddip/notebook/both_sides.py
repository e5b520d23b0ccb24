"""Magics that belong in the notebook and on the ranks, such as ``%cd``: which cells are of these alone, and the
notebook's half of such a cell."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

BOTH = ("cd", "env", "set_env", "autoreload", "aimport")
"""Cells of these alone, and of an extension that ranks need as well, run in the notebook and on the ranks."""
EXTENSIONS = ("autoreload",)
"""Others are the notebook's: ``%load_ext ddip`` must never reach a rank."""
BESIDE = "matplotlib"
"""May stand among them: lessons begin with ``%reload_ext autoreload``, ``%autoreload 2``, ``%matplotlib inline``."""
LINE = re.compile(r"%([A-Za-z_]\w*)[ \t]*(.*)")
LOAD = "get_ipython().extension_manager.load_extension('autoreload')\n"
"""Says nothing where it is loaded, as the magic would."""


def names(text: str) -> list[str]:
    """Of the magics of a cell that has nothing else, and belongs on both sides; else empty."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = [_name(line) for line in lines]
    return found if all(found) and any(name != BESIDE for name in found) else []


def _name(line: str) -> str:
    """Of the magic, if it belongs on both sides, or may be beside one that does."""
    found = LINE.match(line)
    if found is None:
        return ""
    name, argument = found.groups()
    loads = name in ("load_ext", "reload_ext") and argument.strip() in EXTENSIONS
    return name if loads or name in (*BOTH, BESIDE) else ""


def for_ranks(cell: str) -> str:
    """What runs there: the notebook may have loaded autoreload before there were ranks."""
    return LOAD + cell if {"autoreload", "aimport"}.intersection(names(cell)) else cell


def run_here(shell: InteractiveShell, cell: str) -> tuple[bool, tuple[str, str]]:
    """Run such a cell in the notebook.

    Returns whether it went well, and what it has shown: stdout with the value of its last line, and stderr.
    """
    with _copied("stdout") as out, _copied("stderr") as err:
        ran = shell.run_cell(cell)
    value = ""
    if ran.result is not None and shell.display_formatter is not None:
        value = shell.display_formatter.format(ran.result)[0].get("text/plain", "")
    return ran.success, (out.getvalue() + value, err.getvalue())


@contextlib.contextmanager
def _copied(name: str) -> Iterator[io.StringIO]:
    """Copy what is written to this stream meanwhile."""
    stream, copy = getattr(sys, name), io.StringIO()
    if stream is not None:  # it was closed when Python started: what is printed goes nowhere
        setattr(sys, name, _Copying(stream, copy))
    try:
        yield copy
    finally:
        setattr(sys, name, stream)


class _Copying(io.TextIOBase):
    def __init__(self, stream: TextIO, copy: io.StringIO) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
