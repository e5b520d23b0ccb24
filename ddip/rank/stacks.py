"""Where the threads of this rank are; for the control thread, which answers while the main thread waits in C."""

from __future__ import annotations

import linecache
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import CodeType, FrameType
from typing import Any, TypeAlias

from IPython.core.getipython import get_ipython

from ddip.protocol.location import Stack, StackLocation
from ddip.protocol.remote import call
from ddip.rank import stores
from ddip.rank.gpu import Gpu, gpu
from ddip.rank.housekeeping import attribute_of, cells
from ddip.rank.libraries import library_in

ON_GPU = "work on the GPU"
AT_THE_END = "work on the GPU that the cell has begun"
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
    """Frames of the main thread, the innermost first, without those that run the cell, or what ddip has asked for.

    Nor those in which it waits in a store: they go on all the time.
    """
    frames = _frames(threading.main_thread().ident)
    while frames and frames[0].f_code.co_filename == stores.__file__:
        frames.pop(0)
    outermost = max(
        (i for i, frame in enumerate(frames) if frame.f_code.co_name == "run_code" or frame.f_code == call.__code__),
        default=0,
    )
    return frames[:outermost]


def cell_files() -> dict[str, int]:
    """Numbers of cells, by the names that their code has for its file."""
    shell = get_ipython()
    return getattr(shell.compile, "_filename_map", {}) if shell else {}


def cell_number(code: CodeType) -> int | None:
    """Number of the cell in which `code` was typed."""
    return cell_files().get(code.co_filename)


_UNTORN = {
    ("showtraceback", "ddip.rank.shell"),
    ("_interrupt_again", "ddip.rank.kernel"),
    ("_on_main_thread", "ddip.rank.profiling"),
    ("finish", "ddip.rank.profiling"),
}
"""Functions of ddip's, and their modules, that a cell's own code leads to and an interrupt must not end."""
_HOOK = "call_hook", "ddip.rank.apps"
"""What calls an app before a cell and after it."""


def is_users(frame: FrameType | None) -> bool:
    """Does a cell's own code run in `frame`, or what ddip was asked to do?

    Not in IPython's hooks, nor in Python's finalizers and its hook for what they raise, which let no exception through,
    nor while a traceback is told, which must not be torn.
    """
    while frame is not None:
        name = frame.f_code.co_name
        function = name, frame.f_globals.get("__name__")
        if name == "__del__" or function in _UNTORN:
            return False
        if name == "run_code" or function == _HOOK or frame.f_code is Gpu.finish.__code__:
            return True
        if frame.f_code == call.__code__:  # what a cell begins and ends with is none of the user's
            return frame.f_back is None or frame.f_back.f_code.co_name not in ("_begin_output", "of_the_cell")
        frame = frame.f_back
    return False


def phase() -> str:
    """What the main thread does: the ``code`` of a cell, is it ``ending`` one, or ``idle``?

    What an interrupt waits for (``libraries.py``) is on its way to its end, too.
    """
    frames = _frames(threading.main_thread().ident)
    if is_users(frames[0]) and not library_in(frames[0]):
        return "code"
    waits = frames[0].f_code.co_filename == selectors.__file__
    return "idle" if waits and not cells.busy else "ending"


def _name(code: CodeType) -> str:
    """Name of the function for people: of the class for a constructor; empty for what means nothing to them."""
    name = code.co_name
    if name == "__init__":
        return code.co_qualname.removesuffix(".__init__").rpartition(".")[2]
    return "" if name.startswith(("_", "<")) or name in ("wrapper", "inner", "decorate_context") else name


def _place(lines: Sequence[Line]) -> StackLocation:
    """Of a stack, the innermost line first."""
    mine = next((i for i, (code, _) in enumerate(lines) if cell_number(code) is not None), None)
    looks = max((i for i, (code, _) in enumerate(lines[:mine]) if code.co_filename == stores.__file__), default=-1)
    function = next(filter(None, (_name(code) for code, _ in lines[looks + 1 : mine])), "")
    inner = ""
    if lines:
        code, number = lines[0]
        inner = f"{code.co_filename.rpartition('/')[2]}:{number} in {code.co_name}"
    if mine is None:
        return StackLocation(function=function, inner=inner)
    code, number = lines[mine]
    source = linecache.getline(code.co_filename, number).strip()
    return StackLocation(function, cell_number(code), number, source, inner)


def place_of(error: BaseException) -> StackLocation:
    """Where `error` was raised."""
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(attribute_of(error, "__traceback__"))]
    return _place(lines[::-1])


def place_of_line(code: CodeType, number: int) -> StackLocation:
    """Of a line of a cell."""
    return _place([(code, number)])


def _here(frames: Sequence[FrameType]) -> StackLocation:
    if gpu.waits:
        return place_on_gpu()
    if cells.is_tidying_long:
        return _tidying()
    return _place([(frame.f_code, frame.f_lineno) for frame in frames]) if cells.busy else StackLocation(state="idle")


def _tidying() -> StackLocation:
    """Of what a rank does after a cell: the innermost line."""
    frames = _frames(threading.main_thread().ident)
    inner = _place([(frame.f_code, frame.f_lineno) for frame in frames[:1]]).inner
    return StackLocation(inner=f"taking apart what its last cell has left, {inner}")


def place_on_gpu() -> StackLocation:
    """Of the work that the GPU does, though the code of the cell has ended: the collective that was begun last."""
    code, number = gpu.last
    return replace(place_of_line(code, number) if code else StackLocation(inner=AT_THE_END), function=ON_GPU)


def here() -> dict[str, Any]:
    """The `StackLocation` of the main thread, as a dict."""
    return asdict(_here(_cell_frames()))


def of_thread(ident: int) -> tuple[FrameType | None, StackLocation]:
    """The innermost frame of a thread that runs beside the cells, and where it is."""
    frames = _frames(ident)
    return next(iter(frames), None), _place([(frame.f_code, frame.f_lineno) for frame in frames])


def running_cell() -> int | None:
    """Number of the cell that the main thread runs; None if it runs none, or that awaits something."""
    frames = _cell_frames()
    return cell_number(frames[-1].f_code) if frames else None


def pulse() -> tuple[int, float]:
    """A number that changes when the main thread moves, and the seconds of CPU time that count as movement.

    On an accelerator none does: a thread that waits for it may spin.
    """
    frames = _cell_frames()
    steps = hash(tuple((frame.f_code, frame.f_lasti) for frame in frames))
    return steps, time.process_time() if gpu.device.type == "cpu" else 0.0


def whole() -> dict[str, Any]:
    """The `Stack` of this rank, as a dict; threads that the engine itself has are left out."""
    frames = _cell_frames()
    place = replace(_here(frames), collective=call("pending.collective").get("ok", "") if cells.busy else "")
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
        number = cell_number(frame.f_code)
        if number is not None:
            text = text.replace(f'File "{frame.f_code.co_filename}"', f"cell [{number}]")
        lines.append(text)
    return "".join(lines).rstrip()
