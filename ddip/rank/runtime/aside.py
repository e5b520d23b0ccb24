"""What a cell has set in the interpreter, kept out of the way of the rank's own code.

A handler of SIGALRM that raises, a trace function: they are a cell's, and are there again in the next one. In between
they would act on the code that answers the notebook: it would lose an answer, or the rank.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own functions take 100 µs for all signals, these 4
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

LEAST_FRAMES = 1_000
"""Of Python's stack; Python's own default."""
NUMBERS = sorted(int(number) for number in signal.valid_signals())
TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which a handler that exits is taken at its word."""


class Aside:
    """`end` is told of a handler that exits; `say` of one that raised, and of what was changed, on the main thread."""

    def __init__(self, end: Callable[[], None], say: Callable[[str], None]) -> None:
        self._end = end
        self._say = say
        self._ours = {number: _signal.getsignal(number) for number in NUMBERS}
        """Handlers that the rank itself has."""
        self._put: dict[int, tuple[Any, Any]] = {}
        """A cell's handlers, and what stands in their places."""
        self._trace: tuple[Any, Any] = (None, None)

    def put(self) -> None:
        """The cell has ended."""
        if sys.getrecursionlimit() < LEAST_FRAMES:
            self._say(f"the cell has set the recursion limit to {sys.getrecursionlimit()}; it is {LEAST_FRAMES} again")
            sys.setrecursionlimit(LEAST_FRAMES)
        for descriptor in range(3):
            self._hold(descriptor)
        self._trace = sys.gettrace(), sys.getprofile()
        if self._trace != (None, None):
            sys.settrace(None)
            sys.setprofile(None)
        for number in NUMBERS:
            handler = _signal.getsignal(number)
            if handler is not self._ours[number] and callable(handler) and number != signal.SIGINT:
                self._put[number] = handler, self._quiet(handler)
                _signal.signal(number, self._put[number][1])

    def give_back(self) -> None:
        """The next cell begins."""
        for number, (handler, quiet) in self._put.items():
            if _signal.getsignal(number) is quiet:
                _signal.signal(number, handler)
        self._put.clear()
        (trace, profile), self._trace = self._trace, (None, None)
        if trace is not None:
            sys.settrace(trace)
        if profile is not None:
            sys.setprofile(profile)

    def _hold(self, descriptor: int) -> None:
        """Have it open: else the next connection gets its number, and breaks when a cell closes it once more."""
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number that is free
            self._say(f"the cell has closed file descriptor {descriptor}; it is {os.devnull} now")

    def _quiet(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        """`handler`, without what it raises."""

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:  # it would end ipykernel's own code
                if isinstance(error, SystemExit) and number in TO_END:
                    self._end()
                else:
                    told = "".join(traceback.format_exception_only(type(error), error)).strip()
                    self._say(f"a handler of {signal.Signals(number).name} raised between two cells: {told}")

        return handle
