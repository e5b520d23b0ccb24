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
import statistics
import sys
import threading
import time
from collections.abc import Callable

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


def main() -> None:
    """Print one table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print(f"median (worst) of {rounds} in turns, seconds")
    print(f"{'ranks':>5} {'fault':>12} {'ends':>14} {'usable':>14}")
    for size in sys.argv[2:] or ["2", "4", "8"]:
        times: dict[str, list[tuple[float, float]]] = {}
        with Group(int(size)) as group:
            group.run(SET_UP)
            for _ in range(rounds):
                for fault in (raises, interrupted, killed, afresh, nothing):
                    at = fault(group)
                    ended = time.time()
                    if fault is killed:
                        group.repair(["x"], 1)
                    group.run("import torch, torch.distributed as dist\n" + PROOF)
                    times.setdefault(fault.__name__, []).append((ended - at, time.time() - at))
                    group.run(SET_UP)
        for name, pairs in times.items():
            columns = [f"{statistics.median(column):.2f} ({max(column):.2f})" for column in zip(*pairs, strict=True)]
            print(f"{size:>5} {name:>12} {columns[0]:>14} {columns[1]:>14}")


if __name__ == "__main__":
    main()
