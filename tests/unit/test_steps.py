"""Who has begun more collectives than others: pure decisions."""

from __future__ import annotations

from ddip.group.steps import Steps, Uneven

ALL, PAIR = "default cpu", "1 cpu"


def test_ranks_are_in_step_if_they_have_begun_as_many_in_each_of_their_groups() -> None:
    steps = Steps()
    steps.take({0: {ALL: (2, 0, None), PAIR: (1, 0, [0, 2])}, 1: {ALL: (2, 5, None)}})
    assert steps.uneven(2) == [Uneven(PAIR, {0: 1, 2: 0})]
    steps.take({2: {ALL: (1, 0, None), PAIR: (1, 0, [0, 2])}})
    assert steps.uneven(3) == [Uneven(ALL, {0: 2, 1: 2, 2: 1})]
    steps.take({2: {ALL: (2, 0, None), PAIR: (1, 0, [0, 2])}})
    assert steps.uneven(3) == []


def test_a_rank_that_has_left_a_group_is_not_behind() -> None:
    steps = Steps()
    steps.take({0: {PAIR: (3, 0, [0, 1])}, 1: {}})
    assert steps.uneven(2) == []


def test_a_difference_that_is_meant_is_news_again_when_more_is_begun() -> None:
    steps = Steps()
    steps.take({0: {ALL: (1, 0, None)}, 1: {ALL: (0, 0, None)}})
    steps.accept(steps.uneven(2))
    assert steps.uneven(2) == []
    steps.take({0: {ALL: (2, 0, None)}, 1: {ALL: (1, 0, None)}})
    assert steps.uneven(2) == [Uneven(ALL, {0: 2, 1: 1})]
    steps.forget()
    assert steps.uneven(2) == []


def test_sends_count_since_they_were_told_last() -> None:
    steps = Steps()
    assert steps.are_sends_uneven({0: {ALL: (0, 1, None)}}, 2)
    steps.take({0: {ALL: (0, 1, None)}})
    assert not steps.are_sends_uneven({0: {ALL: (0, 1, None)}}, 2)
    assert not steps.are_sends_uneven({0: {ALL: (0, 2, None)}, 1: {ALL: (0, 1, None)}}, 2)


def test_an_uneven_group_says_which_ranks_have_begun_how_many() -> None:
    uneven = Uneven(ALL, {0: 4, 1: 5, 2: 5, 3: 5})
    assert uneven.text() == "the default group (rank 0: 4, ranks 1-3: 5)"
    assert (uneven.ahead, uneven.least) == ([1, 2, 3], 4)
    assert Uneven(PAIR, {0: 1, 2: 0}).text() == "a group of ranks 0, 2 (rank 2: 0, rank 0: 1)"
