"""The times of a rank's housekeeping between cells."""

from __future__ import annotations

import pytest

from ddip.rank.native import freed
from ddip.rank.runtime import housekeeping, process_settings


@pytest.mark.parametrize(("took", "seconds"), [(0.0, 0.02), (0.001, 0.02), (0.07, 0.35), (5.0, 0.5)])
def test_a_slow_garbage_collection_waits_until_no_cell_is_likely(took: float, seconds: float) -> None:
    assert housekeeping.rest_after(took) == pytest.approx(seconds)
    assert housekeeping.rest_after(took, ranks_per_core=32.0) == pytest.approx(0.64)


@pytest.mark.parametrize("setting", ["MALLOC_TRIM_THRESHOLD_=131072", "DDIP_NATIVE_HEAP=0"])
def test_an_allocator_chosen_by_the_user_stays(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(*setting.split("="))
    freed.keep_freed_memory()
    assert not freed._keeps_memory


def test_ddips_thread_count_is_not_a_setting_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_settings, "_start", {})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    process_settings.note_start()
    housekeeping._set_threads(1)
    assert not {"$OMP_NUM_THREADS", "$MKL_NUM_THREADS"} & process_settings.find_changed().keys()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "$OMP_NUM_THREADS" in process_settings.find_changed()
