"""Groups on two hosts, in the namespaces of one machine: their start, beside an import of torch by ssh, and a cell.

Usage, as root: python -m tests.hosts.network run -- python benchmarks/hosts.py [STARTS]
"""

from __future__ import annotations

import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import ddip

SUM = "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)"
IMPORT = f"exec {shlex.quote(sys.executable)} -c 'import torch.distributed'"
HOSTS = ("h1", "h2")
CELLS = 200


def seconds(do: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


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


def cells(**place: object) -> float:
    """Median of empty cells on four ranks, milliseconds."""
    with ddip.Group(**place) as group:  # type: ignore[arg-type]
        group.run("pass")
        return 1e3 * statistics.median(seconds(lambda: group.run("pass")) for _ in range(CELLS))


def main() -> None:
    """Print the tables."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    started(2)  # the notebook's own warm process, and the files in memory
    rows = [(seconds(imported), started(2), started(4)) for _ in range(count)]
    limit = statistics.median(row[0] for row in rows)
    print(f"two hosts, medians of {count} in turns, seconds; {2 * count + 1} starts, none failed")
    print(f"import torch.distributed by ssh, on both at once   {limit:5.2f}")
    for number, ranks in ((1, 2), (2, 4)):
        start, stop = (statistics.median(row[number][which] for row in rows) for which in (0, 1))  # type: ignore[index]
        print(f"ddip, 2 x {ranks} ranks, to the first all_reduce          {start:5.2f}  ({start - limit:+.2f})")
        print(f"      and to its end                               {stop:5.2f}")
    pairs = [(cells(n=4), cells(n=2, hosts=",".join(HOSTS))) for _ in range(3)]
    here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
    trip = 1e3 * statistics.median(seconds(connected) for _ in range(CELLS))
    print(f"an empty cell on four ranks, ms: one host {here:.1f}, two hosts {there:.1f} (round trip {trip:.2f})")


if __name__ == "__main__":
    main()
