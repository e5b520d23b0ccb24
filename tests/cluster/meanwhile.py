"""What happens beside a cell that the test waits for."""

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
"""The test is over, and what has not been done is not done any more."""


def meanwhile(condition: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
    """Do something in a thread as soon as `condition` holds, unless the test is over; join it at the end."""

    def watch() -> None:
        wait_until(lambda: _is_over.is_set() or condition())
        if not _is_over.is_set():
            do()

    thread = threading.Thread(target=watch)
    _started.append(thread)
    thread.start()
    return thread


def end_all() -> None:
    """End the threads of a test that is over: one that failed would press stop in the next test."""
    _is_over.set()
    for thread in _started:
        thread.join()
    _started.clear()
    _is_over.clear()


def press_stop() -> None:
    """The stop button of a notebook whose kernel is this process."""
    os.kill(os.getpid(), signal.SIGINT)


class Told:
    """What ddip has told the user so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def text(self) -> str:
        """All of it."""
        self._text += self._capsys.readouterr().err
        return self._text


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop these processes meanwhile; a loaded machine takes a while to."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
