"""Which ranks have begun more collectives than others: pure decisions."""

from __future__ import annotations

from typing import Any

import pytest

from ddip.group.process_group.steps import StepMismatch, Steps
from ddip.protocol.reports import GroupUse

from . import scripted

ALL, PAIR = "default cpu", "1 cpu"


def group_use(collectives: int = 0, ranks: list[int] | None = None, **more: Any) -> GroupUse:
    """Return what a rank reports of a group."""
    report: Any = {**scripted.group_use(collectives), "ranks": ranks, **more}
    return report  # type: ignore[no-any-return]


def test_ranks_are_in_step_if_counts_match_in_every_group() -> None:
    steps = Steps()
    steps.update({0: {ALL: group_use(2), PAIR: group_use(1, [0, 2])}, 1: {ALL: group_use(2, messages={"to 2": 5})}})
    assert steps.uneven(2) == [StepMismatch(PAIR, {0: 1, 2: 0})]
    steps.update({2: {ALL: group_use(1), PAIR: group_use(1, [0, 2])}})
    assert steps.uneven(3) == [StepMismatch(ALL, {0: 2, 1: 2, 2: 1})]
    steps.update({2: {ALL: group_use(2), PAIR: group_use(1, [0, 2])}})
    assert steps.uneven(3) == []


def test_a_rank_that_left_a_group_is_not_behind() -> None:
    steps = Steps()
    steps.update({0: {PAIR: group_use(3, [0, 1])}, 1: {}})
    assert steps.uneven(2) == []


def test_an_accepted_difference_is_reported_after_further_collectives() -> None:
    steps = Steps()
    steps.update({0: {ALL: group_use(1)}, 1: {ALL: group_use(0)}})
    steps.accept(steps.uneven(2))
    assert steps.uneven(2) == []
    steps.update({0: {ALL: group_use(2)}, 1: {ALL: group_use(1)}})
    assert steps.uneven(2) == [StepMismatch(ALL, {0: 2, 1: 1})]
    steps.forget()
    assert steps.uneven(2) == []


def test_messages_are_compared_by_direction_since_the_last_report() -> None:
    steps = Steps()
    sent, received = {ALL: group_use(messages={"to 1": 1})}, {ALL: group_use(messages={"from 0": 1})}
    assert steps.are_messages_uneven({0: sent}, 2)
    assert not steps.are_messages_uneven({0: sent, 1: received}, 2)
    assert steps.are_messages_uneven({0: sent, 1: {ALL: group_use(messages={"to 0": 1})}}, 2)
    assert not steps.are_messages_uneven({0: sent, 1: {ALL: group_use(messages={"from any": 1})}}, 2)
    steps.update({0: sent})
    assert not steps.are_messages_uneven({0: sent}, 2)
    assert not steps.are_messages_uneven({0: {ALL: group_use(messages={"to 1": 2})}, 1: received}, 2)


def test_messages_of_a_pipeline_may_differ_in_number_between_ranks() -> None:
    steps = Steps()
    middle = group_use(messages={"from 0": 1, "to 2": 1}, ranks=[1, 3, 5])
    reports = {
        1: {PAIR: group_use(messages={"to 1": 1}, ranks=[1, 3, 5])},
        3: {PAIR: middle},
        5: {PAIR: group_use(messages={"from 1": 1}, ranks=[1, 3, 5])},
    }
    assert not steps.are_messages_uneven(reports, 6)
    del reports[5]
    assert steps.are_messages_uneven(reports, 6)
    reports[3][PAIR]["may_begin"] = "yes"
    assert steps.are_messages_uneven(reports, 6)
    reports[3][PAIR]["by_threads"] = True
    assert not steps.are_messages_uneven(reports, 6)


@pytest.mark.parametrize(
    ("ahead", "behind", "is_sure"),
    [
        ({}, {}, True),
        ({}, {"may_begin": "yes"}, False),
        ({"may_begin": "yes", "by_main": False}, {}, True),
        ({}, {"may_begin": "maybe"}, True),
        ({"by_main": False}, {"may_begin": "maybe"}, False),
    ],
)
def test_a_difference_is_certain_if_no_thread_can_resolve_it(
    ahead: dict[str, Any], behind: dict[str, Any], is_sure: bool
) -> None:
    steps = Steps()
    steps.update({0: {ALL: group_use(2, **ahead)}, 1: {ALL: group_use(1, **behind)}})
    assert [one.is_sure for one in steps.uneven(2)] == [is_sure]
    assert not any(one.by_threads for one in steps.uneven(2))


def test_groups_with_equal_names_and_different_ranks_are_different_groups() -> None:
    steps = Steps()
    steps.update({0: {PAIR: group_use(1, [0])}, 1: {PAIR: group_use(2, [1])}})
    assert steps.uneven(2) == []


def test_an_uneven_group_shows_the_count_of_each_rank() -> None:
    uneven = StepMismatch(ALL, {0: 4, 1: 5, 2: 5, 3: 5})
    assert uneven.text() == "the default group (rank 0: 4, ranks 1-3: 5)"
    assert (uneven.ahead, uneven.least) == ([1, 2, 3], 4)
    assert StepMismatch(PAIR, {0: 1, 2: 0}).text() == "a group of ranks 0, 2 (rank 2: 0, rank 0: 1)"
