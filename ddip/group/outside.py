"""What can be known of a rank's process from outside, and done to it, where it does not answer."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from ddip.cluster import processes
from ddip.protocol import dump
from ddip.protocol.location import StackLocation

SIGNAL_SECONDS = 0.3
"""How long a rank that does not answer may take to write down where it is."""


def connections(pid: int) -> list[tuple[Any, ...]]:
    """Both ends of each TCP connection of a process; none if it has ended."""
    with contextlib.suppress(psutil.Error):
        return [(*c.laddr, *c.raddr) for c in psutil.Process(pid).net_connections("tcp") if c.raddr]
    return []


def place(pid: int, run_folder: Path) -> StackLocation | None:
    """Where a rank is, though it cannot answer; None if it does not even take a signal."""
    stopped = processes.stopped_text(pid)
    if stopped:
        return StackLocation(inner=stopped, state="stopped")
    if dump.SIGNAL is None:
        return None
    path = dump.file_of(run_folder, pid)
    try:
        before = path.stat().st_size
        os.kill(pid, dump.SIGNAL)
        deadline = time.monotonic() + SIGNAL_SECONDS
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            former, text = text, path.read_text()[before:]
            if text and text == former:  # it is written piece by piece
                return dump.place_in(text)
    except OSError:
        pass  # it has ended just now, or is on a system without such a signal
    return None


def carry_on(pids: Iterable[int]) -> None:
    """Continue those that a signal has stopped."""
    for pid in pids:
        if processes.stopped_text(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
