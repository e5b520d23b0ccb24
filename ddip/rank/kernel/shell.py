"""The IPython shell of a rank: it formats errors in bounded time and loses none of them in a magic.

The caller of ``showtraceback`` decides what happens to the error:

    the cell's own code raised it         it is the cell's error
    a magic caught it (%%capture, %run)   it is raised again when the magic returns: otherwise the cell would continue
                                          as if it had succeeded, and the other ranks would wait for this one
    the cell's own code caught it         it is shown and reported to the notebook, since others may wait for this rank
    a value could not be displayed        it is shown
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Literal, NoReturn, TypeAlias

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.error import UsageError
from traitlets import Type

from ddip.protocol.old_versions import keep_cell_numbers
from ddip.rank.debugging import rank_debugger
from ddip.rank.debugging.questions import asker
from ddip.rank.kernel import refusals
from ddip.rank.process_group import membership
from ddip.rank.runtime import c10d, stacks, tracebacks
from ddip.rank.runtime.housekeeping import attribute_of, cells
from ddip.rank.runtime.tracebacks import ErrorText
from ddip.rank.streams.streams import RankDisplay

INTERRUPTS = ("KeyboardInterrupt", "CancelledError")
"""Names of the exceptions that a stop raises; they are formatted without IPython's traceback."""
NOTHING_TO_DEBUG = (
    "the last cell has left no error to debug on this rank; %pdb on in a %%dip cell opens the debugger at an error, "
    "and %config DipMagics.keep_frames = True keeps errors for %dipdebug"
)
NO_FRAMES = "the last cell has ended with {name} before its first line, so there are no frames to debug"
ShownBy: TypeAlias = Literal["cell", "magic", "caught", "display"]


tracebacks.HIDDEN.add(__name__)


def _find_origin(frame: FrameType | None) -> ShownBy:
    """Find out why ``showtraceback`` was called; `frame` is its caller."""
    if frame is not None and frame.f_code.co_name == "run_code":  # the cell that it runs has raised, not its callers
        frame = frame.f_back
    while frame is not None:
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module in ("IPython.core.formatters", "IPython.core.events"):
            return "display"
        if module == "IPython.core.interactiveshell":
            if name in ("run_cell_magic", "run_line_magic"):
                return "magic"
            if name == "run_code":
                return "caught"
        frame = frame.f_back
    return "cell"


def _is_consequence(error: BaseException) -> bool:
    """Return whether `error` follows from a stop or from the error of another rank."""
    return type(error).__name__ in INTERRUPTS or c10d.is_broken_connection(error) or membership.is_released(error)


