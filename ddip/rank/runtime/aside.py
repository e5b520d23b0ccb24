"""Set a cell's signal handlers and trace functions aside between cells, and restore them for the next cell.

Between cells, ddip's code answers the notebook. A SIGALRM handler that raises, or a trace function, would act on that
code, and an answer or the rank would be lost.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own functions take 100 µs for all signals, these 4
import os
import signal
import sys
import traceback
from _lsprof import Profiler
from collections.abc import Callable
from types import FrameType
from typing import Any

LEAST_FRAMES = 1_000
"""Lowest recursion limit that the rank's own code accepts; Python's default."""
NUMBERS = sorted(int(number) for number in signal.valid_signals())
TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals whose handler may end the rank with SystemExit; for other signals that is an error."""


class InterpreterSettings:
    """The interpreter settings of cells; its methods run on the main thread.

    `end` is called if a handler exits, and `say` with a line for the user if a handler raises or a setting is changed.
    """

    def __init__(self, end: Callable[[], None], say: Callable[[str], None]) -> None:
        self._end = end
        self._say = say
        self._own_handlers = {number: _signal.getsignal(number) for number in NUMBERS}
        """Handlers of the rank itself."""
        self._replaced_handlers: dict[int, tuple[Any, Any]] = {}
        """Handlers of the last cell, each with its replacement between cells."""
        self._trace: tuple[Any, Any] = (None, None)

    def put(self) -> None:
        """Set the handlers and trace functions of the cell that has ended aside.

        Also restore a usable recursion limit, and reopen standard descriptors that the cell has closed.
        """
        if sys.getrecursionlimit() < LEAST_FRAMES:
            self._say(f"the cell has set the recursion limit to {sys.getrecursionlimit()}; it is {LEAST_FRAMES} again")
            sys.setrecursionlimit(LEAST_FRAMES)
        for descriptor in range(3):
            self._keep_open(descriptor)
        trace, profile = sys.gettrace(), sys.getprofile()
        self._trace = trace, profile
        if trace is not None:
            sys.settrace(None)
        if isinstance(profile, Profiler):
            Profiler.disable(profile)
        elif callable(profile):
            sys.setprofile(None)
        for number in NUMBERS:
            handler = _signal.getsignal(number)
            if handler is not self._own_handlers[number] and callable(handler) and number != signal.SIGINT:
                self._replaced_handlers[number] = handler, self._shield(handler)
                _signal.signal(number, self._replaced_handlers[number][1])

    def give_back(self) -> None:
        """Restore handlers and trace functions for the next cell."""
        for number, (handler, quiet) in self._replaced_handlers.items():
            if _signal.getsignal(number) is quiet:
                _signal.signal(number, handler)
        self._replaced_handlers.clear()
        (trace, profile), self._trace = self._trace, (None, None)
        if trace is not None:
            sys.settrace(trace)
        if isinstance(profile, Profiler):  # cProfile's, which `sys.setprofile` would call and which is not callable
            Profiler.enable(profile)
        elif callable(profile):  # else it is one of another C extension, which was left in place
            sys.setprofile(profile)

    def _keep_open(self, descriptor: int) -> None:
        """Reopen standard `descriptor` on the null device if the cell has closed it.

        Otherwise the next connection would get its number, and break when a cell closes the descriptor again.
        """
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            self._say(f"the cell has closed file descriptor {descriptor}; it is {os.devnull} now")

    def _shield(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        """Wrap `handler` so that its exceptions are reported and do not propagate."""

        def handle_signal(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:  # it would end code of ipykernel
                if isinstance(error, SystemExit) and number in TO_END:
                    self._end()
                else:
                    text = "".join(traceback.format_exception_only(type(error), error)).strip()
                    self._say(f"a handler of {signal.Signals(number).name} raised between two cells: {text}")

        return handle_signal
