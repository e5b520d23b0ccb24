"""What an interrupt waits for: where an exception would leave something of a library's half done."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from ddip.rank import libraries


class Lock:
    """Tells who enters and leaves it."""

    def __init__(self) -> None:
        self.callers: list[FrameType | None] = []

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def __enter__(self) -> None:
        self.callers.append(sys._getframe().f_back)

    def __exit__(self, *_: Any) -> None:
        self.callers.append(sys._getframe().f_back)


def test_what_a_library_enters_and_leaves_is_known_by_its_frames_and_a_users_is_left_out() -> None:
    lock = Lock()
    with threading.Condition(lock):  # type: ignore[arg-type]
        pass
    assert [libraries.is_in_with(frame) for frame in lock.callers] == [True, True]
    with lock:
        assert not libraries.is_in_with(sys._getframe())
    assert [libraries.is_in_with(frame) for frame in lock.callers] == [True, True, False, False]


def test_an_interrupt_waits_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, patience = Lock(), libraries.Patience()
    with threading.Condition(lock):  # type: ignore[arg-type]
        pass
    entering = lock.callers[0]
    assert patience.wait(entering) == libraries.WITH_AGAIN_SECONDS
    assert patience.wait(sys._getframe()) is None
    assert patience.wait(entering) == libraries.WITH_AGAIN_SECONDS
    monkeypatch.setattr(libraries, "WITH_SECONDS", 0.0)
    assert patience.wait(entering) is None
