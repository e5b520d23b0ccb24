"""Code of libraries that an interrupt waits for, because an exception would leave it half done."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from ddip.rank.runtime import libraries


class Lock:
    """A lock that records who enters and leaves it."""

    def __init__(self) -> None:
        self.callers: list[FrameType | None] = []

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def locked(self) -> None: ...

    def __enter__(self) -> None:
        self.callers.append(sys._getframe().f_back)

    def __exit__(self, *_: Any) -> None:
        self.callers.append(sys._getframe().f_back)


def test_with_statements_count_in_libraries_but_not_in_user_code() -> None:
    lock = Lock()
    with threading.Condition(lock):  # type: ignore[arg-type]
        pass
    assert [libraries.call_of_with(frame) for frame in lock.callers] == lock.callers
    with lock:
        assert libraries.call_of_with(sys._getframe()) is None
    assert [libraries.call_of_with(frame) for frame in lock.callers[2:]] == [None, None]


def test_a_call_without_arguments_is_no_call_of_with() -> None:
    """Before Python 3.14, each interrupt at ``loss.item()`` was delayed, and on a GPU the cell went on to its end."""
    found: list[FrameType | None] = []
    loss = SimpleNamespace(item=partial(signal.raise_signal, signal.SIGALRM))
    former = signal.signal(signal.SIGALRM, lambda _, frame: found.append(libraries.call_of_with(frame)))
    try:
        loss.item()
        value = loss.item()
    finally:
        signal.signal(signal.SIGALRM, former)
    assert value is None and found == [None, None]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="no interrupt comes between these instructions")
def test_the_call_of_an_enter_in_c_is_known() -> None:
    """The lock would stay closed."""

    class Ringing:
        __enter__ = staticmethod(partial(signal.raise_signal, signal.SIGALRM))
        __exit__ = staticmethod(lambda *_: None)

    found: list[bool] = []
    former = signal.signal(signal.SIGALRM, lambda _, frame: found.append(libraries.call_of_with(frame) is frame))
    try:
        with Ringing():
            pass
        signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, former)
    assert found == [True, False]


def frame_in_enter() -> FrameType:
    """Return the frame of a call of a library's ``__enter__``."""
    lock = Lock()
    with threading.Condition(lock):  # type: ignore[arg-type]
        pass
    assert lock.callers[0] is not None
    return lock.callers[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_an_interrupt_waits_for_a_moment_only(clock: list[float]) -> None:
    call, patience = frame_in_enter(), libraries.InterruptDelay()
    assert patience.delay_at(call) == libraries.WITH_AGAIN_SECONDS
    assert patience.delay_at(sys._getframe()) is None
    clock[0] += 2 * libraries.WITH_SECONDS
    assert patience.delay_at(call) == libraries.WITH_AGAIN_SECONDS
    clock[0] += 1.1 * libraries.WITH_SECONDS
    assert patience.delay_at(call) is None


def test_different_calls_extend_the_wait_on_a_loaded_machine(clock: list[float]) -> None:
    calls, patience = [frame_in_enter(), frame_in_enter()], libraries.InterruptDelay()
    for number in range(4):
        assert patience.delay_at(calls[number % 2]) == libraries.WITH_AGAIN_SECONDS
        clock[0] += 0.9 * libraries.WITH_SECONDS
    clock[0] += libraries.ALL_WITH_SECONDS
    assert patience.delay_at(calls[0]) is None
    assert patience.delay_at(calls[0]) == libraries.WITH_AGAIN_SECONDS


@pytest.mark.grid(in_ci=True)
def test_libraries_keep_no_reference_to_an_ended_cell() -> None:
    patience, finalized = libraries.InterruptDelay(), list[object]()

    class Held:
        pass

    def cell() -> None:
        held = Held()
        weakref.finalize(held, finalized.append, held.__class__)
        patience.delay_at(frame_in_enter())

    cell()
    gc.collect()
    assert finalized == []
    patience.forget()
    gc.collect()
    assert finalized == [Held]
