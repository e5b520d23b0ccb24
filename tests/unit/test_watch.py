"""Whether ranks make progress, decided from their answers and from system figures of their processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddip.cluster.processes import on_host
from ddip.group.members import watch
from ddip.group.members.watch import StopProgress, Watch
from ddip.protocol import on_rank
from ddip.protocol.on_rank import RemoteCall


class Ranks:
    """A stand-in for the ranks: each answers with its entry in `answers`."""

    def __init__(self, pids: Sequence[int], answers: dict[int, Any]) -> None:
        self.members = [SimpleNamespace(pid=pid) for pid in pids]
        self.answers = answers
        self.asked: list[RemoteCall[Any]] = []

    def call_on_control_channel(self, ranks: Sequence[int], call: RemoteCall[Any]) -> dict[int, Any]:
        self.asked.append(call)
        return {rank: self.answers[rank] for rank in ranks}

    def cpu_uses(self, ranks: Sequence[int]) -> dict[int, tuple[float, bool]]:
        found = dict(zip(ranks, on_host.cpu_usage([self.members[rank].pid for rank in ranks]), strict=True))
        return {rank: use for rank, use in found.items() if use is not None}


class Clock:
    """The clock that a watch reads."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


def start_process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Start a process that waits."""
    child = start_process("print(flush=True); input()")
    assert child.stdout is not None
    child.stdout.readline()  # the process has started, and is idle from now on
    while psutil.Process(child.pid).status() != psutil.STATUS_SLEEPING:
        pass
    yield child.pid
    child.communicate(b"\n")


@pytest.fixture
def worker() -> Iterator[int]:
    """Start a process that computes."""
    child = start_process("while True: pass")
    yield child.pid
    child.kill()
    child.communicate()


# -- a running cell


def stall_decisions(clock: Clock, ranks: Ranks, *moves: dict[int, Any], seconds: float = 1.0) -> list[bool]:
    """Return the decisions of a watch with a patience of 3 s, made every `seconds`."""
    one = Watch(ranks, 3.0)  # type: ignore[arg-type]
    decisions = []
    for answers in moves:
        clock.now += seconds
        ranks.answers = answers
        decisions.append(one.has_stalled(sorted(answers), clock.now))
    return decisions


def test_ranks_that_do_not_move_stand_still_after_a_while(clock: Clock) -> None:
    here = {0: (7, 0.0), 1: (8, 0.0)}
    assert stall_decisions(clock, Ranks([1, 2], {}), *[here] * 5) == [False, False, False, True, True]


@pytest.mark.parametrize("moved", [{0: (9, 0.0), 1: (8, 0.0)}, {0: (7, 1.0), 1: (8, 0.0)}], ids=["a step", "CPU time"])
def test_one_moving_rank_counts_as_progress(clock: Clock, moved: dict[int, Any]) -> None:
    here = {0: (7, 0.0), 1: (8, 0.0)}
    assert stall_decisions(clock, Ranks([1, 2], {}), here, here, here, moved, moved, moved) == [False] * 6


def test_a_little_cpu_time_is_no_movement(clock: Clock) -> None:
    answers = [{0: (7, 0.01 * second)} for second in range(5)]
    assert stall_decisions(clock, Ranks([1], {}), *answers)[-1]


def test_a_rank_that_does_not_answer_does_not_move(clock: Clock) -> None:
    assert stall_decisions(clock, Ranks([1], {}), *[{0: None}] * 4)[-1]


def test_ranks_are_not_asked_all_the_time(clock: Clock) -> None:
    ranks = Ranks([1], {})
    stall_decisions(clock, ranks, *[{0: (7, 0.0)}] * 30, seconds=0.1)
    assert 1 < len(ranks.asked) < 6 and set(ranks.asked) == {on_rank.main_thread_pulse()}


def test_a_message_counts_as_progress(clock: Clock) -> None:
    one = Watch(Ranks([1], {0: (7, 0.0)}), 3.0)  # type: ignore[arg-type]
    for _ in range(5):
        clock.now += 2
        one.note_progress()
        assert not one.has_stalled([0], clock.now)


# -- a stopped cell


def ending_decisions(
    clock: Clock, pid: int, *phases: str | None, asleep: float = 0.0, seconds: float = 0.25
) -> list[bool]:
    """Return at each look whether the rank is making progress to its end."""
    ranks = Ranks([pid], {})
    ending = StopProgress(ranks, [0], asleep)  # type: ignore[arg-type]
    decisions = []
    for phase in phases:
        clock.now += seconds
        ranks.answers = {0: phase}
        decisions.append(ending.find_moving([0]) == [0])
    return decisions


def test_ranks_waiting_in_user_code_are_omitted_at_second_look(clock: Clock, sleeper: int) -> None:
    assert ending_decisions(clock, sleeper, "code", "code", "code")[-1] is False


def test_an_idle_rank_counts_as_moving(clock: Clock, sleeper: int) -> None:
    assert ending_decisions(clock, sleeper, "idle", "idle", "idle") == [True] * 3


def test_a_rank_that_computes_after_user_code_may_take_time(clock: Clock, worker: int) -> None:
    assert ending_decisions(clock, worker, *["ending"] * 40) == [True] * 40


def test_no_rank_may_take_longer_than_half_a_minute(clock: Clock, worker: int) -> None:
    assert ending_decisions(clock, worker, "ending", "ending", seconds=20.0) == [True, False]


def test_a_rank_may_sleep_after_user_code_if_allowed(clock: Clock, sleeper: int) -> None:
    assert ending_decisions(clock, sleeper, *["ending"] * 3, asleep=6.0, seconds=1.0) == [True] * 3
    assert ending_decisions(clock, sleeper, *["ending"] * 9, asleep=6.0, seconds=1.0)[-1] is False


def test_a_silent_rank_counts_as_running_user_code(clock: Clock, sleeper: int) -> None:
    assert ending_decisions(clock, sleeper, *[None] * 4)[-1] is False


def test_a_rank_that_has_ended_does_not_move(clock: Clock) -> None:
    child = start_process("pass")
    child.communicate()
    assert ending_decisions(clock, child.pid, "code", "code") == [False, False]
