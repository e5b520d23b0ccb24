"""A change of the group that is stopped at each of its steps."""

from __future__ import annotations

import pytest

from ..cluster.changes import prove_stopped_changes

MOMENTS = 60


@pytest.mark.parametrize("size", [2, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
# A stop may come while a generator is finalized
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stopped_change_ends_unchanged_or_complete(size: int) -> None:
    prove_stopped_changes(4, size, [moment / MOMENTS for moment in range(MOMENTS)])
