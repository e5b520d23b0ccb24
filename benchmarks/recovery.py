"""Time the recovery from a fault with all variables kept, against a restart of the group, alternating.

Usage: recovery.py [ROUNDS] [RANKS ...]

While the other ranks wait in all_reduce, one rank raises, or never joins and the user presses stop, or is killed and
replaced. ``ends``: from the fault until the cell has failed in the notebook; ``usable``: until the next all_reduce over
all ranks has succeeded. Groups of more than 8 ranks have a quarter of the rounds. ``restart_group`` is ``%makedip -r``:
the all_reduce works then, but all variables are lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from rows import Row, report_rows

from ddip import CellError, Group
from ddip.errors import CellInterrupted

SET_UP = "import time, torch, torch.distributed as dist\nx = torch.ones(1000)"
WAIT_FOR_0 = "time.sleep(1000) if rank == 0 else dist.all_reduce(x)"
PROOF = "y = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"


def raise_on_rank_0(group: Group) -> float:
    """Raise on rank 0 while the others wait; return the time of the exception."""
    try:
        group.run("if rank == 0: raise ValueError\ndist.all_reduce(x)")
    except CellError as error:
        return error.by_rank[0].at
    raise AssertionError("did not fail")


def _cause_fault_while_rank_1_waits(
    group: Group, fault: Callable[[], None], code: str, error_type: type[BaseException]
) -> float:
    """Run `code` and cause `fault` when rank 1 waits in all_reduce; return the time of the fault.

    The cell must fail with `error_type`.
    """
    happened: list[float] = []

    def watch() -> None:
        place = None
        while place is None or place.function != "all_reduce":
            place = group.ranks.stack_locations([1])[1]
        happened.append(time.time())
        fault()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        group.run(code)
    except error_type:
        thread.join()
        return happened[0]
    raise AssertionError("did not fail")


def press_stop_button(group: Group) -> float:
    """Press the stop button while rank 1 waits; return the time."""
    press_stop = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    return _cause_fault_while_rank_1_waits(group, press_stop, WAIT_FOR_0, CellInterrupted)


def kill_rank_0(group: Group) -> float:
    """Kill rank 0 while rank 1 waits; return the time."""
    kill_process = lambda: os.kill(group.members[0].pid, signal.SIGKILL)  # noqa: E731
    return _cause_fault_while_rank_1_waits(group, kill_process, WAIT_FOR_0, CellError)


def cause_no_fault(group: Group) -> float:
    """Cause no fault: the baseline that only runs the proof."""
    return time.time()


def restart_group(group: Group) -> float:
    """Restart the group; return the time when it began."""
    began = time.time()
    group.restart()
    return began


NAMES = {
    raise_on_rank_0: "a rank raises while others wait",
    press_stop_button: "stop is pressed while ranks wait",
    kill_rank_0: "a rank is killed while others wait",
}


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    rows = []
    for size in map(int, sys.argv[2:] or ["2", "4", "8", "16", "64"]):
        ends: dict[str, list[float]] = {}
        usable: dict[str, list[float]] = {}
        with Group(size, timeout=120) as group:
            group.run(SET_UP)
            for _ in range(rounds if size <= 8 else max(3, rounds // 4)):
                for fault in (*NAMES, restart_group, cause_no_fault):
                    at = fault(group)
                    ends.setdefault(fault.__name__, []).append(time.time() - at)
                    if fault is kill_rank_0:
                        group.repair(["x"], 1)
                    group.run("import torch, torch.distributed as dist\n" + PROOF)
                    usable.setdefault(fault.__name__, []).append(time.time() - at)
                    group.run(SET_UP)
        others = {"%makedip -r": usable["restart_group"], "no fault": usable["cause_no_fault"]}
        for fault, what in NAMES.items():
            rows.append(Row(f"{what}: the cell is over", "s", size, ends[fault.__name__]))
            rows.append(Row(f"{what}: all ranks compute again", "s", size, usable[fault.__name__], others))
    report_rows("recovery", rows)


if __name__ == "__main__":
    main()
