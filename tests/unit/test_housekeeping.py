"""The times of a rank's housekeeping between cells."""

from __future__ import annotations

import weakref
from collections.abc import Generator

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


class Tensor:
    """Stand-in for memory that a frame holds."""


def test_a_failed_cell_frees_ended_generators_and_no_suspended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "get_ipython", lambda: None)

    def yield_error() -> Generator[Exception | int, None, None]:
        yield 0
        try:
            raise KeyError
        except KeyError as error:
            yield error
        yield 1

    def fail_at_yield(held: Tensor) -> Generator[int, None, None]:
        yield 0
        raise ValueError

    suspended, tensors = yield_error(), [Tensor(), Tensor()]
    next(suspended)
    cause = next(suspended)
    assert isinstance(cause, KeyError)
    thrown, raised = map(fail_at_yield, tensors)
    freed_tensors = list(map(weakref.ref, tensors))
    del tensors
    errors = [cause]
    next(raised)
    next(thrown)
    for resume in (lambda: next(raised), lambda: thrown.throw(TypeError())):
        try:
            resume()
        except Exception as error:
            errors.append(error)
    housekeeping._free_frames(ExceptionGroup("all", errors))
    assert [tensor() for tensor in freed_tensors] == [None, None] and errors
    assert next(suspended) == 1
