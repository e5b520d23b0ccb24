"""Snapshots of busy ranks on other hosts: large values arrive in parts beside their cells."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ddip
from ddip.errors import TransferError

from ..cluster.leftovers import wait_until
from .network import Network

SIZE = 5_000_000
CELL = f"""
import numpy, threading, time
large, lock, step = numpy.arange({SIZE}) + rank, threading.Lock(), 0
class Bad:
    def __reduce__(self):
        with lock: return int, ()
bad = Bad(); lock.acquire()
try:
    while True: step += 1; time.sleep(0.001)
except KeyboardInterrupt: pass
lock.release()
"""


def have_names(group: ddip.Group, names: list[str]) -> bool:
    """Return whether both ranks have these variables already."""
    try:
        group.peek_all([name for name in names if name != "lock"], [0, 1])
    except TransferError:
        return False
    return True


def test_a_busy_rank_of_another_host_gives_a_snapshot(hosts: Network) -> None:
    with ddip.Group(1, hosts="h1,h2") as group:
        cell = threading.Thread(target=group.run, args=(CELL,), kwargs={"quiet": True})
        cell.start()
        wait_until(lambda: have_names(group, ["lock", "step"]))
        values, _ = group.peek_all(["step", "rank"], [0, 1], seconds=20)
        assert [value["rank"] for value in values] == [0, 1]
        wait_until(lambda: group.peek(["step"])["step"] > values[0]["step"])
        values, _ = group.peek_all(["large"], [0, 1], seconds=20)
        assert all((value["large"] == np.arange(SIZE) + rank).all() for rank, value in enumerate(values))
        with pytest.raises(TransferError, match="rank 1 .*0.3 s: .*bad, .*line 5: "):
            group.peek(["bad"], 1, seconds=0.3)
        group.interrupt()
        cell.join()
