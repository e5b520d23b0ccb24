"""Time a start from nothing to the first all_reduce on every rank: ddip, ipyparallel, and three peers.

Usage: start.py [ROUNDS] [RANKS ...]

The peers are measured if PEERS is the Python of an environment that has them and the same torch (``make bench``). Raw
ipyparallel only imports torch and forms no process group; accelerate's notebook_launcher runs one function and ends.
Each program runs in a process that has imported what the kernel of a notebook has imported. Memory is the proportional
set size (PSS) per rank of all started processes. One ``import torch`` is measured for comparison.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from alternate import Program, run_alternately
from rows import Row, report_rows

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
from ddip.cluster.processes import preload_client
preload_client.ensure_process().asleep.wait()
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
assert "status='error'" not in str(done), done
stop = lambda: run(group.shutdown())
{TAIL}"""
NBDISTRIBUTED = f"""{HEAD}
began = clock()
shell.run_line_magic("load_ext", "nbdistributed")
shell.run_line_magic("dist_init", f"-n {{n}}")
def connected(): return sum(c.status == "ESTABLISHED" for c in psutil.Process().net_connections("inet"))
while connected() < n: time.sleep(0.02)  # a cell that is sent earlier is lost, and fails after 30 s
time.sleep(0.1)
shell.run_cell_magic("distributed", "", REDUCE)
manager = shell.magics_manager.registry["DistributedMagic"]._process_manager
stop = manager.shutdown  # its own magic ends processes by name pattern, including unrelated ones
{TAIL}"""
LAUNCHER = f"""{HEAD}
import multiprocessing
results = multiprocessing.get_context("fork").SimpleQueue()
def main():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    exec(REDUCE, {{}})
    results.put((clock(), megabytes_of_this()))
    dist.barrier()
    dist.destroy_process_group()
def megabytes_of_this(): return psutil.Process().memory_full_info().pss / 2**20
began = clock()
from accelerate import notebook_launcher
notebook_launcher(main, num_processes=n)
ended = clock()
ready, memory = zip(*(results.get() for _ in range(n)))
print()
print(max(ready) - began, ended - max(ready), sum(memory) / n)
"""
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


def compared_programs(ranks: str) -> dict[str, Program]:
    """Return the compared programs, by name."""
    ours = {"cold": COLD, "warm": WARM, "spawned": SPAWNED, "ipyparallel": RAW, "notebook_launcher": LAUNCHER}
    peers = {"jupyter-distributed": JUPYTER_DISTRIBUTED, "nbdistributed": NBDISTRIBUTED}
    found = {"import torch": Program(TORCH)}
    found |= {name: Program(code, (ranks,)) for name, code in ours.items()}
    if PEERS.exists():
        found |= {name: Program(code, (ranks,), str(PEERS.absolute())) for name, code in peers.items()}
    return found


WAYS = {"cold": "load_ext and start", "warm": "start", "spawned": "start, ranks spawned"}
MEASURED = (("to the first all_reduce", "s"), ("and stop", "s"), ("memory of a rank", "MB"))


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    load = run_alternately({"load": Program(LOAD, ("1",))}, rounds)["load"][0]
    rows = [Row("load_ext", "ms", 1, [1e3 * seconds for seconds in load])]
    for size in map(int, sys.argv[2:] or ["2", "4", "8"]):
        found = run_alternately(compared_programs(str(size)), rounds)
        for way, what in WAYS.items():
            for number, (measure, unit) in enumerate(MEASURED):
                others = {
                    name: numbers[number]
                    for name, numbers in found.items()
                    if name not in WAYS and any(numbers[number])
                }
                rows.append(Row(f"{what}: {measure}", unit, size, found[way][number], others))
    report_rows("start", rows)


if __name__ == "__main__":
    main()
