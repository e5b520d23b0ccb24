"""Handle the stop button while ranks work for ddip itself: presses are noted, and each wait checks for them.

A KeyboardInterrupt may be raised between any two instructions. Code that it would leave half done, or that could lose
it, runs inside ``note_presses``. Waits for ranks (``ranks.py``) then unblock the ranks, wait for them briefly, and
raise ``RequestInterrupted``. Steps that must run to their end ignore the press, which is raised after them.
``running.py`` does the same for a cell, whose messages must be shown meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from ddip.errors import RequestInterrupted
from ddip.output.area import stop_name

LOOK_SECONDS = 0.25
"""Interval at which a wait checks that the controller is still running."""


class Button:
    """Records that the stop button was pressed."""

    def __init__(self) -> None:
        self.pressed = False
        """True if the button was pressed since the last `take`."""
        self._events: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose `put`, unlike Queue's, is reentrant

    def press(self, *_: Any) -> None:
        """Record a press and wake up the thread that waits, if any; this is the handler for SIGINT."""
        self.pressed = True
        self._events.put(None)

    def take(self) -> None:
        """Mark the press as handled."""
        self.pressed = False

    def watch(self, futures: Iterable[Future[Any]]) -> None:
        """Make each of `futures` end a `sleep` when it is done."""
        for future in futures:
            future.add_done_callback(lambda _: self._events.put(None))

    def sleep(self, seconds: float) -> None:
        """Sleep at most `seconds`, until a press or the end of a watched future; it may return early."""
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=max(0.0, seconds))

    def wait_for(
        self, futures: Collection[Future[Any]], seconds: float, look: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until all `futures` are done or the button is pressed; at most `seconds`.

        A press raises nothing here. `look` is called every LOOK_SECONDS; an error that it raises ends the wait.
        """
        self.watch(futures)
        end = time.monotonic() + seconds
        while not self.pressed and time.monotonic() < end and not all(future.done() for future in futures):
            look()
            self.sleep(min(LOOK_SECONDS, end - time.monotonic()))


@contextlib.contextmanager
def call_on_press(press: Callable[[], object]) -> Iterator[None]:
    """Call `press` for each press of the stop button within the context.

    KeyboardInterrupt is not raised there. `press` must be fast and not raise. On threads other than the main thread,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, lambda number, frame: press())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


_current: Button | None = None
"""The button of the main thread, inside a ``note_presses`` context."""


@contextlib.contextmanager
def note_presses(text: str = "") -> Iterator[Button]:
    """Note presses of the stop button instead of raising KeyboardInterrupt; nested uses share a `Button`.

    If a press is still not taken when the outermost use ends without an error, that use raises RequestInterrupted with
    its `text`. On other threads, the button is never pressed.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Button()
        return
    if _current is not None:
        yield _current
        return
    new_button = Button()
    former = signal.signal(signal.SIGINT, new_button.press)  # no KeyboardInterrupt is raised from here on
    _current = new_button
    try:
        yield new_button
    finally:
        _current = None
        signal.signal(signal.SIGINT, former)
    if new_button.pressed:
        raise RequestInterrupted(text or f"{stop_name()} was pressed after everything had finished")