class RankShell(ZMQInteractiveShell):  # type: ignore[misc]
    """The IPython shell that runs the cells of a rank."""

    display_pub_class = Type(RankDisplay)
    is_rank = True
    """Marker by which ddip recognizes that it is loaded on a rank."""
    _kept_modules = 0
    """Number of modules that were imported before the first cell."""
    raised_at = 0.0
    """Time at which the cell raised, on ``time.time``: formatting its traceback takes longer on some ranks."""
    raised: BaseException | None = None
    """The exception that the cell raised."""
    caught: ErrorText | None = None
    """The last exception that the cell's own code caught and showed."""
    _last_formatted: tuple[BaseException, ErrorText] | None = None
    """The exception that was formatted last, with its text."""
    _caught_by_magic: BaseException | None = None
    """The exception that the running magic has caught."""

    def init_instance_attrs(self) -> None:
        """Create the shell's attributes; its compiler keeps the cells' numbers, also in an old IPython."""
        super().init_instance_attrs()
        keep_cell_numbers(self.compile)
        stacks.cell_files = getattr(self.compile, "_filename_map", stacks.cell_files)

    @property
    def debugger_cls(self) -> type[rank_debugger.RankDebugger]:
        """The debugger's class, which ipdb and ``%debug CODE`` use."""
        return rank_debugger.RankDebugger

    def debugger(self, force: bool = False) -> None:
        """Open the debugger at the error of the last cell; the magics ``%debug`` and ``%pdb`` call this.

        Raises UsageError if the last cell has not failed on this rank or its frames were not kept.
        """
        if not force and not self.call_pdb:
            return
        if cells.kept_error is None:
            raise UsageError(NOTHING_TO_DEBUG)
        if tracebacks.without_ours(cells.kept_error.__traceback__) is None:
            raise UsageError(NO_FRAMES.format(name=type(cells.kept_error).__name__))
        rank_debugger.debug_error(cells.kept_error)

    def _update_code_co_name(self, code: CodeType) -> CodeType:
        """Keep the name ``<module>`` of a cell's code, by which ddip finds it; IPython 7 would change it."""
        return code

    def init_prompts(self) -> None:
        """Leave ``sys.ps1`` unset, since libraries that see it assume an interactive session."""

    def init_magics(self) -> None:
        """Register IPython's magics and those of `refusals`, and turn off automagic.

        On a new rank, which lacks variables, automagic would run ``%hist`` for the variable ``hist`` of the others.
        """
        super().init_magics()
        self.magics_manager.auto_magic = False
        refusals.install_refusals(self)
        rank_debugger.replace_debuggers()

    def init_sys_modules(self) -> None:
        """Silence IPython's warning that ``sys.exit()`` should be ``exit``."""
        super().init_sys_modules()
        warnings.filterwarnings("ignore", "To exit: use 'exit'", UserWarning)

    def ask_exit(self) -> NoReturn:
        """End the cell, but not the rank, when it calls ``exit`` or ``quit``, as ``sys.exit()`` does."""
        raise SystemExit

    @property
    def _sys_modules_keys(self) -> set[str]:
        """The names of modules that ``%reset --aggressive`` keeps.

        These are the modules imported before the first cell, and all of ddip: a second copy of one would not know what
        the first has recorded.
        """
        of_ddip = {name for name in sys.modules if name.partition(".")[0] == "ddip"}
        return of_ddip.union(itertools.islice(sys.modules, self._kept_modules))

    @_sys_modules_keys.setter
    def _sys_modules_keys(self, names: set[str]) -> None:
        self._kept_modules = len(sys.modules)

    def begin_cell(self) -> None:
        """Drop the errors of the last cell, and the outputs that IPython keeps for ``%notebook``."""
        self.raised_at = 0.0
        self.raised = self.caught = self._last_formatted = self._caught_by_magic = None
        for record in ("outputs", "exceptions"):  # exists since IPython 9
            getattr(self.history_manager, record, {}).clear()

    def forget(self) -> None:
        """Drop the errors of the last cell and the sources that were parsed for their tracebacks."""
        self.begin_cell()
        tracebacks.forget_sources()

    def find_formatted(self, error: BaseException | None) -> ErrorText | None:
        """Return the text of `error` if that was formatted last; for None, return the last text in any case."""
        last = self._last_formatted
        return last[1] if last and (error is None or error is last[0]) else None

    @functools.wraps(ZMQInteractiveShell.run_cell_async)  # ipykernel inspects the parameters
    async def run_cell_async(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run a cell and record its error in `raised`.

        If ``str(error)`` is too long or does not return, the result gets an exception with the shortened text instead:
        ipykernel would call ``str`` on it again.
        """
        result = await super().run_cell_async(*args, **kwargs)
        self.raised = None  # an error of a nested cell, which ended before this one
        for name in ("error_before_exec", "error_in_exec"):
            error = getattr(result, name)
            if error is not None:
                self.raised = error
                text = self.find_formatted(error)
                if text is not None and not text.whole:
                    setattr(result, name, type(text.name, (Exception,), {})(text.message))
        return result

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """Run a cell magic, then raise the error that it caught, if any."""
        with self._reraising_magic_errors():
            return super().run_cell_magic(magic_name, line, cell)

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        """Run a line magic, then raise the error that it caught, if any."""
        with self._reraising_magic_errors():  # a magic may read its caller's variables, which are one frame further up
            return super().run_line_magic(magic_name, line, _stack_depth + 1)

    @contextlib.contextmanager
    def _reraising_magic_errors(self) -> Iterator[None]:
        outer, self._caught_by_magic = self._caught_by_magic, None
        try:
            yield
        finally:
            caught, self._caught_by_magic = self._caught_by_magic, outer
        if caught is not None:
            raise caught

    @stacks.never_interrupted
    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """Format an exception, by default the current one, and show or keep it depending on the caller.

        The module's docstring has the cases.
        """
        self.raised_at = self.raised_at or time.time()
        error = (exc_tuple or sys.exc_info())[1]
        if error is None or type(error) is UsageError:  # shown without a traceback
            super().showtraceback(exc_tuple, filename, tb_offset, exception_only, running_compiled_code)
            return
        text = self.find_formatted(error)
        if text is None:
            text = self._format_error(error, tb_offset, exception_only, running_compiled_code)
            self._last_formatted = error, text
        origin = _find_origin(sys._getframe(1))
        if origin == "magic":
            self._caught_by_magic = error
            return
        if origin == "caught":
            self.caught = text
        if origin == "cell" or (origin == "display" and getattr(self.displayhook, "msg", None) is not None):
            self.kernel.restore_streams()  # `_showtraceback` flushes them first
            self._showtraceback(type(error), text.message, text.traceback)
            if origin == "cell" and self.call_pdb and asker.can_ask and not _is_consequence(error):
                rank_debugger.debug_error(error)
        else:
            with contextlib.suppress(Exception):  # the cell may have replaced stderr with a stream that fails
                print(*text.traceback, sep="\n", file=sys.stderr)

    def showsyntaxerror(self, filename: str | None = None, running_compiled_code: bool = False) -> None:
        """Show the current error of a cell that cannot be parsed, by way of `showtraceback`."""
        self.showtraceback(filename=filename, running_compiled_code=running_compiled_code)

    def _format_error(
        self, error: BaseException, tb_offset: int | None, exception_only: bool, compiled: bool
    ) -> ErrorText:
        if membership.is_released(error):
            return ErrorText(type(error).__name__, str(error), [])
        if _is_consequence(error):  # often raised on all ranks, and all but the first are dropped
            return tracebacks.format_error(error, None)
        return tracebacks.format_error(
            error, lambda: self._ipython_traceback(error, tb_offset, exception_only, compiled)
        )

    def _ipython_traceback(
        self, error: BaseException, tb_offset: int | None, exception_only: bool, compiled: bool
    ) -> list[str]:
        """Return the lines of IPython's traceback of `error`."""
        render = attribute_of(error, "_render_traceback_")
        if render is not None:
            return list(render())
        kind, trace = type(error), tracebacks.without_ours(attribute_of(error, "__traceback__"))
        if isinstance(error, SyntaxError):
            frames: Any = traceback.extract_tb(trace) if compiled else []
            return list(self.SyntaxTB.structured_traceback(kind, error, frames))
        if exception_only:
            return list(self.InteractiveTB.get_exception_only(kind, error))
        offset = tb_offset or 0  # for None, IPython 7 would drop a frame
        return list(self.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=offset))

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the entry for IPython 9's session history, reusing the traceback that was formatted last."""
        text = self.find_formatted(exception) or ErrorText(type(exception).__name__, "", [])
        return {"ename": text.name, "evalue": text.message, "traceback": text.traceback}


RankShell.__name__ = ZMQInteractiveShell.__name__  # rich, fastprogress and others detect a notebook by this name
