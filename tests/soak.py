"""Run many cells on four ranks with random faults; prove that nothing is lost or leaked.

    python tests/soak.py [CELLS [SEED]]

After each fault the same proof runs: an all_reduce over all ranks is right, and every rank that was not killed still
counts the cells that it has seen.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil

import ddip
from ddip.cluster.processes import preload_client
from ddip.errors import CellInterrupted, CellTimeout

RANKS = 4
SET_UP = """
import os, signal, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
seen = globals().get("seen", 0)
net = globals().get("net") or torch.nn.Linear(8, 8)
"""
PROOF = """
y = torch.full((3,), float(rank))
dist.all_reduce(y)
assert y.tolist() == [world_size * (world_size - 1) / 2] * 3
seen += 1
"""
WORK = {
    "all_reduce": "dist.all_reduce(torch.ones(1000))",
    "barrier": "dist.barrier()",
    "objects": "dist.all_gather_object([None] * world_size, {'rank': rank})",
    "DDP": "model = DDP(net); model(torch.ones(4, 8)).sum().backward()",
    "subgroup": "dist.all_reduce(torch.ones(3), group=dist.new_group(list(range(world_size))))",
}


class Soak:
    """One run."""

    def __init__(self, group: ddip.Group, seed: int) -> None:
        self.group = group
        self.random = random.Random(seed)
        self.expected = [0] * RANKS
        self.seconds: dict[str, list[float]] = {}

    def prove(self) -> None:
        """Prove that the group works, and every rank has its variables."""
        self.group.run(SET_UP + PROOF)
        self.expected = [count + 1 for count in self.expected]
        found = [values["seen"] for values in self.group.pull_all(["seen"], range(RANKS))[0]]
        assert found == self.expected, f"ranks have seen {found} cells, not {self.expected}"

    def fault(self) -> str:
        """Cause a random fault, and prove that it did no harm; return its name."""
        name = self.random.choice(["before", "in", "after", "all", "interrupt", "interrupt", "kill", "timeout", "none"])
        work = self.random.choice(list(WORK.values()))
        culprit = self.random.randrange(RANKS)
        began = time.monotonic()
        getattr(self, f"_{name}")(work, culprit)
        self.prove()
        self.seconds.setdefault(name, []).append(time.monotonic() - began)
        return name

    def _fails(self, code: str) -> None:
        try:
            self.group.run(code)
        except ddip.CellError:
            return
        raise AssertionError(f"did not fail: {code}")

    def _before(self, work: str, culprit: int) -> None:
        self._fails(f"if rank == {culprit}: raise ValueError\n{work}")

    def _in(self, work: str, culprit: int) -> None:
        delay = self.random.uniform(0, 0.2)
        self._fails(f"for step in range(5): {work}\nif rank == {culprit}: time.sleep({delay}); 1 / 0\n{work}")

    def _after(self, work: str, culprit: int) -> None:
        self._fails(f"{work}\nif rank == {culprit}: raise ValueError")

    def _all(self, work: str, culprit: int) -> None:
        self._fails(f"{work}\nraise KeyError(rank)")

    def _none(self, work: str, culprit: int) -> None:
        self.group.run(work)

    def _timeout(self, work: str, culprit: int) -> None:
        try:
            self.group.run(f"if rank == {culprit}: time.sleep(1000)\n{work}", timeout=0.3)
        except CellTimeout:
            return
        raise AssertionError("did not run into its time limit")

    def _interrupt(self, work: str, culprit: int) -> None:
        """Press stop at a random moment of a cell that ends by itself, or never ends."""
        endless = self.random.random() < 0.5
        code = f"if rank == {culprit}: time.sleep(1000)\n{work}" if endless else f"for step in range(20): {work}"
        presser = threading.Timer(self.random.uniform(0, 0.5), os.kill, (os.getpid(), signal.SIGINT))
        presser.start()
        try:
            self.group.run(code)
        except CellInterrupted:
            pass
        finally:
            presser.join()

    def _kill(self, work: str, culprit: int) -> None:
        if self.random.random() < 0.3:
            os.kill(self.group.members[culprit].pid, signal.SIGKILL)
            while not self.group.ranks.ended:
                time.sleep(0.01)
        else:
            self._fails(f"if rank == {culprit}: os.kill(os.getpid(), signal.SIGKILL)\n{work}")
        assert self.group.repair() == [culprit]
        self.expected[culprit] = 0

    def settle(self) -> None:
        """Rebuild the group, and drop everything of former cells but the counter."""
        self.group.run("model = None")
        self._before(WORK["barrier"], 0)
        self.prove()
        self.group.run("import gc; gc.collect()")

    def count_resources(self) -> dict[str, tuple[int, int]]:
        """Return how many descriptors and threads each process has."""
        processes = {"notebook": os.getpid(), **{f"rank {r}": m.pid for r, m in enumerate(self.group.members)}}
        return {
            name: (psutil.Process(pid).num_fds(), psutil.Process(pid).num_threads()) for name, pid in processes.items()
        }


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(cells: int = 500, seed: int | None = None) -> None:
    """Run, and print the figures."""
    seed = random.randrange(10**6) if seed is None else seed
    print(f"seed {seed}, {cells} cells", flush=True)
    signal.signal(signal.SIGINT, lambda *_: None)  # a SIGINT between two cells has no effect, as in a kernel
    shared_memory = Path("/dev/shm")
    files = set(shared_memory.iterdir()) if shared_memory.exists() else set()
    with ddip.Group(RANKS, failure_grace=0.1) as group:
        soak, folder = Soak(group, seed), group.cluster.run_folder
        soak.prove()
        for work in WORK.values():  # triggers one-time imports and open files
            soak._before(work, 1)
            soak.prove()
        soak.settle()
        before = soak.count_resources()
        for number in range(cells):
            name = soak.fault()
            if number % 50 == 49:
                print(f"{number + 1} cells, the last: {name}; {soak.count_resources()}", flush=True)
        soak.settle()
        after = soak.count_resources()
        processes = [*psutil.Process().children(recursive=True)]
    for name, seconds in sorted(soak.seconds.items()):
        print(
            f"{name:>10}: {len(seconds):4} times, median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
        )
    print(f"held before {before}\nheld after  {after}")
    for name, (descriptors, threads) in after.items():
        assert descriptors <= before[name][0] + 10 and threads <= before[name][1] + 5, f"{name} holds more"
    preload_client.end_process()
    deadline = time.monotonic() + 10
    while any(_is_alive(process) for process in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)
    assert not shared_memory.exists() or set(shared_memory.iterdir()) <= files
    assert not folder.exists()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
