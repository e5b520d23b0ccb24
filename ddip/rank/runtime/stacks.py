"""Where the threads of this rank are; for the control thread, which answers while the main thread waits in C."""

from __future__ import annotations

import linecache
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeVar

from IPython.core.getipython import get_ipython

from ddip.protocol.location import Stack, StackLocation
from ddip.protocol.remote import call
from ddip.rank.runtime import stores
from ddip.rank.runtime.gpu import Gpu, gpu
from ddip.rank.runtime.housekeeping import attribute_of, cells
from ddip.rank.runtime.libraries import OURS, library_in

ON_GPU = "work on the GPU"
AT_THE_END = "work on the GPU that the cell has begun"
OF_THE_ENGINE = ("/ipykernel/", "/zmq/")
"""Parts of the paths of files in which only the engine's own threads are."""
WAIT_FILES = {stores.__file__}
"""Files whose functions wait for other ranks again and again; such modules add their own."""
F = TypeVar("F", bound=Callable[..., Any])
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

    Nor the innermost ones of ddip in which it waits in a store, which go on all the time, or for a collective.
    """
    frames = _frames(threading.main_thread().ident)
    while frames and frames[0].f_code.co_filename in WAIT_FILES:
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


_whole: set[CodeType] = set()
_of_users: set[CodeType] = {Gpu.finish.__code__}


def never_interrupted(function: F) -> F:
    """Mark a function of ddip that a cell's own code leads to and that an interrupt must not end."""
    _whole.add(function.__code__)
    return function


def calls_users_code(function: F) -> F:
    """Mark a function of ddip below which a user's code runs, as an app's does before a cell and after it."""
    _of_users.add(function.__code__)
    return function


def is_users(frame: FrameType | None) -> bool:
    """Does a cell's own code run in `frame`, or what ddip was asked to do?

    Not in IPython's hooks, nor in Python's finalizers and its hook for what they raise, which let no exception through,
    nor while a traceback is told, which must not be torn.
    """
    while frame is not None:
        name = frame.f_code.co_name
        if name == "__del__" or frame.f_code in _whole:
            return False
        if name == "run_code" or frame.f_code in _of_users:
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
    """A number that changes when the main thread moves, and the seconds that count as movement.

    They are CPU time, and the time for which the main thread was ready to run and others had the cores: a rank that
    works has little CPU time on a loaded machine. On an accelerator neither counts: a thread that waits may spin.
    """
    frames = _cell_frames()
    steps = hash(tuple((frame.f_code, frame.f_lasti) for frame in frames))
    return steps, time.process_time() + _waited_for_core() if gpu.device.type == "cpu" else 0.0


def _waited_for_core() -> float:
    """Return the seconds for which the main thread was ready to run and did not; 0 where Linux does not count them."""
    try:
        return int(Path("/proc/self/schedstat").read_bytes().split()[1]) / 1e9  # proc(5): ns on a core, ns ready, times
    except (OSError, IndexError):
        return 0.0


def whole_stack(collective: str) -> dict[str, Any]:
    """Return the `Stack` of this rank as a dict, with the `collective` that it is in, without the engine's threads."""
    frames = _cell_frames()
    place = replace(_here(frames), collective=collective)
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
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename.startswith(OURS):
            continue  # around a function of torch's
        (text,) = traceback.format_list(traceback.extract_stack(frame, limit=1))
        number = cell_number(frame.f_code)
        if number is not None:
            text = text.replace(f'File "{frame.f_code.co_filename}"', f"cell [{number}]")
        lines.append(text)
    return "".join(lines).rstrip()
