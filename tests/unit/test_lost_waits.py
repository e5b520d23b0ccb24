"""gloo without the internals that ddip looks for, as on another system or with another torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddip.rank.native import lost_waits


@pytest.fixture(autouse=True)
def clear_gloo_cache() -> Iterator[None]:
    lost_waits._find_gloo.cache_clear()
    yield
    lost_waits._find_gloo.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [("LIBRARY", Path("not_there.so")), ("VTABLE", "not_there"), ("ABORT_FUNCTIONS", ("not_there",))],
)
def test_without_the_gloo_methods_no_wait_is_found_or_ended(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_waits, name, value)
    assert lost_waits.find_waits() == {}
    lost_waits.end_waits({1})
