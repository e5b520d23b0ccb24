"""A change of the group that is stopped at each of its steps."""

from __future__ import annotations

import os

import pytest

import ddip
from ddip.group.placement import Request

from ..cluster.changes import ranks_of, stopped_change

MOMENTS = 60


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that came in a generator's end
def test_a_change_that_is_stopped_ends_as_it_was_or_as_it_was_asked_to_be(size: int) -> None:
    others = ranks_of(os.getpid())
    with ddip.Group(4) as group:
        group.run("kept = f'rank {rank}'")
        whole = stopped_change(group, size, 10**9, others)
        for moment in range(MOMENTS):
            group.change(Request(n=4))
            stopped_change(group, size, 2 + moment * whole // MOMENTS, others)
