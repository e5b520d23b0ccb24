"""Where the main thread of a rank is, when its interpreter is held by C code and no thread of it can answer.

A signal makes Python's ``faulthandler`` write the stack to a file, from C and without the interpreter; the notebook, on
the same host, reads it there.
"""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path

from ddip.protocol.location import StackLocation

SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""One that nobody has a use for: programs and debuggers take SIGUSR1 and SIGUSR2. None on systems without such."""
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def listen(folder: Path, pid: int) -> None:
    """Write the stack of this process, `pid`, to a file in `folder` whenever SIGNAL comes."""
    if SIGNAL is not None:
        faulthandler.register(SIGNAL, file=file_of(folder, pid).open("w"), all_threads=False)


def file_of(folder: Path, pid: int) -> Path:
    """Where the stacks of `pid` are written."""
    return folder / f"stack-{pid}"


def place_in(text: str) -> StackLocation:
    """The place that the last stack in `text` shows; cells are told by ipykernel's names of their files."""
    frames = [match.groupdict() for match in map(FRAME.fullmatch, text.rpartition("\n\n")[2].splitlines()) if match]
    if not frames:
        return StackLocation(inner="somewhere", state="gil_held")
    mine = next((frame for frame in frames if "/ipykernel_" in frame["file"]), None)
    function = frames[0]["function"]
    file = frames[0]["file"].rpartition("/")[2]
    inner = f"{file}:{frames[0]['line']} in {function}" if mine is None else f"line {mine['line']} of the cell"
    return StackLocation("" if function == "<module>" else function, inner=inner, state="gil_held")
