"""Decisions of the cell state machine, without processes, also over random orders of events."""

from __future__ import annotations

import random

import pytest

from ddip.errors import RANK_ENDED, RankError
from ddip.group.cells import cell_state
from ddip.group.cells.cell_state import (
    INTERRUPTED,
    Action,
    CannotStop,
    CellStalled,
    CellState,
    Event,
    Limits,
    MovingRanks,
    OutputEnded,
    Question,
    RankAction,
    RankReplied,
    ShowEnded,
    StopPressed,
    TimePassed,
    WaitsInVain,
)

WRONG = RankError("ValueError", "wrong", "trace", at=1.0)
CUT = RankError("RuntimeError", "connection closed", "trace", waited="all_reduce", at=2.0)
ENDED = RankError(RANK_ENDED, "killed", "", at=1.5)


def new_state(ranks: int = 3, **limits: float) -> CellState:
    return CellState(range(ranks), Limits(**limits), began=0.0)


def end_rank(state: CellState, rank: int, now: float, error: RankError | None = None) -> list[ShowEnded]:
    """Deliver a rank's reply and the end of its output; return how its end is shown."""
    actions = [*state.step(RankReplied(rank, error), now), *state.step(OutputEnded(rank), now)]
    return [action for action in actions if isinstance(action, ShowEnded)]


def pass_time(state: CellState, begin: float, until: float) -> list[tuple[float, Action]]:
    """Let time pass while nothing answers; return each decision and its time."""
    found, now = [], begin
    while now <= until and not state.is_over:
        found += [(round(now, 2), action) for action in state.step(TimePassed(), now)]
        now += state.interval
    return found


def time_of_first(found: list[tuple[float, Action]], action: Action) -> float:
    return next(now for now, one in found if one == action)


def test_a_cell_ends_when_every_rank_replied_and_ended_output() -> None:
    state = new_state(2)
    state.step(OutputEnded(0), 0.1)
    assert state.step(RankReplied(0), 0.1) == [ShowEnded(0, failed=False), Question.WAITS_IN_VAIN]
    state.step(RankReplied(1), 0.2)
    assert state.running == [] and not state.is_over
    assert state.step(OutputEnded(1), 0.2) == [ShowEnded(1, failed=False)]
    assert state.is_over and state.ending() == "good" and state.reportable_errors() == {}


def test_the_controller_is_checked_while_only_messages_are_missing() -> None:
    """The controller forwards these messages: without the check, a cell waited forever after its end."""
    state = new_state(1)
    state.step(RankReplied(0), 0.1)
    assert {action for _, action in pass_time(state, 0.1, 1.0)} == {RankAction.CHECK}


def test_a_failure_gives_other_ranks_grace_and_then_aborts_once() -> None:
    state = new_state(failure_grace=1.0)
    assert end_rank(state, 1, 5.0, WRONG) == [ShowEnded(1, failed=True)]
    found = pass_time(state, 5.0, 20.0)
    assert time_of_first(found, RankAction.ABORT) == pytest.approx(6.0, abs=0.06)
    assert [action for _, action in found].count(RankAction.ABORT) == 1
    assert RankAction.INTERRUPT not in [action for _, action in found]
    assert time_of_first(found, RankAction.REPORT_RUNNING) == pytest.approx(6.0 + cell_state.PATIENCE_SECONDS, abs=0.4)
    assert [action for _, action in found].count(RankAction.REPORT_RUNNING) == 1
    for rank in (0, 2):
        end_rank(state, rank, 21.0, CUT)
    assert state.ending() == "failed" and state.reportable_errors() == {1: WRONG, 0: CUT, 2: CUT}


def test_a_connection_broken_before_the_abort_counts_as_an_error() -> None:
    state = new_state(2, failure_grace=1.0)
    assert end_rank(state, 0, 1.0, CUT) == [ShowEnded(0, failed=True)]
    assert end_rank(state, 1, 1.1, WRONG) == [ShowEnded(1, failed=True)]
    assert [error.waited for error in state.reportable_errors().values()] == ["", ""]


def test_losing_an_ended_rank_counts_as_a_wait() -> None:
    state = new_state(2)
    end_rank(state, 0, 1.0, CUT)
    end_rank(state, 1, 1.1, ENDED)
    assert state.reportable_errors() == {0: CUT, 1: ENDED}


def test_stop_interrupts_then_aborts_then_abandons_ranks_that_stay_still() -> None:
    state = new_state()
    assert RankAction.INTERRUPT in state.step(StopPressed(), 10.0)
    found = pass_time(state, 10.0, 30.0)
    assert time_of_first(found, RankAction.ABORT) == pytest.approx(10.0 + cell_state.STOP_GRACE_SECONDS, abs=0.06)
    assert time_of_first(found, Question.WHO_MOVES) >= 10.0 + cell_state.ASK_SECONDS
    assert state.is_abandoned and found[-1][0] <= 10.0 + cell_state.STOP_SECONDS
    assert state.ending() == "stopped" and state.running == [0, 1, 2]


