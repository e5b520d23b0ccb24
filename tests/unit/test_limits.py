"""Checks of the system's limits for a group."""

from __future__ import annotations

import threading
from dataclasses import replace

import psutil
import pytest

from ddip.cluster.limits import Limits, find_shortage, user_threads

NONE = Limits(float("inf"), float("inf"), float("inf"), float("inf"))


def test_a_usual_system_has_enough() -> None:
    assert find_shortage(2, 0, NONE, 40, 0) == ""
    assert find_shortage(64, 0, Limits(1024, 4096, 30_000, float("inf")), 60, 900) == ""


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            replace(NONE, files=128, most_files=128),
            "2 ranks: the controller opens up to 139 files, and the limit is 128;",
        ),
        (replace(NONE, files=60), "2 ranks: a rank opens 64 files, and the limit is 60; raise it with ulimit -n 64"),
        (replace(NONE, files=70), "2 ranks: the notebook opens 72 files, and the limit is 70;"),
        (
            replace(NONE, threads=80),
            "2 ranks: 52 more threads and processes are needed, this user has 30, and may have 80",
        ),
    ],
)
def test_a_low_limit_is_named_with_its_figures(limits: Limits, said: str) -> None:
    text = find_shortage(2, 0, limits, 40, 30)
    assert text.startswith(said) and "before Jupyter starts" in text


def test_running_ranks_need_no_additional_resources() -> None:
    limits = replace(NONE, files=80, threads=80)
    assert find_shortage(2, 2, limits, 60, 70) == ""
    assert "16 more threads" in find_shortage(3, 2, limits, 60, 70)


def test_the_threads_of_all_processes_of_the_user_are_counted() -> None:
    end = threading.Event()
    for _ in range(50):
        threading.Thread(target=end.wait, daemon=True).start()
    try:
        assert user_threads() >= psutil.Process().num_threads() > 50
    finally:
        end.set()
