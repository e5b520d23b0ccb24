"""Where the threads of this rank are; for the control thread, which answers while the main thread waits in C."""

from __future__ import annotations

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from types import CodeType, FrameType
from typing import Any, TypeAlias

from IPython.core.getipython import get_ipython

from ddip.rank.housekeeping import cells
from ddip.rank.place import Place, Stack

OF_THE_ENGINE = ("/ipykernel/", "/zmq/")
"""Parts of the paths of files in which only the engine's own threads are."""
Line: TypeAlias = tuple[CodeType, int]
"""Code that is running, and the number of its line."""


def _frames(ident: int | None) -> list[FrameType]:
    """Frames of a thread, the innermost first."""
    frame = sys._current_frames().get(ident or 0)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _cell_frames() -> list[FrameType]:
    """Frames of the main thread, the innermost first, without those of IPython that run the cell."""
    frames = _frames(threading.main_thread().ident)
    outermost = max((i for i, frame in enumerate(frames) if frame.f_code.co_name == "run_code"), default=0)
    return frames[:outermost]


def _cell_number(code: CodeType) -> int | None:
    """Number of the cell in which `code` was typed."""
    shell = get_ipython()
    names: dict[str, int] = getattr(shell.compile, "_filename_map", {}) if shell else {}
    return names.get(code.co_filename)


def _name(code: CodeType) -> str:
    """Name of the function for people: of the class for a constructor; empty for what means nothing to them."""
    name = code.co_name
    if name == "__init__":  # Python 3.10 does not know the class
        return str(getattr(code, "co_qualname", "")).removesuffix(".__init__").rpartition(".")[2]
    return "" if name.startswith(("_", "<")) or name in ("wrapper", "inner", "decorate_context") else name


def _place(lines: Sequence[Line]) -> Place:
    """Of a stack, the innermost line first."""
    mine = next((i for i, (code, _) in enumerate(lines) if _cell_number(code) is not None), None)
    function = next(filter(None, (_name(code) for code, _ in lines[:mine])), "")
    inner = ""
    if lines:
        code, number = lines[0]
        inner = f"{code.co_filename.rpartition('/')[2]}:{number} in {code.co_name}"
    if mine is None:
        return Place(function=function, inner=inner)
    code, number = lines[mine]
    source = linecache.getline(code.co_filename, number).strip()
    return Place(function, _cell_number(code), number, source, inner)


def place_of(error: BaseException) -> Place:
    """Where `error` was raised."""
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    return _place(lines[::-1])


def _here(frames: Sequence[FrameType]) -> Place:
    return _place([(frame.f_code, frame.f_lineno) for frame in frames]) if cells.busy else Place(state="idle")


def here() -> dict[str, Any]:
    """The `Place` of the main thread, as a dict."""
    return asdict(_here(_cell_frames()))


def pulse() -> tuple[int, float]:
    """A number that changes when the main thread moves, and the seconds of CPU time that count as movement.

    On an accelerator none does: a thread that waits for it may spin.
    """
    frames = _cell_frames()
    steps = hash(tuple((frame.f_code, frame.f_lasti) for frame in frames))
    return steps, time.process_time() if cells.device.type == "cpu" else 0.0


def whole() -> dict[str, Any]:
    """The `Stack` of this rank, as a dict; threads that the engine itself has are left out."""
    frames = _cell_frames()
    place = _here(frames)
    threads = {"main": _text(frames) or str(place)}
    for thread in threading.enumerate():
        others = _frames(thread.ident)
        engine = any(part in frame.f_code.co_filename for part in OF_THE_ENGINE for frame in others)
        if others and not engine and thread not in (threading.main_thread(), threading.current_thread()):
            name = thread.name
            while name in threads:
                name += "'"
            threads[name] = _text([frame for frame in others if frame.f_code.co_filename != threading.__file__])
    return asdict(Stack(place, threads))


def _text(frames: list[FrameType]) -> str:
    """The stack, the innermost last, as in a traceback."""
    lines = []
    for frame in reversed(frames):
        (text,) = traceback.format_list(traceback.extract_stack(frame, limit=1))
        number = _cell_number(frame.f_code)
        if number is not None:
            text = text.replace(f'File "{frame.f_code.co_filename}"', f"cell [{number}]")
        lines.append(text)
    return "".join(lines).rstrip()
