"""A kept group on several hosts outlives the notebook's kernel."""

from __future__ import annotations

from pathlib import Path

from ddip.kept import kept_folder

from ..cluster.leftovers import wait_until
from ..cluster.notebook import Notebook
from .slurm import Slurm

COUNT = """%%dip --bg
import time, torch, torch.distributed as dist
total = torch.zeros(1)
for step in range(150):
    one = torch.ones(1)
    dist.all_reduce(one)
    total += one
    print("step", step, flush=True)
    time.sleep(0.1)
"""


def test_ranks_on_other_hosts_outlive_the_kernel(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    notebook.ok("%load_ext ddip\n%makedip --keep --hosts h1:1,h2:1")
    (kept,) = kept_folder.list_kept()
    try:
        cell = notebook.begin(COUNT)
        notebook.finish(cell)
        notebook.late(cell, "step 2")
        notebook.kill()
        notebook.shut_down()
        wait_until(lambda: not kept.is_claimed, what="the end of the kernel")
        notebook = Notebook(tmp_path)
        notebook.ok("%load_ext ddip")
        shown = notebook.ok("%makedip --attach").stdout
        assert "h1, h2" in shown and "still running: [" in shown
        notebook.ok("%dipwait")
        assert "step 0\nstep 1\nstep 2\nstep 3\n" in notebook.ok("%dipcell").text
        notebook.ok("%%dip\nassert total.item() == 300\ndist.barrier()")
        notebook.ok("%makedip -k")
        assert not kept.is_alive
    finally:
        kept.end()
        notebook.shut_down()


def test_a_slurm_job_outlives_the_kernel(slurm: Slurm, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    notebook.ok('%load_ext ddip\n%makedip --keep -n 1 --slurm "nodes=2 time=30"')
    (kept,) = kept_folder.list_kept()
    try:
        notebook.ok("%%dip\nx = rank + 40")
        notebook.kill()
        notebook.shut_down()
        wait_until(lambda: not kept.is_claimed, what="the end of the kernel")
        assert list(slurm.jobs().values()) == ["RUNNING"]
        notebook = Notebook(tmp_path)
        notebook.ok("%load_ext ddip\n%makedip --attach")
        notebook.ok("%%dip\nassert x == rank + 40\nimport torch.distributed as dist\ndist.barrier()")
        notebook.ok("%makedip -k")
        assert not kept.is_alive
        wait_until(lambda: not slurm.jobs(), what="the end of the job")
    finally:
        kept.end()
        notebook.shut_down()
