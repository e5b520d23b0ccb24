"""Digests of collectives: pure decisions about which groups have met in different ones."""

from __future__ import annotations

from typing import Any

import pytest

from ddip.group.process_group.signatures import find_different
from ddip.protocol import on_rank
from ddip.protocol.on_rank import RemoteCall
from ddip.protocol.reports import Begun

from .test_steps import ALL, PAIR, group_use


class _Ranks:
    """A stand-in for ranks that tell the `digests` of their earlier collectives."""

    def __init__(self, size: int, digests: dict[int, tuple[int, int, int] | None] | None = None) -> None:
        self.members, self.digests, self.asked = [None] * size, digests or {}, 0

    def call_on_control_channel(self, ranks: list[int], call: RemoteCall[Any], seconds: float) -> dict[int, Any]:
        assert call.target == on_rank.digests_up_to.target
        self.asked = call.args[1]
        return {rank: self.digests[rank] for rank in ranks}


def found_members(begun: dict[int, Begun], size: int, ranks: _Ranks | None = None) -> dict[str, list[int]]:
    found = find_different(ranks or _Ranks(size), begun)  # type: ignore[arg-type]
    return {group: different.members for group, different in found.items()}


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
    assert found_members(begun, 2) == ({ALL: [0, 1]} if is_different else {})


@pytest.mark.parametrize(
    ("digests", "is_different"),
    [
        ((7, 4, 0), True),
        ((7, 0, 0), False),
        ((6, 4, 0), False),  # C++ has begun one of them
        (None, False),  # too long ago, or the rank has ended
    ],
)
def test_ranks_that_are_out_of_step_are_compared_as_far_as_all_came(
    digests: tuple[int, int, int] | None, is_different: bool
) -> None:
    ranks = _Ranks(2, {0: (7, 0, 0), 1: digests})
    found = found_members({0: {ALL: group_use(7)}, 1: {ALL: group_use(8, digest=5)}}, 2, ranks)
    assert found == ({ALL: [0, 1]} if is_different else {}) and ranks.asked == 7


def test_a_subgroup_is_compared_once_its_ranks_are_known() -> None:
    begun: dict[int, Begun] = {0: {PAIR: group_use(1, [0, 2])}, 1: {}}
    assert found_members(begun, 3) == {}
    assert found_members({**begun, 2: {PAIR: group_use(1, [0, 2], digest=5)}}, 3) == {PAIR: [0, 2]}


def test_ranks_without_a_report_do_not_hide_a_difference_of_others() -> None:
    assert found_members({0: {ALL: group_use(7)}, 2: {ALL: group_use(7, digest=5)}}, 3) == {ALL: [0, 2]}
