"""Groups on two hosts, in the namespaces of one machine: their start, beside an import of torch by ssh, and a cell.

Usage, as root: python -m tests.hosts.network run -- python benchmarks/hosts.py [STARTS]
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time

from rows import Row, seconds, show

import ddip

SUM = "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)"
IMPORT = f"exec {shlex.quote(sys.executable)} -c 'import torch.distributed'"
HOSTS = ("h1", "h2")
CELLS = 200


def imported() -> None:
    """Import torch by ssh on each host, at once."""
    for process in [subprocess.Popen(["ssh", host, IMPORT]) for host in HOSTS]:
        assert process.wait() == 0


def started(ranks: int) -> tuple[float, float]:
    """From nothing to the first all_reduce of a group with so many ranks on each host; and its end, seconds."""
    began = time.perf_counter()
    group = ddip.Group(ranks, hosts=",".join(HOSTS))
    group.run(SUM)
    there = time.perf_counter() - began
    return there, seconds(group.shutdown)


def connected() -> None:
    """One round trip: a TCP connection is made."""
    socket.create_connection((HOSTS[0], 22)).close()


def cells(**place: object) -> list[float]:
    """Empty cells on four ranks, milliseconds."""
    with ddip.Group(**place) as group:  # type: ignore[arg-type]
        group.run("pass")
        return [1e3 * seconds(lambda: group.run("pass")) for _ in range(CELLS)]


def main() -> None:
    """Print one table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    started(2)  # the notebook's own preload process, and the files in memory
    imports, two, four = zip(*((seconds(imported), started(2), started(4)) for _ in range(count)), strict=True)
    rows = []
    for size, found in ((4, two), (8, four)):
        starts, ends = zip(*found, strict=True)
        beside = {"import torch.distributed by ssh, on both": imports}
        rows.append(Row(f"{count} starts on two hosts: to the first all_reduce", "s", size, starts, beside))
        rows.append(Row("a group on two hosts: its end", "s", size, ends))
    there, here = cells(n=2, hosts=",".join(HOSTS)), cells(n=4)
    trip = [1e3 * seconds(connected) for _ in range(CELLS)]
    rows.append(
        Row("an empty cell on two hosts", "ms", 4, there, {"on one": here, "a round trip of the network": trip})
    )
    show("hosts", rows)


if __name__ == "__main__":
    main()
