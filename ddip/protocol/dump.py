"""Find out where a rank's main thread is while C code holds the interpreter, so that no Python thread can answer.

A signal makes Python's ``faulthandler`` write the stack to a file, from C and without the interpreter. The notebook
reads the file if it runs on the same host.
"""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path

from ddip.protocol.location import StackLocation

SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""A real-time signal: programs and debuggers use SIGUSR1 and SIGUSR2. None on systems without real-time signals."""
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def register_handler(folder: Path, pid: int) -> None:
    """Register a handler that writes the main thread's stack to a file in `folder` on each SIGNAL.

    `pid` is this process; the file is `file_of` it.
    """
    if SIGNAL is not None:
        faulthandler.register(SIGNAL, file=file_of(folder, pid).open("w"), all_threads=False)


def file_of(folder: Path, pid: int) -> Path:
    """Return the path of the file to which the process `pid` writes its stacks."""
    return folder / f"stack-{pid}"


def place_in(text: str) -> StackLocation:
    """Return the location that the last stack in `text` shows.

    A frame belongs to a cell if its file name is one that ipykernel makes for cells.
    """
    frames = [match.groupdict() for match in map(FRAME.fullmatch, text.rpartition("\n\n")[2].splitlines()) if match]
    if not frames:
        return StackLocation(inner="somewhere", state="gil_held")
    cell_frame = next((frame for frame in frames if "/ipykernel_" in frame["file"]), None)
    function = frames[0]["function"]
    file = frames[0]["file"].rpartition("/")[2]
    inner = f"{file}:{frames[0]['line']} in {function}"
    if cell_frame is not None:
        inner = f"line {cell_frame['line']} of the cell"
    return StackLocation("" if function == "<module>" else function, inner=inner, state="gil_held")
