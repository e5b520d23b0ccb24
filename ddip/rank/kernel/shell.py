"""The IPython shell of a rank: it tells errors in bounded time, and none gets lost within a magic.

Where ``showtraceback`` is called from decides what becomes of the error:

    the cell's own code has raised      it is the cell's error
    a magic caught it (%%capture, %run) it is raised when the magic returns: else the cell would go on as if all were
                                        well, and the other ranks would wait for this one
    the cell's own code caught it       it is shown; the notebook hears of it, since others may wait for this rank
    something cannot be displayed       it is shown
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal, NoReturn, TypeAlias

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.error import UsageError
from traitlets import Type

from ddip.rank.kernel import refusals
from ddip.rank.process_group import membership
from ddip.rank.runtime import c10d, stacks, tracebacks
from ddip.rank.runtime.housekeeping import attribute_of
from ddip.rank.runtime.tracebacks import Told
from ddip.rank.streams.streams import RankDisplay

INTERRUPTS = ("KeyboardInterrupt", "CancelledError")
"""Names of what a stop raises; nobody is shown where."""
Teller: TypeAlias = Literal["cell", "magic", "caught", "display"]


tracebacks.HIDDEN.add(__name__)


def _teller(frame: FrameType | None) -> Teller:
    """Why has `frame` called ``showtraceback``?"""
    if frame is not None and frame.f_code.co_name == "run_code":  # the code that it has run, not what has run it
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


class RankShell(ZMQInteractiveShell):  # type: ignore[misc]
    """The IPython shell in which the cells of a rank run."""

    display_pub_class = Type(RankDisplay)
    is_rank = True
    """By which ddip knows that it is loaded on a rank."""
    raised_at = 0.0
    """When the cell raised, on ``time.time``: to tell it, with its frames, takes longer on one rank than on another."""
    raised: BaseException | None = None
    """What the cell raised."""
    caught: Told | None = None
    """What code of the cell has caught and shown."""
    _told: tuple[BaseException, Told] | None = None
    """What was told last."""
    _kept: BaseException | None = None
    """What a magic under way has caught."""

    def init_prompts(self) -> None:
        """IPython would set ``sys.ps1``, by which libraries tell that a person types here, who could start no ranks."""

    def init_magics(self) -> None:
        """IPython's, and those that refuse; each by its ``%`` only.

        On a new rank, which lacks variables, automagic would run ``%hist`` for the variable ``hist`` of the others.
        """
        super().init_magics()
        self.magics_manager.auto_magic = False
        refusals.install(self)

    def init_sys_modules(self) -> None:
        """IPython would also warn, of each ``sys.exit()``, that ``exit`` is the way to leave."""
        super().init_sys_modules()
        warnings.filterwarnings("ignore", "To exit: use 'exit'", UserWarning)

    def ask_exit(self) -> NoReturn:
        """What ``exit`` and ``quit`` call: they end the cell, as ``sys.exit()`` does, and not the rank."""
        raise SystemExit

    def begin_cell(self) -> None:
        """Forget what the last cell raised, and all that IPython keeps of what cells show, for ``%notebook``."""
        self.raised_at = 0.0
        self.raised = self.caught = self._told = self._kept = None
        for kept in ("outputs", "exceptions"):  # from IPython 9 on
            getattr(self.history_manager, kept, {}).clear()

    def forget(self) -> None:
        """The same, when its frames are let go, and all that was parsed to tell of them."""
        self.begin_cell()
        tracebacks.forget_sources()

    def told_of(self, error: BaseException | None) -> Told | None:
        """What was told of `error`, if that was the last to be told; None: of whatever was."""
        return self._told[1] if self._told and (error is None or error is self._told[0]) else None

    @functools.wraps(ZMQInteractiveShell.run_cell_async)  # ipykernel looks at its parameters
    async def run_cell_async(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """IPython's; an error whose text is odd is kept here, since ipykernel asks the one in the result for its text,
        which may be 1 GB long or not come at all."""
        result = await super().run_cell_async(*args, **kwargs)
        self.raised = None  # cells may be nested, and this one has ended later
        for name in ("error_before_exec", "error_in_exec"):
            error = getattr(result, name)
            if error is not None:
                self.raised = error
                told = self.told_of(error)
                if told is not None and not told.whole:
                    setattr(result, name, type(told.name, (Exception,), {})(told.message))
        return result

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """IPython's; raises what the magic has caught."""
        with self._raising_what_is_caught():
            return super().run_cell_magic(magic_name, line, cell)

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        """IPython's; raises what the magic has caught."""
        with self._raising_what_is_caught():  # a magic may look at the variables of whoever calls it: one frame more
            return super().run_line_magic(magic_name, line, _stack_depth + 1)

    @contextlib.contextmanager
    def _raising_what_is_caught(self) -> Iterator[None]:
        before, self._kept = self._kept, None
        try:
            yield
        finally:
            kept, self._kept = self._kept, before
        if kept is not None:
            raise kept

    @stacks.never_interrupted
    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """Tell an exception, by default the one that is handled."""
        self.raised_at = self.raised_at or time.time()
        error = (exc_tuple or sys.exc_info())[1]
        if error is None or type(error) is UsageError:  # a line or two
            super().showtraceback(exc_tuple, filename, tb_offset, exception_only, running_compiled_code)
            return
        told = self.told_of(error)
        if told is None:
            told = self._tell(error, tb_offset, exception_only, running_compiled_code)
            self._told = error, told
        teller = _teller(sys._getframe(1))
        if teller == "magic":
            self._kept = error
            return
        if teller == "caught":
            self.caught = told
        if teller == "cell" or (teller == "display" and getattr(self.displayhook, "msg", None) is not None):
            self.kernel.mend_streams()  # it flushes them first
            self._showtraceback(type(error), told.message, told.traceback)
        else:
            with contextlib.suppress(Exception):  # of a stream that the cell has put in place of stderr
                print(*told.traceback, sep="\n", file=sys.stderr)

    def showsyntaxerror(self, filename: str | None = None, running_compiled_code: bool = False) -> None:
        """IPython calls it for what cannot be parsed."""
        self.showtraceback(filename=filename, running_compiled_code=running_compiled_code)

    def _tell(self, error: BaseException, tb_offset: int | None, exception_only: bool, compiled: bool) -> Told:
        if membership.is_released(error):
            return Told(type(error).__name__, str(error), [])
        quick = type(error).__name__ in INTERRUPTS or c10d.is_broken_connection(error)
        if quick:  # often raised on all ranks, and dropped when the notebook has heard of the first
            return tracebacks.tell(error, None)
        return tracebacks.tell(error, lambda: self._rich(error, tb_offset, exception_only, compiled))

    def _rich(self, error: BaseException, tb_offset: int | None, exception_only: bool, compiled: bool) -> list[str]:
        """IPython's traceback of `error`."""
        render = attribute_of(error, "_render_traceback_")
        if render is not None:
            return list(render())
        kind, trace = type(error), tracebacks.without_ours(attribute_of(error, "__traceback__"))
        if isinstance(error, SyntaxError):
            frames: Any = traceback.extract_tb(trace) if compiled else []
            return list(self.SyntaxTB.structured_traceback(kind, error, frames))
        if exception_only:
            return list(self.InteractiveTB.get_exception_only(kind, error))
        return list(self.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=tb_offset))

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """What IPython 9 keeps of an exception in the history of a session: not one more traceback."""
        told = self.told_of(exception) or Told(type(exception).__name__, "", [])
        return {"ename": told.name, "evalue": told.message, "traceback": told.traceback}


RankShell.__name__ = ZMQInteractiveShell.__name__  # by which rich, fastprogress and others tell that this is a notebook
