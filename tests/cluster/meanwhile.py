"""Actions of a test that happen while it waits for a cell."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest

from .leftovers import wait_until

_started: list[threading.Thread] = []
_is_over = threading.Event()
"""Set when the test is over: pending actions are then skipped."""


def meanwhile(condition: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
    """Run `do` in a thread once `condition` holds, unless the test is over by then."""

    def watch() -> None:
        wait_until(lambda: _is_over.is_set() or condition())
        if not _is_over.is_set():
            do()

    thread = threading.Thread(target=watch)
    _started.append(thread)
    thread.start()
    return thread


def end_all() -> None:
    """End the threads of a finished test: after a failure one could press stop in the next test."""
    _is_over.set()
    for thread in _started:
        thread.join()
    _started.clear()
    _is_over.clear()


def press_stop() -> None:
    """Press the stop button of a notebook whose kernel is this process."""
    os.kill(os.getpid(), signal.SIGINT)


class StderrText:
    """The text that ddip has written to stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def text(self) -> str:
        """Return all text so far."""
        self._text += self._capsys.readouterr().err
        return self._text


@contextlib.contextmanager
def suspended(pids: Sequence[int]) -> Iterator[None]:
    """Suspend processes for the length of the block; on a loaded machine it takes a while until they stop."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
