"""What happens beside a cell that the test waits for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from .leftovers import wait_until


def meanwhile(condition: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
    """Do something in a thread as soon as `condition` holds; join it at the end."""

    def watch() -> None:
        wait_until(condition)
        do()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


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
