"""From nothing to the first all_reduce on every rank: ddip, raw ipyparallel, two peers, and one ``import torch``.

Usage: start.py [ROUNDS] [RANKS ...]

The peers are measured if PEERS is the Python of an environment that has them and the same torch (``make bench``). Raw
ipyparallel only imports torch: it forms no group. Each program runs in a process that has imported what the kernel of a
notebook has imported. Memory is the proportional set size of all processes that were started, a rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from alternate import Program, medians

PEERS = Path(os.environ.get("PEERS", ".venv-peers/bin/python"))
REDUCE = "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); assert x > 1"

HEAD = f"""
import sys, time
import ipykernel.ipkernel, ipykernel.zmqshell
from IPython.core.interactiveshell import InteractiveShell
import psutil
n, REDUCE, clock = int(sys.argv[1]), {REDUCE!r}, time.perf_counter
def megabytes():
    processes = psutil.Process().children(recursive=True)
    return sum(process.memory_full_info().pss for process in processes) / n / 2**20
shell = InteractiveShell.instance()
"""
TAIL = """
started = clock() - began
memory = megabytes()
began = clock()
stop()
print()
print(started, clock() - began, memory)
"""
OURS = """
stop = lambda: shell.run_line_magic("makedip", "-k")
shell.run_line_magic("makedip", f"-n {n}")
shell.run_cell_magic("dip", "", REDUCE)
"""
COLD = f"""{HEAD}
began = clock()
shell.run_line_magic("load_ext", "ddip")
{OURS}{TAIL}"""
WARM = f"""{HEAD}
shell.run_line_magic("load_ext", "ddip")
from ddip.cluster import preload_client
preload_client.begin().asleep.wait()
began = clock()
{OURS}{TAIL}"""
SPAWNED = f"""{HEAD}
shell.config.DipMagics.spawn = True
began = clock()
shell.run_line_magic("load_ext", "ddip")
{OURS}{TAIL}"""
RAW = f"""{HEAD}
import logging
began = clock()
import ipyparallel
cluster = ipyparallel.Cluster(n=n, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
client[:].execute("import torch, torch.distributed", block=True)
def stop():
    client.close()
    cluster.stop_cluster_sync()
{TAIL}"""
JUPYTER_DISTRIBUTED = f"""{HEAD}
import asyncio
from jupyter_distributed.kernel_group import DistributedKernelGroup
INIT = "import torch.distributed as dist; dist.init_process_group('gloo'); "
loop = asyncio.new_event_loop()
def run(work): return loop.run_until_complete(work)
began = clock()
group = DistributedKernelGroup(n)
run(group.start())
done = run(group.execute(INIT + REDUCE))
assert "error" not in str(done).lower(), done
stop = lambda: run(group.shutdown())
{TAIL}"""
NBDISTRIBUTED = f"""{HEAD}
began = clock()
shell.run_line_magic("load_ext", "nbdistributed")
shell.run_line_magic("dist_init", f"-n {{n}}")
def connected(): return sum(c.status == "ESTABLISHED" for c in psutil.Process().net_connections("inet"))
while connected() < n: time.sleep(0.02)  # a cell that is sent sooner is lost, and fails after 30 s
time.sleep(0.1)
shell.run_cell_magic("distributed", "", REDUCE)
manager = shell.magics_manager.registry["DistributedMagic"]._process_manager
stop = manager.shutdown  # its own magic for this ends processes by a pattern, others' too
{TAIL}"""
LOAD = f"""{HEAD}
began = clock()
shell.run_line_magic("load_ext", "ddip")
print()
print(clock() - began)
"""
TORCH = """
import subprocess, sys, time
began = time.perf_counter()
subprocess.run([sys.executable, "-c", "import torch"], check=True)
print(time.perf_counter() - began, 0, 0)
"""


def programs(ranks: str) -> dict[str, Program]:
    """What is compared."""
    ours = {"cold": COLD, "warm": WARM, "spawned": SPAWNED, "ipyparallel": RAW}
    peers = {"jupyter-distributed": JUPYTER_DISTRIBUTED, "nbdistributed": NBDISTRIBUTED}
    found = {"import torch": Program(TORCH)}
    found |= {name: Program(code, (ranks,)) for name, code in ours.items()}
    if PEERS.exists():
        found |= {name: Program(code, (ranks,), str(PEERS.absolute())) for name, code in peers.items()}
    return found


def main() -> None:
    """Print one table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    sizes = sys.argv[2:] or ["2", "4", "8", "16"]
    total: dict[str, dict[int, float]] = {"cold": {}, "warm": {}, "spawned": {}}
    print(f"start to the first all_reduce; medians of {rounds}, in turns")
    print(f"{'':20} {'ranks':>5} {'start':>7} {'/ import':>9} {'stop':>6} {'MB a rank':>10}")
    for ranks in sizes:
        found = medians(programs(ranks), rounds)
        unit = found["import torch"][0]
        for name, (start, stop, memory) in found.items():
            print(f"{name:20} {ranks:>5} {start:6.2f}s {start / unit:8.2f}x {stop:5.2f}s {memory:10.0f}", flush=True)
            if name in total:
                total[name][int(ranks)] = memory * int(ranks)
    print(f"%load_ext ddip: {1e3 * medians({'load': Program(LOAD, ('1',))}, rounds)['load'][0]:.0f} ms")
    for name, memory_of in total.items():
        few, many = min(memory_of), max(memory_of)
        if many > few:
            print(f"{name}: each further rank takes {(memory_of[many] - memory_of[few]) / (many - few):.0f} MB")


if __name__ == "__main__":
    main()
