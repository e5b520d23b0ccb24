"""Digests of collectives: pure decisions about which groups have met in different ones."""

from __future__ import annotations

from typing import Any

import pytest

from ddip.group.process_group.signatures import find_different

from .test_steps import ALL, PAIR, group_use


@pytest.mark.parametrize(
    ("change", "is_different"),
    [
        ({}, False),
        ({"digest": 5}, True),
        ({"digest": 5, "by_python": 6}, False),  # C++ has begun a collective that Python has begun on the other rank
        ({"digest": 5, "positions": 6}, False),  # as before, and the numbers have evened out since
        ({"digest": 5, "by_threads": True}, False),  # threads may have begun them in another order
    ],
)
def test_equal_numbers_of_different_collectives_are_found(change: dict[str, Any], is_different: bool) -> None:
    begun = {0: {ALL: group_use(7)}, 1: {ALL: group_use(7, **change)}}
    assert find_different(begun, 2) == ({ALL: [0, 1]} if is_different else {})


def test_ranks_that_are_out_of_step_are_not_compared() -> None:
    assert find_different({0: {ALL: group_use(7)}, 1: {ALL: group_use(8, digest=5)}}, 2) == {}


def test_a_subgroup_is_compared_once_its_ranks_are_known() -> None:
    begun = {0: {PAIR: group_use(1, [0, 2])}, 1: {}}
    assert find_different(begun, 3) == {}
    assert find_different({**begun, 2: {PAIR: group_use(1, [0, 2], digest=5)}}, 3) == {PAIR: [0, 2]}
