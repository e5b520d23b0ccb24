"""Causes of a process's end."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ddip.cluster import limits
from ddip.cluster.processes.exit_diagnosis import EngineLogs, HostMemory, cause_text, exit_text, log_end

PLENTY = HostMemory(100 * 10**9, 80 * 10**9, kills=3)
SHORT = HostMemory(100 * 10**9, 5 * 10**9, kills=3)
KILLED = HostMemory(100 * 10**9, 80 * 10**9, kills=4)


def test_exits_are_described_by_signal_or_code() -> None:
    assert [exit_text(code) for code in (-9, 3, None)] == ["SIGKILL", "exit code 3", "exit code unknown"]
    assert exit_text(-40) == "signal 40"


@pytest.mark.parametrize(
    ("code", "held", "now", "told"),
    [
        (
            -9,
            2 * 10**9,
            KILLED,
            "the OOM killer ended it, or another process (its last known memory use was",
        ),
        (-9, None, SHORT, "probably killed by the OOM killer (5.0 of 100.0 GB are free now)"),
        (
            -9,
            60 * 10**9,
            PLENTY,
            "probably killed by the OOM killer (its last known memory use was 60.0 GB; 80.0 of 100.0 GB",
        ),
        (
            -9,
            1 * 10**9,
            PLENTY,
            "killed from outside, or by the OOM killer (its last known memory use was 1.0 GB; 80.0 of 100.0 GB",
        ),
        (-11, None, PLENTY, "a crash in C code"),
        (-15, None, PLENTY, "someone ended it"),
        (3, None, PLENTY, "the cell, or a library, ended the process, as os._exit does"),
        (None, None, PLENTY, "someone ended it"),
    ],
)
def test_the_likely_cause_is_shown_with_its_figures(
    code: int | None, held: int | None, now: HostMemory, told: str
) -> None:
    assert cause_text(code, held, PLENTY, now).startswith(told)


def test_a_crash_shows_its_innermost_lines() -> None:
    log = "hello\nFatal Python error: Aborted\n\nThread 0x1:\n  File x\n\nCurrent thread 0x2:\n  File a\n  File b\nend"
    assert log_end(log, 3) == ["hello", "Fatal Python error: Aborted", "Current thread 0x2:", "  File a"]
    assert log_end("1\n2\n3", 2) == ["2", "3"]


def test_log_lines_from_before_the_last_cell_are_left_out(tmp_path: Path) -> None:
    logs, log = EngineLogs(), tmp_path / "log"
    log.write_text("while it started\n")
    logs.opened(0, log)
    assert logs.tail(0) == ["while it started"]
    with log.open("a") as more:
        more.write("an earlier cell's é\n")
    logs.cell_begins(0)
    assert logs.tail(0) == []
    with log.open("a") as more:
        more.write("this cell's\n")
    assert logs.tail(0) == ["this cell's"]
    logs.closed(0, log.read_text())
    log.unlink()
    assert logs.tail(0) == ["this cell's"]
    log.write_text("anew\n")  # as when a log that grew too long starts over
    assert logs.tail(0) == ["anew"]


def test_memory_is_read_from_this_host() -> None:
    now = HostMemory.now()
    assert 0 < now.available <= now.total <= psutil.virtual_memory().total
    assert now.kills >= 0


def test_the_page_cache_of_a_control_group_counts_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"max": "1000", "current": "900", "stat": "anon 200\ninactive_file 700\n", "events": "oom_kill 0\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(limits, "control_groups", lambda *where: [tmp_path])
    now = HostMemory.now()
    assert (now.total, now.available) == (1000, 800)
