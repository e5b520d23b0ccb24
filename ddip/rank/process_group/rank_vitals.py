"""What a rank tells of itself while somebody watches it (``%dipwatch``), from the control thread."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddip.protocol.reports import Vitals
from ddip.rank.process_group import collectives
from ddip.rank.process_group.waiting import waiting
from ddip.rank.runtime import stacks
from ddip.rank.runtime.housekeeping import figures
from ddip.rank.runtime.nvml import driver
from ddip.rank.streams.streams import RankStream

BAR = re.compile(r"(\d+)/(\d+) \[|\[(\d+)/(\d+) \d")
"""How tqdm and fastprogress write how far they are."""
TICKS = os.sysconf("SC_CLK_TCK")


class Steps:
    """How many steps optimizers have taken in this process."""

    taken = 0


def watch() -> None:
    """Once, before an optimizer can be in a step: count their steps."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():  # torch.compile would make the count a part of what it compiles
        Steps.taken += 1


def now(every: float, keep: float) -> Vitals:
    """All there is to tell; for `keep` seconds from now on it is looked `every` so many whether this rank waits."""
    waiting.watch(every, keep)
    known = figures()
    return {
        **known,
        "at": time.monotonic(),
        "cell": stacks.running_cell() if known["busy"] else None,
        "place": stacks.here(),
        "cpu": _cpu(),
        "steps": Steps.taken,
        "collectives": _collectives(),
        "bars": bars() if known["busy"] else [],
        "waited": waiting.seconds if waiting.is_known else None,
        "looked": waiting.looked,
        "device": driver.figures(),
    }


def _collectives() -> int:
    with contextlib.suppress(Exception):  # a group that is just being made, or left
        return sum(collectives.counts().values())
    return 0


def _cpu() -> float:
    """Of this process and its children; of those that run, such as workers of data loaders, only the main thread's."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    pid = os.getpid()
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b")")[2].split()
                seconds += sum(map(int, fields[11:15])) / TICKS  # utime to cstime of proc(5)
    return seconds


def bars() -> list[tuple[int, int | None]]:
    """How far the progress bars of this process are."""
    return _of_tqdm() or _written()


def _of_tqdm() -> list[tuple[int, int | None]]:
    """Of tqdm's bars, also those that are widgets; tqdm itself looks through them to place a new one."""
    kind = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    with contextlib.suppress(Exception):  # one that begins or ends just now, or a class made of tqdm's
        there = sorted(getattr(kind, "_instances", ()), key=lambda bar: abs(bar.pos)) if kind is not None else []
        return [(int(bar.n), None if bar.total is None else int(bar.total)) for bar in there if not bar.disable]
    return []


def _written() -> list[tuple[int, int | None]]:
    """Of bars that were shown last; fastprogress shows several at once."""
    last = re.split(r"[\r\n]", RankStream.last_text.rstrip("\r\n"))[-1]
    found = [match for match in BAR.findall(last) if any(match)]
    return [(int(a or c), int(b or d)) for a, b, c, d in found]
