"""Find out what the threads of this rank do, and whether an interrupt may end it, from their stacks.

The control thread calls this, which answers while the main thread waits in C code.
"""

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

from ddip.protocol.location import Stack, StackLocation
from ddip.protocol.remote import call_target
from ddip.rank.runtime import stores
from ddip.rank.runtime.gpu import Gpu, gpu
from ddip.rank.runtime.housekeeping import attribute_of, cells
from ddip.rank.runtime.libraries import OURS, library_in

ON_GPU = "work on the GPU"
AT_PROMPT = "at a prompt"
AT_THE_END = "work on the GPU that the cell has begun"
OF_THE_ENGINE = ("/ipykernel/", "/zmq/")
"""Parts of file paths that identify threads of the engine."""
WAIT_FILES = {stores.__file__}
"""Files with functions that poll while they wait for other ranks; other modules that poll add theirs."""
OPERATOR_FILES = "/torch/_ops.py", "/torch/_library/autograd.py"
"""Ends of the files of the functions through which torch calls its operators."""
SWALLOWING = ("__del__", "_showwarnmsg")
"""Names of functions whose callers in C swallow exceptions."""
at_prompt = 0
"""Number of questions to the user that wait for an answer on this rank."""
F = TypeVar("F", bound=Callable[..., Any])
Line: TypeAlias = tuple[CodeType, int]
"""Running code and its line number."""


def _frames_of_thread(ident: int | None) -> list[FrameType]:
    """Return the frames of a thread, innermost first."""
    frame = sys._current_frames().get(ident or 0)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _cell_frames() -> list[FrameType]:
    """Return the main thread's frames of the cell or ddip request, innermost first.

    The innermost frames of ddip that poll a store or a collective are left out, because they change all the time.
    """
    frames = _frames_of_thread(threading.main_thread().ident)
    while frames and frames[0].f_code.co_filename in WAIT_FILES:
        frames.pop(0)
    outermost = max(
        (
            i
            for i, frame in enumerate(frames)
            if frame.f_code.co_name == "run_code" or frame.f_code == call_target.__code__
        ),
        default=0,
    )
    return frames[:outermost]


cell_files: dict[str, int] = {}
"""Numbers of cells by the file names in their code: the table of this rank's shell, in which every collective looks."""


def cell_number(code: CodeType) -> int | None:
    """Return the number of the cell that contains `code`; None if it is not a cell's."""
    return cell_files.get(code.co_filename)


script_files: dict[str, str] = {}
"""Names to show of the scripts that ``%diprun`` has run, by the file names in their code."""


def is_written_by_user(code: CodeType) -> bool:
    """Return whether `code` belongs to a cell, or to a script that ``%diprun`` has run."""
    return code.co_filename in cell_files or code.co_filename in script_files


_uninterruptible: set[CodeType] = set()
"""Functions of ddip that must not be interrupted."""
_run_user_code: set[CodeType] = {Gpu.finish.__code__}
"""Functions of ddip that run users' code."""
_around_cells: set[CodeType] = set()
"""Functions that make ddip's own calls before and after a cell."""


def never_interrupted(function: F) -> F:
    """Mark a function of ddip that runs below a cell's code and that an interrupt must not end."""
    _uninterruptible.add(function.__code__)
    return function


def calls_users_code(function: F) -> F:
    """Mark a function of ddip that runs users' code, such as an app's code around a cell."""
    _run_user_code.add(function.__code__)
    return function


def runs_around_cells(function: F) -> F:
    """Mark a function that makes ddip's own calls before or after a cell, which no interrupt may end."""
    _around_cells.add(function.__code__)
    return function


def may_interrupt(frame: FrameType | None) -> bool:
    """Return whether an interrupt may end the code at `frame`; None: no code runs.

    It may if the frame or one of its callers runs a cell's code or a request of the notebook. It must not in hooks of
    IPython, in finalizers, in Python's hook for errors of finalizers and while a warning is shown (``os.fork`` shows
    one since Python 3.12), which swallow exceptions, nor while a traceback is sent, which must stay complete.
    """
    while frame is not None:
        name = frame.f_code.co_name
        if name in SWALLOWING or frame.f_code in _uninterruptible:
            return False
        if name == "run_code" or frame.f_code in _run_user_code:
            return True
        if frame.f_code == call_target.__code__:
            return frame.f_back is None or frame.f_back.f_code not in _around_cells
        frame = frame.f_back
    return False


def main_thread_phase() -> str:
    """Return what the main thread does: ``code`` of a cell, ``ending`` a cell, or ``idle``.

    Imports of libraries, which delay interrupts (``libraries.py``), also count as ``ending``.
    """
    frames = _frames_of_thread(threading.main_thread().ident)
    if may_interrupt(frames[0]) and not library_in(frames[0]):
        return "code"
    waits = frames[0].f_code.co_filename == selectors.__file__
    return "idle" if waits and not cells.busy else "ending"


def _shown_name(code: CodeType) -> str:
    """Return the name of a function to show to users; "" if it means nothing to them.

    That is so for names that begin with an underscore, lambdas and modules, usual names of wrappers, and functions
    through which torch calls its operators. A constructor gets the name of its class.
    """
    name = code.co_name
    if code.co_filename.endswith(OPERATOR_FILES):
        return ""
    if name == "__init__":
        return code.co_qualname.removesuffix(".__init__").rpartition(".")[2]
    return "" if name.startswith(("_", "<")) or name in ("wrapper", "inner", "decorate_context") else name


