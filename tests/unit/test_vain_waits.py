"""Waits that can never end: pure decisions from the numbers of operations that ranks have begun."""

from __future__ import annotations

import pytest

from ddip.group.cells import vain_waits
from ddip.protocol.reports import Begun

from .test_steps import ALL, PAIR, group_use


@pytest.mark.parametrize(
    ("begun", "ended", "is_vain"),
    [
        ({ALL: group_use(8)}, {ALL: group_use(7)}, True),
        ({ALL: group_use(7)}, {ALL: group_use(7)}, False),
        ({ALL: group_use(7)}, {ALL: group_use(8)}, False),
        ({ALL: group_use(8)}, {}, False),  # it has left the group, or cannot know
        ({ALL: group_use(8)}, {ALL: group_use(7, may_begin="yes")}, False),
        ({ALL: group_use(8)}, {ALL: group_use(7, may_begin="maybe")}, False),
        ({ALL: group_use(7), PAIR: group_use(1, [1, 2])}, {ALL: group_use(7)}, False),
        ({ALL: group_use(7), PAIR: group_use(1, [0, 1])}, {ALL: group_use(7), PAIR: group_use(0, [0, 1])}, True),
        ({PAIR: group_use(1, [0, 1])}, {PAIR: group_use(0, [0, 2])}, False),  # another group of this name
        ({ALL: group_use(messages={"from 0": 2})}, {ALL: group_use(messages={"to 1": 1})}, True),
        ({ALL: group_use(messages={"from 0": 2})}, {ALL: group_use(messages={"to 1": 2})}, False),
        ({ALL: group_use(messages={"to 0": 1})}, {ALL: group_use()}, True),
        ({ALL: group_use(messages={"to 0": 1})}, {ALL: group_use(messages={"from any": 1})}, False),
    ],
)
def test_a_wait_is_vain_if_the_other_rank_finished(begun: Begun, ended: Begun, is_vain: bool) -> None:
    assert vain_waits.find_missing(1, begun, {0: ended}, 3) == ({0} if is_vain else set())


def test_only_group_members_without_the_collective_are_missing() -> None:
    ended = {0: {ALL: group_use(8)}, 2: {ALL: group_use(7), PAIR: group_use(0, [1, 2])}}
    assert vain_waits.find_missing(1, {ALL: group_use(8)}, ended, 3) == {2}
    assert vain_waits.find_missing(1, {ALL: group_use(7), PAIR: group_use(1, [1, 2])}, ended, 3) == {2}


def test_operations_of_earlier_cells_are_not_waited_for() -> None:
    begun, former = {ALL: group_use(8, messages={"to 0": 1})}, {ALL: group_use(8, messages={"to 0": 1})}
    assert not vain_waits.find_missing(1, begun, {0: {ALL: group_use(7)}}, 3, former)
    assert vain_waits.find_missing(1, {ALL: group_use(9)}, {0: {ALL: group_use(7)}}, 3, former)
    assert vain_waits.find_missing(1, {ALL: group_use(8, messages={"to 0": 2})}, {0: {ALL: group_use(8)}}, 3, former)


def test_an_ended_process_must_be_in_every_used_group() -> None:
    former, begun = {ALL: group_use(3), PAIR: group_use(1, [1, 2])}, {ALL: group_use(4), PAIR: group_use(1, [1, 2])}
    assert vain_waits.uses_groups_of([0], begun, former, 3)
    assert not vain_waits.uses_groups_of([0], {**begun, PAIR: group_use(2, [1, 2])}, former, 3)
    assert not vain_waits.uses_groups_of([0], former, former, 3)  # it waits in something else
    assert not vain_waits.uses_groups_of([], begun, former, 3)
