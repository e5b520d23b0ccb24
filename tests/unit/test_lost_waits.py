"""Where gloo has not what ddip looks for: another system, another torch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddip.rank import lost_waits


@pytest.fixture(autouse=True)
def looks_again() -> Iterator[None]:
    lost_waits._gloo.cache_clear()
    yield
    lost_waits._gloo.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [("LIBRARY", Path("not_there.so")), ("METHODS", "not_there"), ("ENDING", ("not_there",))],
)
def test_without_gloos_methods_no_wait_is_found_and_none_is_ended(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_waits, name, value)
    assert lost_waits.waits() == {}
    lost_waits.end({1})
    assert not lost_waits.is_known()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a thread waits for")
def test_a_thread_that_computes_waits_for_nobody_and_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    waits = lost_waits.Waits([str(threading.get_native_id())])
    assert lost_waits.is_known() and not waits.look()
    waits.close()
    waits.close()
    with pytest.raises(OSError):
        lost_waits.Waits(["0"])
    assert len(os.listdir("/proc/self/fd")) == before
