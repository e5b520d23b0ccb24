"""Time a training loop that prints at each step: in a cell, under torchrun, and under notebook_launcher.

Usage: train.py [ROUNDS] [RANKS]

All run the same code, DistributedDataParallel on one thread each, in processes that start before the clock does. Ratios
are per round, in which each runs once.
"""

from __future__ import annotations

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
took = time.perf_counter() - began
"""
SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
exec(sys.argv[2])
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(str(took))
dist.destroy_process_group()
"""
LAUNCHED = """
import sys
from accelerate import notebook_launcher
def main(code, result):
    space = {}
    exec("import torch.distributed as dist; dist.init_process_group('gloo')\\n" + code, space)
    if space["dist"].get_rank() == 0:
        open(result, "w").write(str(space["took"]))
notebook_launcher(main, (sys.argv[2], sys.argv[1]), num_processes=int(sys.argv[3]))
"""


def time_in_cell(loop: str, ranks: int) -> float:
    """Return the seconds of the loop in a cell."""
    took: list[float] = []
    with running_kernel() as notebook:
        notebook.run(f"%load_ext ddip\n%makedip -n {ranks}")
        notebook.run(f"%%dip\n{loop}")
        notebook.run("%dipull took")
        notebook.run("print(took)", lambda text: took.append(float(text.split()[-1])))
    return took[0]


def time_torchrun(loop: str, ranks: int, folder: Path) -> float:
    """Return the seconds of the loop under torchrun."""
    (folder / "script.py").write_text(SCRIPT)
    return _run_and_read_seconds(
        folder, ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(folder / "script.py")], loop
    )


def time_accelerate(loop: str, ranks: int, folder: Path) -> float:
    """Return the seconds of the loop under accelerate's notebook_launcher."""
    (folder / "launched.py").write_text(LAUNCHED)
    return _run_and_read_seconds(folder, [str(folder / "launched.py")], loop, str(ranks))


def _run_and_read_seconds(folder: Path, program: list[str], *more: str) -> float:
    result = folder / "seconds"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run([sys.executable, *program, str(result), *more], capture_output=True, text=True, env=variables)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return float(result.read_text())


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    rows = []
    with tempfile.TemporaryDirectory() as made:
        for what, flush in (("a line at each", False), ("a line at each, flushed", True)):
            loop, folder = f"FLUSH = {flush}\n{LOOP}", Path(made)
            turns = [
                (time_in_cell(loop, ranks), time_torchrun(loop, ranks, folder), time_accelerate(loop, ranks, folder))
                for _ in range(rounds)
            ]
            ours, torchrun, accelerate = zip(*turns, strict=True)
            others = {"torchrun": torchrun, "notebook_launcher": accelerate}
            rows.append(Row(f"{STEPS} steps of DDP, {what}", "s", ranks, ours, others))
    report_rows("train", rows)


if __name__ == "__main__":
    main()