def test_a_stopped_cell_waits_for_no_rank_that_cannot_stop() -> None:
    state, now = new_state(2), 1.0
    assert state.step(StopPressed(), now)[:2] == [RankAction.INTERRUPT, Question.WHO_CANNOT_STOP]
    assert state.step(CannotStop([1]), now) == [] and not state.is_over
    end_rank(state, 0, now + 0.1, CUT)
    state.step(TimePassed(), now + 0.1)
    assert state.is_abandoned and state.running == [1] and now + 0.1 < 1.0 + cell_state.STOP_SECONDS


def test_a_second_stop_aborts_at_once() -> None:
    state = new_state()
    state.step(StopPressed(), 10.0)
    assert state.step(StopPressed(), 10.1)[:2] == [RankAction.INTERRUPT, RankAction.ABORT]


def test_a_stop_waits_for_ranks_that_approach_their_end() -> None:
    state = new_state(1)
    state.step(StopPressed(), 0.0)
    state.step(MovingRanks([0]), 2.0)
    for now in (2.5, 5.0, 60.0):
        state.step(TimePassed(), now)
        assert not state.is_over
    state.step(MovingRanks([]), 60.1)
    assert state.is_abandoned


def test_a_timeout_records_places_before_it_stops_the_ranks() -> None:
    state = new_state(timeout=3.0)
    found = pass_time(state, 0.0, 30.0)
    places = [action for _, action in found].index(RankAction.RECORD_PLACES)
    assert [action for _, action in found][places + 1] == RankAction.INTERRUPT
    assert time_of_first(found, RankAction.RECORD_PLACES) == pytest.approx(3.0, abs=0.11)
    assert state.ending() == "timed out" and state.is_abandoned


def test_a_stall_is_reported_once() -> None:
    state = new_state()
    assert Question.STALL in [action for _, action in pass_time(state, 0.0, 1.0)]
    assert state.step(CellStalled(), 1.0) == [RankAction.REPORT_STALL]
    assert state.step(CellStalled(), 2.0) == []
    assert Question.STALL in [
        action for _, action in pass_time(state, 2.1, 60.0)
    ]  # different collectives may meet only then
    assert not state.is_over


def test_ranks_waiting_for_one_that_caught_its_error_are_unblocked() -> None:
    state = new_state(2)
    state.step(RankReplied(0, caught=WRONG), 1.0)
    state.step(OutputEnded(0), 1.0)
    assert Question.STALL_AFTER_CAUGHT in state.step(TimePassed(), 1.1)
    assert state.step(CellStalled(after_caught=True), 3.1) == [RankAction.ABORT]
    assert state.step(CellStalled(after_caught=True), 3.2) == []
    end_rank(state, 1, 3.2, CUT)
    assert state.is_over and state.ending() == "failed" and state.reportable_errors() == {0: WRONG, 1: CUT}


def test_waits_in_vain_are_aborted_at_once_and_only_once() -> None:
    state = new_state(2)
    assert Question.WAITS_IN_VAIN not in state.step(TimePassed(), 0.1)  # the cell has ended nowhere
    end_rank(state, 0, 0.2, WRONG)
    assert Question.WAITS_IN_VAIN in state.step(TimePassed(), 0.25)
    assert state.step(WaitsInVain(), 0.3) == [RankAction.ABORT]
    assert state.step(WaitsInVain(), 0.35) == []
    assert RankAction.ABORT not in [action for _, action in pass_time(state, 0.35, 2.0)]
    end_rank(state, 1, 2.0, CUT)
    assert state.is_over and state.reportable_errors() == {0: WRONG, 1: CUT}


def test_after_a_stop_ranks_may_wait_for_each_other() -> None:
    state = new_state(2)
    state.step(StopPressed(), 0.1)
    assert Question.WAITS_IN_VAIN in state.step(TimePassed(), 0.15)
    assert state.step(WaitsInVain(), 0.2) == [RankAction.ABORT]


def test_a_stopped_cell_waits_for_messages_only_a_limited_time() -> None:
    state = new_state(1)
    state.step(StopPressed(), 0.0)
    state.step(RankReplied(0), 0.1)
    assert not state.is_over
    state.step(TimePassed(), cell_state.STOP_SECONDS)
    assert state.is_over and state.running == []


def play_random_events(draw: random.Random, state: CellState) -> list[tuple[float, Event, list[Action]]]:
    """Deliver random events in any order and at any time, and answer the cell's questions at random."""
    steps, now = [], 0.0
    ends: list[Event] = [OutputEnded(rank) for rank in state.ranks]
    for rank in state.ranks:
        error = draw.choice([None, None, WRONG, CUT, ENDED])
        ends.append(RankReplied(rank, error, draw.choice([None, None, WRONG]) if error is None else None))
    draw.shuffle(ends)
    del ends[: draw.choice([0, 0, 1, 2, 4])]  # some ranks never end
    stops = draw.choice([0, 0, 1, 2])
    while not state.is_over and now < 100:
        now += draw.choice([0.0, 0.01, state.interval, state.interval, 0.3])
        event: Event = TimePassed()
        if ends and draw.random() < 0.2:
            event = ends.pop()
        elif stops and draw.random() < 0.1:
            stops, event = stops - 1, StopPressed()
        waiting = [event]
        while waiting and not state.is_over:
            event = waiting.pop(0)
            actions = state.step(event, now)
            steps.append((now, event, actions))
            for action in actions:
                if action is Question.WHO_MOVES:
                    waiting.append(MovingRanks([rank for rank in state.running if draw.random() < 0.5]))
                elif action is Question.WHO_CANNOT_STOP and draw.random() < 0.3:
                    waiting.append(CannotStop([rank for rank in state.running if draw.random() < 0.5]))
                elif action in (Question.STALL, Question.STALL_AFTER_CAUGHT) and draw.random() < 0.1:
                    waiting.append(CellStalled(action is Question.STALL_AFTER_CAUGHT))
    return steps


