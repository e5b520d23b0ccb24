"""IPython's debugger on a rank: its prompt appears in the notebook, and it stops only in users' code.

``breakpoint()``, ``pdb.set_trace()``, ``ipdb.set_trace()``, ``pdb.post_mortem()``, ``%debug`` and ``%pdb`` all create a
`RankDebugger`. It differs from IPython's in these points:

    output       its text travels with the next question, so that the notebook shows the dialogue in one place
    interrupts   the stop button ends the cell; IPython's debugger would swallow it, and Pdb's ``continue`` would handle
                 SIGINT from then on
    steps        each top-level statement of a cell is a module of its own, with IPython's code between two of them;
                 ``next`` goes from one to the other
    frames       a cell ends without a trace of the debugger: bdb leaves a reference to the last frame in the outermost
                 one, which never ends
"""

from __future__ import annotations

import bdb
import contextlib
import io
import linecache
import os
import pdb
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from IPython.core import debugger as ipython_debugger
from IPython.core.debugger import InterruptiblePdb
from IPython.core.error import UsageError

from ddip.rank.debugging import ide_service
from ddip.rank.debugging.questions import asker
from ddip.rank.process_group import membership
from ddip.rank.runtime import stacks, tracebacks

NO_DEBUGGER = (
    "no one can answer a debugger here (a notebook that runs without stdin); %dipstack shows where each rank is, and "
    "%dipull gets its variables"
)
COMPILED = (
    "ddip: torch.compile has compiled this function: only its arguments are visible, and n and s continue; call "
    'torch.compiler.set_stance("force_eager") before it, and it runs uncompiled, line by line'
)
COMPILED_NAMES = ("__resume_at_", "__compiled_fn_")
"""Beginnings of the names that torch.compile adds to the code of a function."""
ENGINE_MODULES = ("ddip.rank.", "IPython.core.", "ipykernel.", "traitlets.")
"""Beginnings of the names of modules in which the debugger does not stop."""
SERVICE_MODULES = ("ddip.rank.streams.", "ddip.rank.kernel.", "IPython.core.displayhook")
"""Beginnings of the names of modules that show output or run magics; the debugger does not stop in their callees."""
STATEMENT_LOOP = ("run_cell_async", "run_ast_nodes", "run_code", "_run_cell", "run_cell")
"""Functions of IPython that run the statements of a cell; what they call in between is not users' code. They run inside
a cell, too, for magics such as ``%%capture``."""


class RankDebugger(InterruptiblePdb):
    """IPython's debugger, whose prompt appears in the notebook."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("stdin", None), kwargs.pop("stdout", None)
        super().__init__(*args, **kwargs)
        asker.is_used = True
        self.prompt = "(Pdb) "
        self._text = io.StringIO()
        self.stdout = self._text  # set here, since Pdb reads from stdin if it is passed to the constructor
        self.nosigint = True  # else ``continue`` would replace the handler of SIGINT
        self._is_interrupted = False
        self._has_stopped = False
        self.is_post_mortem = False
        """True if it was opened at an error, so that the code does not go on after it."""

    def take_text(self) -> str:
        """Return the text that the debugger has written since the last call, with the names of cells."""
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        for file, number in stacks.cell_files.items():
            text = text.replace(file, f"cell [{number}]")
        return text

    def describe_place(self) -> str:
        """Return the function and the line of the selected frame, as in ``train() cell [12] line 7``."""
        frame = self.curframe
        if frame is None:
            return ""
        code, number = frame.f_code, stacks.cell_number(frame.f_code)
        line = frame.f_lineno
        with contextlib.suppress(AttributeError, IndexError):  # of a traceback, the frame has gone on since
            line = self.stack[self.curindex][1]
        where = f"{os.path.basename(code.co_filename)}:{line}" if number is None else f"cell [{number}] line {line}"
        return where if code.co_name.startswith("<") else f"{code.co_name}() {where}"

    def set_trace(self, frame: FrameType | None = None, **kwargs: Any) -> None:
        """Stop at the next line of `frame`, by default the caller's; raises UsageError if no one can answer."""
        ensure_answerable()
        frame = _skip_own_frames(frame or sys._getframe())
        if _is_compiled(frame):
            self.message(COMPILED)
            self.reset()
            sys.modules["torch"].compiler.disable(self.interaction)(frame, None)
        else:
            super().set_trace(frame, **kwargs)

    def setup(self, f: FrameType | None, tb: Any) -> None:
        """Select the frame to show first.

        For an error, it is the innermost one in a cell or script, even if a library raised it.
        """
        super().setup(f, tb)
        users = [n for n, (frame, _) in enumerate(self.stack) if stacks.is_written_by_user(frame.f_code)]
        if self.is_post_mortem and users:
            self.curindex = users[-1]
            self.curframe = self.stack[self.curindex][0]
            if hasattr(self, "curframe_locals"):  # before Python 3.13
                self.curframe_locals = self.curframe.f_locals

    def help_rank(self) -> None:
        """Explain the command of the notebook."""
        self.message("rank N\n        Go to the prompt of rank N, if it has stopped; rank alone prints the variable.")

    def help_ranks(self) -> None:
        """Explain the command of the notebook."""
        self.message("ranks\n        Show where each rank is: stopped, running, or in which collective it waits.")

    def help_all(self) -> None:
        """Explain the command of the notebook."""
        self.message("all COMMAND\n        Send COMMAND to all ranks that have stopped; c all continues all of them.")

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether to stop in `frame`: only in code that a cell has called."""
        return _is_users(frame) and super().stop_here(frame)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        """Stop at the call of a function, but not at the beginning of the next statement of a cell."""
        if frame.f_code.co_name != "<module>":
            super().user_call(frame, argument_list)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        """Stop at an exception in users' code; others are part of IPython's loop over statements."""
        if _is_users(frame):
            super().user_exception(frame, exc_info)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop at the end of a function, but not of a top-level statement of a cell.

        It stops there only if ``breakpoint()`` ends the cell, so that no other line follows.
        """
        if frame.f_code.co_name != "<module>" or (not self._has_stopped and _ends_cell(frame.f_code)):
            super().user_return(frame, return_value)

    def cmdloop(self, intro: Any = None) -> Any:
        """Ask for commands until one lets the code continue."""
        former = asker.enter(self)
        try:
            return super().cmdloop(intro)
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise
        finally:
            asker.leave(former)

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Ask for commands at `frame`, or where `traceback` ends; raises KeyboardInterrupt on a stop."""
        self._has_stopped = True
        super().interaction(frame, traceback)
        if self._is_interrupted:  # which IPython has swallowed
            raise KeyboardInterrupt
        text = self.take_text()  # of the commands of a breakpoint, for example
        if text.strip():
            sys.stdout.write(text)


CACHES = [value for kind in RankDebugger.__mro__ for value in vars(kind).values() if hasattr(value, "cache_clear")]
"""Methods of IPython's debugger with a cache, which keeps debuggers and frames alive (IPython 8)."""


