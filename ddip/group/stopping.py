"""The stop button while ranks do something for ddip itself: it is counted, and each wait looks at it.

A KeyboardInterrupt may come between any two steps. Where it would leave half of something behind, or be lost, the steps
run inside ``button``: what waits for ranks (``ranks.py``) then frees them, waits for them a short while, and raises
``RequestInterrupted``; what must not be torn does not look, and a press that nobody has taken is raised at the end.
``cells.py`` has the same for a cell, whose messages must be shown meanwhile.
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
"""How often a wait looks whether the controller still lives."""


class Button:
    """Counts how often the stop button is pressed."""

    def __init__(self) -> None:
        self.pressed = False
        """Since the last `take`."""
        self._events: queue.SimpleQueue[None] = queue.SimpleQueue()  # the only kind that a signal handler may put into

    def press(self, *_: Any) -> None:
        """The handler of SIGINT; wakes up a wait."""
        self.pressed = True
        self._events.put(None)

    def take(self) -> None:
        """The press has been answered."""
        self.pressed = False

    def watch(self, futures: Iterable[Future[Any]]) -> None:
        """Have each of `futures` end a `sleep` when it is done."""
        for future in futures:
            future.add_done_callback(lambda _: self._events.put(None))

    def sleep(self, seconds: float) -> None:
        """Sleep until something has happened, perhaps a while ago; at most `seconds`."""
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=max(0.0, seconds))

    def wait_for(
        self, futures: Collection[Future[Any]], seconds: float, look: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until all `futures` are done, at most `seconds`, or until it is pressed, or until `look` raises."""
        self.watch(futures)
        end = time.monotonic() + seconds
        while not self.pressed and time.monotonic() < end and not all(future.done() for future in futures):
            look()
            self.sleep(min(LOOK_SECONDS, end - time.monotonic()))


@contextlib.contextmanager
def calling(press: Callable[[], object]) -> Iterator[None]:
    """Call `press`, which must be quick and not raise, each time that the stop button is pressed on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, lambda number, frame: press())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


_current: Button | None = None
"""Of the main thread."""


@contextlib.contextmanager
def button(text: str = "") -> Iterator[Button]:
    """Count presses of the stop button instead of raising KeyboardInterrupt; inside of another `button` it is that one.

    Raises RequestInterrupted, with `text`, at the end if it was pressed, and nobody has taken it. On another thread
    than the main one it is never pressed.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Button()
        return
    if _current is not None:
        yield _current
        return
    made = Button()
    former = signal.signal(signal.SIGINT, made.press)  # from here on no KeyboardInterrupt comes
    _current = made
    try:
        yield made
    finally:
        _current = None
        signal.signal(signal.SIGINT, former)
    if made.pressed:
        raise RequestInterrupted(text or f"{stop_name()} was pressed when everything had been done")