@pytest.mark.parametrize("seed", range(400))
def test_any_order_of_events_keeps_the_promises(seed: int) -> None:
    draw = random.Random(seed)
    limits = Limits(draw.choice([0.1, 1.0]), 10.0, draw.choice([None, 2.0]))
    state = CellState(range(draw.choice([1, 2, 5])), limits, 0.0)
    steps = play_random_events(draw, state)
    events = [event for _, event, _ in steps]
    actions = [(now, action) for now, _, found in steps for action in found]
    replied = {event.rank for event in events if isinstance(event, RankReplied)}
    silent = {event.rank for event in events if isinstance(event, OutputEnded)}

    # a cell is over when all ranks have ended, or when it was stopped and abandoned
    assert state.is_over == (replied == silent == set(state.ranks)) or state.is_abandoned
    assert not state.is_abandoned or state.stopped_at is not None
    if state.is_abandoned:
        assert state.stopped_at is not None
        cannot = {rank for event in events if isinstance(event, CannotStop) for rank in event.ranks}
        assert steps[-1][0] >= state.stopped_at + cell_state.STOP_SECONDS or cannot >= set(state.running)
    # no error is lost, and each rank that has ended is shown once
    assert set(state.errors) == {event.rank for event in events if isinstance(event, RankReplied) and event.error}
    assert set(state.errors) <= set(state.reportable_errors())
    shown = [action.rank for _, action in actions if isinstance(action, ShowEnded)]
    assert sorted(shown) == sorted(replied & silent)
    # one interrupt per press, and one at the timeout
    stops = events.count(StopPressed())
    interrupts = [now for now, action in actions if action is RankAction.INTERRUPT]
    assert len(interrupts) == stops + (state.ending() == "timed out")
    # waiting ranks are aborted in time, not too early, and again only by the stop button
    releases = [now for now, action in actions if action is RankAction.ABORT]
    failed = [now for now, event, _ in steps if isinstance(event, RankReplied) and event.error]
    caught = any(isinstance(event, RankReplied) and event.caught for event in events)
    if releases and state.stopped_at is None and not caught:
        assert releases[0] >= failed[0] + limits.failure_grace
    if failed and state.running and steps[-1][0] > failed[0] + limits.failure_grace + 1:
        assert releases and releases[0] <= max(failed[0] + limits.failure_grace, 0) + 0.31
    assert len(releases) <= 1 + stops
    # each report is made once, and never after a stop
    for report in (RankAction.REPORT_RUNNING, RankAction.REPORT_STALL, RankAction.RECORD_PLACES):
        assert [action for _, action in actions].count(report) <= 1


def test_after_a_failure_ranks_without_unblocking_are_interrupted_and_abandoned() -> None:
    state = new_state(2, can_unblock=False)
    end_rank(state, 1, 0.0, WRONG)
    found = pass_time(state, 0.1, 60)
    assert state.is_over and state.ending() == "failed"
    assert (
        time_of_first(found, RankAction.ABORT)
        < time_of_first(found, RankAction.INTERRUPT)
        < time_of_first(found, Question.WHO_MOVES)
    )


def test_a_rank_that_ddip_interrupts_after_a_failure_says_so() -> None:
    state = new_state(2, can_unblock=False, failure_grace=0.1)
    end_rank(state, 1, 0.0, WRONG)
    pass_time(state, 0.1, 1)
    end_rank(state, 0, 1.0, RankError("KeyboardInterrupt", "", ""))
    errors = state.reportable_errors()
    assert errors[0].message == INTERRUPTED and errors[1] == WRONG


def test_endless_waits_for_a_rank_that_caught_its_error_fail() -> None:
    """Otherwise the notebook waited for its answer forever."""
    state = new_state(2, can_unblock=False)
    state.step(RankReplied(1, caught=WRONG), 0.0)
    state.step(OutputEnded(1), 0.0)
    state.step(CellStalled(after_caught=True), 2.0)
    pass_time(state, 2.0, 60)
    assert state.is_over and state.ending() == "failed" and state.reportable_errors() == {1: WRONG}


def test_a_stop_interrupts_ranks_that_cannot_be_unblocked_once() -> None:
    state = new_state(2, can_unblock=False)
    found = [*state.step(StopPressed(), 0.0), *(action for _, action in pass_time(state, 0.1, 60))]
    assert found.count(RankAction.INTERRUPT) == found.count(RankAction.ABORT) == 1 and state.is_over
