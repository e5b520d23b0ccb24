"""The errors that a cell raises on ranks, asserted by class and rank rather than by the wording of messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest

from ddip.errors import CellError


@contextlib.contextmanager
def raises_on_ranks(
    raised: Mapping[int, str], blocked: Mapping[int, str] | None = None
) -> Iterator[pytest.ExceptionInfo[CellError]]:
    """Expect a CellError, not a CellTimeout, in which exactly these ranks failed.

    `raised`: class name of each rank's own error. `blocked`: beginning of the location at which each other rank waited
    until ddip aborted the wait; "" is any location.
    """
    with pytest.raises(CellError) as caught:
        yield caught
    error = caught.value
    assert type(error) is CellError, error
    own = {rank: found.name for rank, found in error.by_rank.items() if not found.waited}
    waited = {rank: found.waited for rank, found in error.by_rank.items() if found.waited}
    assert own == dict(raised), error
    places = dict(blocked or {})
    assert waited.keys() == places.keys(), error
    assert all(waited[rank].startswith(place) for rank, place in places.items()), (waited, error)
