"""From nothing to the first all_reduce on every rank: ddip against raw ipyparallel, and one ``import torch``.

Usage: start.py [ROUNDS] [RANKS ...]
"""

from __future__ import annotations

import sys

from alternate import medians

DDIP = """
import sys, time
from ddip import Group
n = int(sys.argv[1])
began = time.perf_counter()
group = Group(n)
group.run("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)")
started = time.perf_counter() - began
began = time.perf_counter()
group.shutdown()
print(started, time.perf_counter() - began)
"""
RAW = """
import logging, sys, time
import ipyparallel
n = int(sys.argv[1])
began = time.perf_counter()
cluster = ipyparallel.Cluster(n=n, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
client[:].execute("import torch, torch.distributed", block=True)
started = time.perf_counter() - began
began = time.perf_counter()
client.close()
cluster.stop_cluster_sync()
print(started, time.perf_counter() - began)
"""
TORCH = """
import time
began = time.perf_counter()
import torch, torch.distributed
print(time.perf_counter() - began, 0)
"""


def main() -> None:
    """Print one table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    sizes = sys.argv[2:] or ["2", "4"]
    print("start to the first all_reduce (ddip), start and import torch (raw ipyparallel); medians, seconds")
    print(f"{'ranks':>5} {'ddip':>7} {'raw':>7} {'ddip/raw':>9} {'import torch':>13} {'stop ddip':>10} {'stop raw':>9}")
    for size in sizes:
        found = medians({"ddip": DDIP, "raw": RAW, "torch": TORCH}, rounds, size)
        (ours, our_stop), (raw, raw_stop), (torch, _) = found["ddip"], found["raw"], found["torch"]
        print(f"{size:>5} {ours:7.2f} {raw:7.2f} {ours / raw:9.2f} {torch:13.2f} {our_stop:10.2f} {raw_stop:9.2f}")


if __name__ == "__main__":
    main()
