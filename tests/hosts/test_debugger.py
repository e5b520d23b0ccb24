"""A breakpoint on a rank of another host."""

from __future__ import annotations

from pathlib import Path

from ..cluster.notebook import Notebook


def test_a_rank_of_another_host_is_debugged(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    try:
        notebook.ok("%load_ext ddip\n%makedip --hosts h1:1,h2:1")
        cell = (
            "%%dip\nimport socket, torch, torch.distributed as dist\nx = torch.ones(1) * rank\n"
            "if rank == 1: breakpoint()\ny = x + 7\ndist.all_reduce(x)\nassert x.item() == 1"
        )
        seen = notebook.converse(cell, "p socket.gethostname()", "n", "ranks", "p y", "c")
        assert (seen.shown.status, len(seen.prompts)) == ("ok", 5), f"{seen.text} {seen.shown.message}"
        assert "'h2'" in seen.text and "tensor([8.])" in seen.text and "rank 0: all_reduce" in seen.text
        seen = notebook.converse("%%dip\nif rank == 1: breakpoint()\ndist.barrier()", notebook.interrupt)
        assert seen.shown.error == "CellInterrupted"
        notebook.ok("%%dip\nassert x.item() == 1\ndist.barrier()")
    finally:
        notebook.shut_down()