def _is_users(frame: FrameType | None) -> bool:
    """Return whether a cell or script has called the code of `frame`, other than by showing output."""
    if frame is None or frame.f_globals.get("__name__", "").startswith(ENGINE_MODULES):
        return False
    while frame is not None and not stacks.is_written_by_user(frame.f_code):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(SERVICE_MODULES):
            return False
        if module == "IPython.core.interactiveshell" and frame.f_code.co_name in STATEMENT_LOOP:
            return False
        frame = frame.f_back
    return frame is not None


def _skip_own_frames(frame: FrameType | None) -> FrameType | None:
    """Return the first frame, from `frame` outwards, that is not of this module.

    There may be several of this module, since torch.compile splits functions.
    """
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    return frame


def _is_compiled(frame: FrameType | None) -> bool:
    """Return whether `frame` runs code that torch.compile has written."""
    return frame is not None and any(name.startswith(COMPILED_NAMES) for name in frame.f_code.co_names)


def _ends_cell(code: CodeType) -> bool:
    """Return whether `code`, a top-level statement of a cell, is the last one of the cell."""
    last = max((line for *_, line in code.co_lines() if line is not None), default=0)
    rest = [line.strip() for line in linecache.getlines(code.co_filename)[last:]]
    return all(not line or line.startswith("#") for line in rest)


def ensure_answerable() -> None:
    """Raise UsageError if no one can answer a debugger, or StdinNotImplementedError in a worker process."""
    asker.refuse_in_worker("a debugger")
    if not asker.can_ask:
        raise UsageError(NO_DEBUGGER)


def break_here(*_: Any, header: str | None = None, **__: Any) -> None:
    """Stop in the debugger at the caller's next line, or in the IDE that is attached; replaces ``breakpoint()``.

    Does nothing on ranks that the cell does not let stop, and if ``PYTHONBREAKPOINT`` is 0.
    """
    __tracebackhide__ = True  # IPython omits this frame
    asker.refuse_in_worker("breakpoint()")
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    if asker.break_on is not None and membership.standing.get("rank") not in asker.break_on:
        return
    if ide_service.stop_in_ide(_skip_own_frames(sys._getframe())):
        return
    ensure_answerable()
    debugger = RankDebugger()
    if header is not None:
        debugger.message(header)
    debugger.set_trace()


def debug_error(error: BaseException) -> None:
    """Open the debugger at the frame in which `error` was raised, and wait until the user leaves it.

    Does nothing if no line of the cell has run, as with bad syntax.
    """
    ensure_answerable()
    trace = tracebacks.without_ours(error.__traceback__)
    if trace is None:
        return
    debugger = RankDebugger()
    debugger.is_post_mortem = True
    debugger.reset()
    debugger.interaction(None, error.with_traceback(trace) if sys.version_info >= (3, 13) else trace)


def replace_debuggers() -> None:
    """Make ``breakpoint()`` and the debuggers of Python and IPython open a `RankDebugger`."""
    sys.breakpointhook = break_here
    pdb.Pdb = ipython_debugger.Pdb = RankDebugger  # type: ignore[misc]


def forget_debuggers() -> None:
    """Remove what debuggers have left when a cell ends; the next cell would stop in ddip's own code.

    bdb sets its trace function in all outer frames, and removes it from all but the outermost, which never ends; so
    does ``interact`` with the prompts in `sys`.
    """
    if not asker.is_used and not _is_debuggers(sys.gettrace()):
        return
    for frame in _outer_frames():
        if _is_debuggers(frame.f_trace):
            del frame.f_trace
    if _is_debuggers(sys.gettrace()):
        sys.settrace(None)
    last = getattr(pdb.Pdb, "_last_pdb_instance", None)
    if last is not None:  # since Python 3.14, which traces with sys.monitoring, too
        last.stop_trace()
        pdb.Pdb._last_pdb_instance = None  # type: ignore[attr-defined]
    for method in CACHES:
        method.cache_clear()
    for name in ("ps1", "ps2"):
        if hasattr(sys, name):
            delattr(sys, name)


def _outer_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_debuggers(trace: Any) -> bool:
    return isinstance(getattr(trace, "__self__", None), bdb.Bdb)
