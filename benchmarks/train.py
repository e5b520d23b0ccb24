"""Time loops in a cell, under torchrun, and under notebook_launcher.

Usage: train.py [ROUNDS] [RANKS]

One loop trains and prints at each step; one runs only small collectives. All run the same code on one thread per rank,
in processes that start before the clock does. Ratios are per round, in which each runs once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel import running_kernel
from rows import Row, report_rows

STEPS = 300
LOOP = f"""
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 32 * 32, 10))
model = DDP(net)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
def train(steps):
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(f"step {{step}} loss {{loss.item():.4f}}", flush=FLUSH)
train(20)
dist.barrier()
began = time.perf_counter()
train({STEPS})
dist.barrier()
took = [time.perf_counter() - began]
"""
COLLECTIVES = """
import os, time, torch, torch.distributed as dist
torch.set_num_threads(1)
number, matrix = torch.ones(1), torch.ones(200, 200)
def memory():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
def seconds(steps, products):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        for _ in range(products):
            matrix @ matrix
        dist.all_reduce(number)
    return time.perf_counter() - began
seconds(2000, 1)
before = memory()
took = [1e6 * seconds(10_000, 0) / 10_000, seconds(2000, PRODUCTS)]
seconds(38_000, 0)
took.append(memory() - before)
"""
PRODUCTS = 2
"""Matrix products between two collectives, which take about 1 ms."""
MEASURES = (
    ("an all_reduce of one number in a loop", "µs"),
    ("2000 steps with 1 ms of computing and such an all_reduce", "s"),
    ("memory that a rank gains in 50 000 of them", "MB"),
)
"""What `COLLECTIVES` measures, with the units."""
SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
exec(sys.argv[2])
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(took))
dist.destroy_process_group()
"""
LAUNCHED = """
import sys
from accelerate import notebook_launcher
def main(code, result):
    space = {}
    exec("import torch.distributed as dist; dist.init_process_group('gloo')\\n" + code, space)
    if space["dist"].get_rank() == 0:
        open(result, "w").write(repr(space["took"]))
notebook_launcher(main, (sys.argv[2], sys.argv[1]), num_processes=int(sys.argv[3]))
"""


def time_in_cell(loop: str, ranks: int) -> list[float]:
    """Return what the loop measures in a cell."""
    took: list[list[float]] = []
    with running_kernel() as notebook:
        notebook.run(f"%load_ext ddip\n%makedip -n {ranks}")
        notebook.run(f"%%dip\n{loop}")
        notebook.run("%dipull took")
        notebook.run("print(took)", lambda text: took.append(json.loads(text)))
    return took[0]


def time_torchrun(loop: str, ranks: int, folder: Path) -> list[float]:
    """Return what the loop measures under torchrun."""
    (folder / "script.py").write_text(SCRIPT)
    return _run_and_read(
        folder, ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(folder / "script.py")], loop
    )


def time_accelerate(loop: str, ranks: int, folder: Path) -> list[float]:
    """Return what the loop measures under accelerate's notebook_launcher."""
    (folder / "launched.py").write_text(LAUNCHED)
    return _run_and_read(folder, [str(folder / "launched.py")], loop, str(ranks))


def _run_and_read(folder: Path, program: list[str], *more: str) -> list[float]:
    result = folder / "took"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run([sys.executable, *program, str(result), *more], capture_output=True, text=True, env=variables)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return list(json.loads(result.read_text()))


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    loops = {
        f"FLUSH = {flush}\n{LOOP}": [(f"{STEPS} steps of DDP, {what}", "s")]
        for what, flush in (("a line at each", False), ("a line at each, flushed", True))
    }
    loops[f"PRODUCTS = {PRODUCTS}\n{COLLECTIVES}"] = list(MEASURES)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        for loop, measures in loops.items():
            turns = [
                (
                    time_in_cell(loop, ranks),
                    time_torchrun(loop, ranks, Path(made)),
                    time_accelerate(loop, ranks, Path(made)),
                )
                for _ in range(rounds)
            ]
            for number, (what, unit) in enumerate(measures):
                ours, torchrun, accelerate = zip(*([of[number] for of in turn] for turn in turns), strict=True)
                rows.append(Row(what, unit, ranks, ours, {"torchrun": torchrun, "notebook_launcher": accelerate}))
    report_rows("train", rows)


if __name__ == "__main__":
    main()
