"""Try what each tool does when one of three ranks raises while the others wait for it in a collective.

Usage: peer_faults.py [TOOL ...]

The last column of "How ddip compares" in docs/from_torchrun.md states what this prints. jupyter-distributed and
nbdistributed are tried if PEERS is the Python of an environment that has them and the same torch (``make bench``
creates it). VERBOSE=1 also shows what each tool has printed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from alternate import Program

PEERS = Path(os.environ.get("PEERS", ".venv-peers/bin/python"))
LIMIT_SECONDS = 50
"""Time after which a cell counts as one that does not end."""
BEFORE = "import torch, torch.distributed as dist; kept = torch.ones(1)"
FAULT = "if dist.get_rank() == 1: raise ValueError('planted')\ndist.all_reduce(torch.ones(1))"

HEAD = f"""
import asyncio, json, os, sys, tempfile, threading, time, traceback
BEFORE, FAULT, LIMIT = {BEFORE!r}, {FAULT!r}, {LIMIT_SECONDS}
INIT = BEFORE + "; dist.init_process_group('gloo')"
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shown = tempfile.TemporaryFile("w+")
answer = os.fdopen(os.dup(1), "w")
os.dup2(shown.fileno(), 1)
os.dup2(shown.fileno(), 2)
def shown_since(begin):
    "What this process and its children have printed since byte `begin`."
    sys.stdout.flush()
    return os.pread(shown.fileno(), 10**7, begin).decode(errors="replace")
def attempt(work, limit=LIMIT):
    "Run work in a thread: seconds until it returned or raised (None: not within the limit), and what was printed."
    begin, began, done = os.fstat(shown.fileno()).st_size, time.perf_counter(), threading.Event()
    def run():
        try:
            print(work())
        except BaseException as error:
            print(f"{{type(error).__name__}}: {{error}}")
        done.set()
    threading.Thread(target=run, daemon=True).start()
    ended = done.wait(limit)
    return (time.perf_counter() - began if ended else None), shown_since(begin)
def fail(*error):
    traceback.print_exception(*error)
    print(shown_since(0), file=answer, flush=True)
    os._exit(1)
sys.excepthook = fail
def report(seconds, text, after):
    print(json.dumps([seconds, "planted" in text, after, text[-3000:]]), file=answer, flush=True)
    os._exit(0)
"""
DDIP = f"""{HEAD}
import ddip
group = ddip.Group(3)
group.run(BEFORE)
seconds, text = attempt(lambda: group.run(FAULT))
group.run("dist.all_reduce(kept)")
after = [str(values["kept"].item()) for values in [group.pull(["kept"], rank) for rank in range(3)]]
group.close()
report(seconds, text, "variables after the next cell: " + ", ".join(after))
"""
IPYPARALLEL = f"""{HEAD}
import logging, ipyparallel
cluster = ipyparallel.Cluster(n=3, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
def environment(rank):
    import os
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
for rank in range(3): client[rank].apply_sync(environment, rank)
client[:].execute(INIT, block=True)
view = client[:]
view.block = True
view.activate()
seconds, text = attempt(lambda: shell.run_cell_magic("px", "", FAULT))
busy = [rank for rank, state in client.queue_status().items() if rank in range(3) and state["queue"]]
cluster.stop_cluster_sync()
report(seconds, text, f"ranks that still wait: {{busy}}")
"""
JUPYTER_DISTRIBUTED = f"""{HEAD}
from jupyter_distributed.kernel_group import DistributedKernelGroup
loop = asyncio.new_event_loop()
def on_loop(work, limit): return loop.run_until_complete(asyncio.wait_for(work, limit))
group = DistributedKernelGroup(3)
on_loop(group.start(), 60)
on_loop(group.execute(INIT), 90)
def cell_ends(code, limit):
    try:
        print(on_loop(group.execute(code), limit))
        return True
    except TimeoutError:
        return False
began = time.perf_counter()
seconds = time.perf_counter() - began if cell_ends(FAULT, LIMIT) else None
text = shown_since(0)
next_runs = cell_ends("print(kept)", 10)
report(seconds, text, "the next cell " + ("runs" if next_runs else "does not run"))
"""
NBDISTRIBUTED = f"""{HEAD}
import psutil
shell.run_line_magic("load_ext", "nbdistributed")
shell.run_line_magic("dist_init", "-n 3")
def connected(): return sum(c.status == "ESTABLISHED" for c in psutil.Process().net_connections("inet"))
while connected() < 3: time.sleep(0.02)
time.sleep(0.5)
shell.run_cell_magic("distributed", "", BEFORE)
seconds, text = attempt(lambda: shell.run_cell_magic("distributed", "", FAULT))
after = attempt(lambda: shell.run_cell_magic("distributed", "", "print('alive', kept)"))
shell.magics_manager.registry["DistributedMagic"]._process_manager.shutdown()
report(seconds, text, f"the next cell shows {{after[1].count('alive tensor')}} of 3 ranks")
"""
LAUNCHER = f"""{HEAD}
from accelerate import notebook_launcher
def main():
    exec(BEFORE, globals())
    dist.init_process_group("gloo")
    exec(FAULT, globals())
seconds, text = attempt(lambda: notebook_launcher(main, num_processes=3))
report(seconds, text, "all processes have ended, as after a good call")
"""
TORCHRUN = f"""{HEAD}
import subprocess, tempfile
with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
    script.write(INIT + "\\n" + FAULT)
    script.flush()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", script.name]
    seconds, text = attempt(lambda: subprocess.run(command))
report(seconds, text, "all processes have ended")
"""
TOOLS = {
    "ddip": DDIP,
    "torchrun": TORCHRUN,
    "notebook_launcher": LAUNCHER,
    "ipyparallel": IPYPARALLEL,
    "jupyter-distributed": JUPYTER_DISTRIBUTED,
    "nbdistributed": NBDISTRIBUTED,
}
OF_PEERS = ("jupyter-distributed", "nbdistributed")


def main(names: list[str]) -> None:
    """Print a line per tool."""
    for name in names or TOOLS:
        python = str(PEERS.absolute()) if name in OF_PEERS else sys.executable
        if not Path(python).exists():
            print(f"{name:20} not tried: {python} does not exist")
            continue
        seconds, shows_error, after, text = json.loads(Program(TOOLS[name], python=python).last_line())
        time = f"more than {LIMIT_SECONDS} s" if seconds is None else f"{seconds:.1f} s"
        shown = "shows" if shows_error else "does not show"
        print(f"{name:20} the cell ends after {time}, and {shown} the error; {after}", flush=True)
        if os.environ.get("VERBOSE"):
            print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
