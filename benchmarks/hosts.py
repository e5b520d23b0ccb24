"""Time groups on two hosts, which are network namespaces of one machine: start, end, and an empty cell.

Usage, as root: python -m tests.hosts.network run -- python benchmarks/hosts.py [STARTS]

A start is compared with an import of torch over ssh.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time

from rows import Row, report_rows, time_call

import ddip

SUM = "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)"
IMPORT = f"exec {shlex.quote(sys.executable)} -c 'import torch.distributed'"
HOSTS = ("h1", "h2")
CELLS = 200


def import_torch_by_ssh() -> None:
    """Import torch over ssh on both hosts at once."""
    for process in [subprocess.Popen(["ssh", host, IMPORT]) for host in HOSTS]:
        assert process.wait() == 0


def time_start(ranks: int) -> tuple[float, float]:
    """Start `ranks` ranks per host; return the seconds to the first all_reduce, and of the shutdown."""
    began = time.perf_counter()
    group = ddip.Group(ranks, hosts=",".join(HOSTS))
    group.run(SUM)
    start_seconds = time.perf_counter() - began
    return start_seconds, time_call(group.shutdown)


def open_connection() -> None:
    """Open a TCP connection: one round trip."""
    socket.create_connection((HOSTS[0], 22)).close()


def time_empty_cells(**place: object) -> list[float]:
    """Return the milliseconds of each of many empty cells on four ranks."""
    with ddip.Group(**place) as group:  # type: ignore[arg-type]
        group.run("pass")
        return [1e3 * time_call(lambda: group.run("pass")) for _ in range(CELLS)]


def main() -> None:
    """Print one table of results."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    time_start(2)  # warms up the notebook's preload process and the file cache
    imports, two, four = zip(
        *((time_call(import_torch_by_ssh), time_start(2), time_start(4)) for _ in range(count)), strict=True
    )
    rows = []
    for size, found in ((4, two), (8, four)):
        starts, ends = zip(*found, strict=True)
        comparison = {"import torch.distributed by ssh, on both": imports}
        rows.append(Row(f"{count} starts on two hosts: to the first all_reduce", "s", size, starts, comparison))
        rows.append(Row("a group on two hosts: its end", "s", size, ends))
    on_two_hosts, on_one_host = time_empty_cells(n=2, hosts=",".join(HOSTS)), time_empty_cells(n=4)
    round_trip = [1e3 * time_call(open_connection) for _ in range(CELLS)]
    rows.append(
        Row(
            "an empty cell on two hosts",
            "ms",
            4,
            on_two_hosts,
            {"on one": on_one_host, "a round trip of the network": round_trip},
        )
    )
    report_rows("hosts", rows)


if __name__ == "__main__":
    main()
