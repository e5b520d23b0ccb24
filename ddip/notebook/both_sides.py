"""Magics that run in the notebook and on the ranks, such as ``%cd``: find cells of these, and run them here."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from ddip.notebook.first_lines import NO_CODE

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

BOTH_SIDES = ("cd", "pushd", "popd", "dirs", "env", "set_env", "autoreload", "aimport")
"""A cell that contains only these, and extensions that ranks also need, runs in the notebook and on the ranks."""
EXTENSIONS = ("autoreload",)
"""Extensions to load on both sides; ``%load_ext ddip``, for example, must never run on a rank."""
NEUTRAL_MAGIC = "matplotlib"
"""Magic that such a cell may also contain: lessons begin with ``%reload_ext autoreload``, ``%autoreload 2`` and
``%matplotlib inline``."""
SOMETIMES = ("load_ext", "reload_ext", "config")
"""Magics that run on both sides only for `EXTENSIONS` and for the settings of IPython's shell."""
UNEXPANDED = re.compile(r"(?<!\$)\$([A-Za-z_]\w*)|(?<!\{)\{([A-Za-z_]\w*)\}(?!\})")
LINE = re.compile(r"%([A-Za-z_]\w*)[ \t]*(.*)")
LOAD_AUTORELOAD = "get_ipython().extension_manager.load_extension('autoreload')\n"
"""Prints nothing if autoreload is already loaded, unlike the magic."""


def magic_names(text: str) -> list[str]:
    """Return the names of the magics in a cell that belongs on both sides; empty for any other cell."""
    lines = [line for line in text.splitlines() if not NO_CODE.fullmatch(line)]
    found = [_magic_name(line) for line in lines]
    return found if all(found) and any(name != NEUTRAL_MAGIC for name in found) else []


def _magic_name(line: str) -> str:
    """Return the name of the magic in `line` if a cell for both sides may contain it, else ``""``."""
    found = LINE.match(line)
    if found is None:
        return ""
    name, argument = found.groups()
    loads = name in ("load_ext", "reload_ext") and argument.strip() in EXTENSIONS
    sets = name == "config" and argument.startswith("InteractiveShell.")
    return name if loads or sets or name in (*BOTH_SIDES, NEUTRAL_MAGIC) else ""


def for_ranks(cell: str) -> str:
    """Return the code to run on ranks; it loads autoreload, which the notebook may have loaded before."""
    names = {*magic_names(cell)}
    uses = {"autoreload", "aimport"} & names and not {"load_ext", "reload_ext"} & names
    return LOAD_AUTORELOAD + cell if uses else cell


def names_to_expand(line: str, namespace: Mapping[str, Any]) -> list[str]:
    """Return the names in ``$name`` and ``{name}`` that `namespace` lacks; IPython leaves these."""
    found = [one or other for one, other in UNEXPANDED.findall(line)]
    return [name for name in found if name not in namespace and name not in os.environ]


def run_here(shell: InteractiveShell, cell: str) -> tuple[ExecutionResult, tuple[str, str]]:
    """Run a cell for both sides in the notebook.

    Returns IPython's result, and the output: stdout with the value of the last line, and stderr.
    """
    with _copy_stream("stdout") as out, _copy_stream("stderr") as err:
        execution = shell.run_cell(cell)
    value = ""
    if execution.result is not None and shell.display_formatter is not None:
        value = shell.display_formatter.format(execution.result)[0].get("text/plain", "")
    return execution, (out.getvalue() + value, err.getvalue())


@contextlib.contextmanager
def _copy_stream(name: str) -> Iterator[io.StringIO]:
    """Copy text written to ``sys.<name>`` within the context."""
    stream, copy = getattr(sys, name), io.StringIO()
    if stream is not None:  # None if it was closed when Python started
        setattr(sys, name, _CopyingStream(stream, copy))
    try:
        yield copy
    finally:
        setattr(sys, name, stream)


class _CopyingStream(io.TextIOBase):
    """A stream that copies all text that is written to another stream."""

    def __init__(self, stream: TextIO, copy: io.StringIO) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
