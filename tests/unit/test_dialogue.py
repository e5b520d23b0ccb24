"""The prompt for a rank's question, without ranks."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddip.group.debugging.dialogue import AskingCell, _Reader
from ddip.group.debugging.open_questions import OpenQuestion, OpenQuestions
from ddip.protocol.cell_messages import AskedQuestion

QUESTION = OpenQuestion(1, cast(AskedQuestion, {"number": 1, "prompt": "?", "is_password": False}))


@pytest.fixture
def reader() -> _Reader:
    """Return a reader of the line for an open question."""
    cell = SimpleNamespace(questions=OpenQuestions(), wake_up=lambda: None)
    cell.questions.add(QUESTION)
    return _Reader(cast(AskingCell, cell), QUESTION, lambda: cell.questions.wait_for_change(0.01))


def begin_with(monkeypatch: pytest.MonkeyPatch, event: Any) -> None:
    """Let `event` happen when the thread that follows the cell has begun, before the prompt opens."""
    start = threading.Thread.start

    def start_then(thread: threading.Thread) -> None:
        start(thread)
        event()

    monkeypatch.setattr(threading.Thread, "start", start_then)
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("a prompt opened"))


def test_a_question_withdrawn_early_opens_no_prompt(reader: _Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def withdraw() -> None:
        reader._cell.questions.drop()
        while not reader.is_withdrawn:
            time.sleep(0.001)

    begin_with(monkeypatch, withdraw)
    assert reader.read("?") is None
    assert reader.is_withdrawn and not reader.is_interrupted


def test_an_early_stop_opens_no_prompt(reader: _Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_with(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    assert reader.read("?") is None
    assert reader.is_interrupted


def test_a_second_press_raises_nothing(reader: _Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def press_twice(prompt: str) -> str:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        return "typed"

    monkeypatch.setattr("builtins.input", press_twice)
    former = signal.getsignal(signal.SIGINT)
    assert reader.read("?") == "typed"
    assert reader.is_interrupted and signal.getsignal(signal.SIGINT) is former


def test_a_withdrawal_ends_the_prompt_despite_a_lost_signal(reader: _Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that arrives between the output of the prompt and the call that reads the terminal."""
    kill, lost = signal.pthread_kill, list[int]()

    def kill_from_second(thread: int, number: int) -> None:
        if lost:
            kill(thread, number)
        lost.append(number)

    def read_line(prompt: str) -> str:
        reader._cell.questions.drop()
        time.sleep(20)
        return "typed"

    monkeypatch.setattr(signal, "pthread_kill", kill_from_second)
    monkeypatch.setattr("builtins.input", read_line)
    assert reader.read("?") is None
    assert reader.is_withdrawn and not reader.is_interrupted
