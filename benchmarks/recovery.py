"""From a fault to a group that works again, with all variables; against starting the group afresh, in turns.

Usage: recovery.py [ROUNDS] [RANKS ...]

While the other ranks wait in all_reduce, one rank raises, or never comes and the user presses stop, or is killed and
replaced. ``ends``: from the fault until the cell has failed in the notebook (of an exception that includes the grace of
1 s that the other ranks get to end by themselves); ``usable``: until the next all_reduce over all ranks has succeeded.
``afresh`` is ``%makedip -r``, after which that all_reduce works too, but all variables are gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from rows import Row, show

from ddip import CellError, Group
from ddip.errors import CellInterrupted

SET_UP = "import time, torch, torch.distributed as dist\nx = torch.ones(1000)"
PROOF = "y = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"


def raises(group: Group) -> float:
    """Returns when it happened."""
    try:
        group.run("if rank == 0: raise ValueError\ndist.all_reduce(x)")
    except CellError as error:
        return error.by_rank[0].at
    raise AssertionError("did not fail")


def _while_rank_1_waits(group: Group, fault: Callable[[], None], code: str, fails: type[BaseException]) -> float:
    """Run `code`, which `fails`, and let the fault happen when rank 1 waits in all_reduce; returns when that was."""
    happened: list[float] = []

    def watch() -> None:
        place = None
        while place is None or place.function != "all_reduce":
            place = group.ranks.places([1])[1]
        happened.append(time.time())
        fault()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        group.run(code)
    except fails:
        thread.join()
        return happened[0]
    raise AssertionError("did not fail")


def interrupted(group: Group) -> float:
    """Returns when the stop button was pressed."""
    press_stop = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    return _while_rank_1_waits(group, press_stop, "if rank: dist.all_reduce(x)", CellInterrupted)


def killed(group: Group) -> float:
    """Returns when the rank was killed."""
    kill = lambda: os.kill(group.members[0].pid, signal.SIGKILL)  # noqa: E731
    return _while_rank_1_waits(group, kill, "time.sleep(1000) if rank == 0 else dist.all_reduce(x)", CellError)


def nothing(group: Group) -> float:
    """For comparison: what it takes without any fault to run the proof."""
    return time.time()


def afresh(group: Group) -> float:
    """Returns when it began."""
    began = time.time()
    group.restart()
    return began


NAMES = {
    raises: "a rank raises while others wait",
    interrupted: "stop is pressed while ranks wait",
    killed: "a rank is killed while others wait",
}


def main() -> None:
    """Print one table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    rows = []
    for size in map(int, sys.argv[2:] or ["2", "4", "8"]):
        ends: dict[str, list[float]] = {}
        usable: dict[str, list[float]] = {}
        with Group(size, timeout=120) as group:
            group.run(SET_UP)
            for _ in range(rounds):
                for fault in (*NAMES, afresh, nothing):
                    at = fault(group)
                    ends.setdefault(fault.__name__, []).append(time.time() - at)
                    if fault is killed:
                        group.repair(["x"], 1)
                    group.run("import torch, torch.distributed as dist\n" + PROOF)
                    usable.setdefault(fault.__name__, []).append(time.time() - at)
                    group.run(SET_UP)
        others = {"%makedip -r": usable["afresh"], "no fault": usable["nothing"]}
        for fault, what in NAMES.items():
            rows.append(Row(f"{what}: the cell is over", "s", size, ends[fault.__name__]))
            rows.append(Row(f"{what}: all ranks compute again", "s", size, usable[fault.__name__], others))
    show("recovery", rows)


if __name__ == "__main__":
    main()
