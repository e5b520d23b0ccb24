"""Measure a save of a training state against ``torch.save`` of the same data, and a load.

Usage: saves.py [ROUNDS] [MILLIONS OF PARAMETERS ...]

Two ranks hold a DDP model and Adam's state. Each round alternates: rank 0 calls ``torch.save`` of both state dicts, and
``fsync``; the group saves all variables; it does so in the background, where the time until the next cell counts; it
loads the save in place. The page cache is warm for the loads.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from rows import Row, report_rows, time_call

from ddip import Group

MAKE = """
import ddip, os, torch
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = DDP(torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range(10)]))
opt = torch.optim.Adam(net.parameters())
net(torch.ones(1, {width})).sum().backward()
opt.step()
opt.zero_grad()
"""
TORCH_SAVE = """
if rank == 0:
    torch.save({{"net": net.state_dict(), "opt": opt.state_dict()}}, {path!r})
    with open({path!r}) as file:
        os.fsync(file.fileno())
"""
TORCH_LOAD = """
found = torch.load({path!r})
net.load_state_dict(found["net"])
opt.load_state_dict(found["opt"])
del found
"""
POINTS = """
import time
begin = time.perf_counter()
for _ in range(1_000_000):
    ddip.save_point()
seconds = time.perf_counter() - begin
"""


def main() -> None:
    """Print one table of results."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for millions in map(int, sys.argv[2:] or ["1", "10", "50"]):
            width, size = round((millions * 1e5) ** 0.5), f"{millions} M parameters and Adam's state"
            with Group(2, timeout=120) as group:
                group.run(MAKE.format(width=width))
                run, file = str(Path(folder, "run")), str(Path(folder, "file"))
                plain, saves, begun, loads, plain_loads = [], [], [], [], []
                for _ in range(rounds):
                    plain.append(time_call(partial(group.run, TORCH_SAVE.format(path=file))))
                    saves.append(time_call(partial(group.save, run)))
                    begun.append(time_call(partial(group.save, run, background=True)))
                    group.save(run)  # after the one in the background
                    loads.append(time_call(partial(group.load, run)))
                    plain_loads.append(time_call(partial(group.run, TORCH_LOAD.format(path=file))))
                ours = sum(path.stat().st_size for path in Path(run).rglob("*") if path.is_file())
                theirs = Path(file).stat().st_size
                rows += [
                    Row(f"save {size}", "s", 2, saves, {"torch.save on rank 0": plain}),
                    Row(f"save {size} in the background, until the next cell", "s", 2, begun),
                    Row(
                        f"load {size}, in place",
                        "s",
                        2,
                        loads,
                        {"torch.load and load_state_dict on each rank": plain_loads},
                    ),
                    Row(f"files of {size}", "MB", 2, [ours / 1e6], {"torch.save": [theirs / 1e6]}),
                ]
                shutil.rmtree(run)
                if millions == 1:
                    for seconds, what in ((None, "without --every"), (3600.0, "with --every 1h")):
                        group.save_every(seconds, run)
                        group.run(POINTS)
                        rows.append(Row(f"ddip.save_point() {what}", "µs", 2, [group.pull(["seconds"])["seconds"]]))
                    group.save_every(None)
    report_rows("saves", rows)


if __name__ == "__main__":
    main()
