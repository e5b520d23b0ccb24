"""The times of a rank's housekeeping between cells."""

from __future__ import annotations

import pytest

from ddip.rank.native import freed
from ddip.rank.runtime import housekeeping


@pytest.mark.parametrize(("took", "seconds"), [(0.0, 0.02), (0.001, 0.02), (0.07, 0.35), (5.0, 0.5)])
def test_a_slow_garbage_collection_waits_until_no_cell_is_likely(took: float, seconds: float) -> None:
    assert housekeeping.rest_after(took) == pytest.approx(seconds)


@pytest.mark.parametrize("setting", ["MALLOC_TRIM_THRESHOLD_=131072", "DDIP_NATIVE_HEAP=0"])
def test_an_allocator_chosen_by_the_user_stays(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(*setting.split("="))
    freed.keep_freed_memory()
    assert not freed._keeps_memory