def _locate_lines(lines: Sequence[Line]) -> StackLocation:
    """Return the location to report for a stack, given with the innermost line first."""
    user_index = next((i for i, (code, _) in enumerate(lines) if is_written_by_user(code)), None)
    store_index = max(
        (i for i, (code, _) in enumerate(lines[:user_index]) if code.co_filename == stores.__file__), default=-1
    )
    function = next(filter(None, (_shown_name(code) for code, _ in lines[store_index + 1 : user_index])), "")
    inner = ""
    if lines:
        code, number = lines[0]
        inner = f"{code.co_filename.rpartition('/')[2]}:{number} in {code.co_name}"
    if user_index is None:
        return StackLocation(function=function, inner=inner)
    code, number = lines[user_index]
    source = linecache.getline(code.co_filename, number).strip()
    script = script_files.get(code.co_filename, "")
    return StackLocation(function, cell_number(code), number, source, inner, script=script)


def place_of(error: BaseException) -> StackLocation:
    """Return the location where `error` was raised."""
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(attribute_of(error, "__traceback__"))]
    return _locate_lines(lines[::-1])


def place_of_line(code: CodeType, number: int) -> StackLocation:
    """Return the location of a line of a cell or script."""
    return _locate_lines([(code, number)])


def _locate_main_thread(frames: Sequence[FrameType]) -> StackLocation:
    if gpu.waits:
        return place_on_gpu()
    if cells.is_tidying_long:
        return _locate_cleanup()
    if not cells.busy:
        return StackLocation(state="idle")
    location = _locate_lines([(frame.f_code, frame.f_lineno) for frame in frames])
    if at_prompt and not location.line:  # the debugger of an error, whose frames have ended
        return StackLocation(inner=AT_PROMPT)
    return replace(location, function=AT_PROMPT) if at_prompt else location


def _locate_cleanup() -> StackLocation:
    """Return the location of the main thread in a cleanup after a cell."""
    frames = _frames_of_thread(threading.main_thread().ident)
    inner = _locate_lines([(frame.f_code, frame.f_lineno) for frame in frames[:1]]).inner
    return StackLocation(inner=f"releasing objects of its last cell, {inner}")


def place_on_gpu() -> StackLocation:
    """Return the location of GPU work after the cell's code has ended: the line of its last collective."""
    code, number = gpu.last
    return replace(place_of_line(code, number) if code else StackLocation(inner=AT_THE_END), function=ON_GPU)


def main_thread_location() -> dict[str, Any]:
    """Return the `StackLocation` of the main thread as a dict."""
    return asdict(_locate_main_thread(_cell_frames()))


def of_thread(ident: int) -> tuple[FrameType | None, StackLocation]:
    """Return the innermost frame and the location of the thread `ident`."""
    frames = _frames_of_thread(ident)
    return next(iter(frames), None), _locate_lines([(frame.f_code, frame.f_lineno) for frame in frames])


def running_cell() -> int | None:
    """Return the number of the cell that the main thread runs; None if it runs none, or the cell awaits."""
    frames = _cell_frames()
    return cell_number(frames[-1].f_code) if frames else None


def main_thread_pulse() -> tuple[int, float]:
    """Return a number that changes when the main thread moves, and the seconds for which it was active.

    Active time is CPU time plus waits for a core, because a rank that works gets little CPU time on a loaded machine.
    It is 0 on accelerators, because a waiting thread may spin there.
    """
    return main_thread_position(), time.process_time() + _core_wait_seconds() if gpu.device.type == "cpu" else 0.0


def main_thread_position() -> int:
    """Return a number that changes when the main thread moves."""
    return hash(tuple((frame.f_code, frame.f_lasti) for frame in _cell_frames()))


def _core_wait_seconds() -> float:
    """Return the seconds for which the main thread has waited for a core; 0 if Linux does not count them."""
    try:
        return int(Path("/proc/self/schedstat").read_bytes().split()[1]) / 1e9  # proc(5): ns on a core, ns ready, times
    except (OSError, IndexError):
        return 0.0


def whole_stack(collective: str) -> dict[str, Any]:
    """Return the `Stack` of this rank as a dict, with the pending `collective`, without engine threads."""
    frames = _cell_frames()
    location = replace(_locate_main_thread(frames), collective=collective)
    threads = {"main": _stack_text(frames) or str(location)}
    for thread in threading.enumerate():
        thread_frames = _frames_of_thread(thread.ident)
        is_engine = any(_is_of_engine(frame.f_code) for frame in thread_frames)
        if thread_frames and not is_engine and thread not in (threading.main_thread(), threading.current_thread()):
            name = thread.name
            while name in threads:
                name += "'"
            threads[name] = _stack_text(
                [frame for frame in thread_frames if frame.f_code.co_filename != threading.__file__]
            )
    return asdict(Stack(location, threads))


def _is_of_engine(code: CodeType) -> bool:
    """Return whether only threads of the engine run `code`.

    ipykernel 6.29 to 6.31 wrap ``Thread.run`` in a closure of their own.
    """
    return code.co_name != "run_closure" and any(part in code.co_filename for part in OF_THE_ENGINE)


def _stack_text(frames: list[FrameType]) -> str:
    """Return the stack as text in the format of a traceback, innermost frame last."""
    lines = []
    for frame in reversed(frames):
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename.startswith(OURS):
            continue  # wraps a function of torch
        (text,) = traceback.format_list(traceback.extract_stack(frame, limit=1))
        number = cell_number(frame.f_code)
        if number is not None:
            text = text.replace(f'File "{frame.f_code.co_filename}"', f"cell [{number}]")
        lines.append(text)
    return "".join(lines).rstrip()
