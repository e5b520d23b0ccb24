"""Vital figures of a rank for ``%dipwatch``, read on the control thread while a user watches."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path

from ddip.protocol.reports import Vitals
from ddip.rank.objects import iteration
from ddip.rank.process_group import collectives
from ddip.rank.process_group.waiting import waiting
from ddip.rank.runtime import stacks
from ddip.rank.runtime.housekeeping import rank_figures
from ddip.rank.runtime.nvml import driver
from ddip.rank.streams.streams import RankStream

BAR = re.compile(r"(\d+)/(\d+) \[|\[(\d+)/(\d+) \d")
"""Position and total as tqdm and fastprogress print them."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def current_vitals(every: float, keep: float) -> Vitals:
    """Return the current figures without waiting, and sample waits for other ranks from now on.

    Samples are taken each `every` seconds for the next `keep` seconds.
    """
    waiting.watch(every, keep)
    common = rank_figures()
    return {
        **common,
        "at": time.monotonic(),
        "cell": stacks.running_cell() if common["busy"] else None,
        "place": stacks.main_thread_location(),
        "cpu": _cpu_seconds(),
        "steps": iteration.steps_taken,
        "collectives": _count_collectives(),
        "bars": list_bars() if common["busy"] else [],
        "waited": waiting.seconds if waiting.is_known else None,
        "looked": waiting.looked,
        "device": driver.figures(),
    }


def _count_collectives() -> int:
    with contextlib.suppress(Exception):  # a group is being made or left right now
        return sum(collectives.counts_by_group().values())
    return 0


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its children in seconds.

    Running children, such as data loader workers, count only if the main thread has started them.
    """
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    pid = os.getpid()
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # the child has ended
                fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b")")[2].split()
                seconds += sum(map(int, fields[11:15])) / TICKS_PER_SECOND  # utime to cstime of proc(5)
    return seconds


def list_bars() -> list[tuple[int, int | None]]:
    """Return position and total of each progress bar of this process; the total is None if unknown."""
    return _tqdm_bars() or _printed_bars()


def _tqdm_bars() -> list[tuple[int, int | None]]:
    """Return the bars of tqdm, including widgets, from the set in which tqdm keeps its instances."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    with contextlib.suppress(Exception):  # a bar may begin or end right now, or be of a subclass with other attributes
        instances = sorted(getattr(tqdm, "_instances", ()), key=lambda bar: abs(bar.pos)) if tqdm is not None else []
        return [(int(bar.n), None if bar.total is None else int(bar.total)) for bar in instances if not bar.disable]
    return []


def _printed_bars() -> list[tuple[int, int | None]]:
    """Return the bars in the text that was printed last; fastprogress shows several at once."""
    last = re.split(r"[\r\n]", RankStream.last_text.rstrip("\r\n"))[-1]
    found = [match for match in BAR.findall(last) if any(match)]
    return [(int(a or c), int(b or d)) for a, b, c, d in found]
