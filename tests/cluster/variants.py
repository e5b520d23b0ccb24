"""Select the few of many similar cases that run on each change."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def few(cases: Iterable[str], *kept: str) -> list[ParameterSet]:
    """Mark all `cases` as grid, but for those in `kept`, which run by default."""
    cases = list(cases)
    assert set(kept) <= set(cases)
    return [pytest.param(case, id=case, marks=[] if case in kept else pytest.mark.grid) for case in cases]
