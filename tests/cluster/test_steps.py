"""A good cell can leave ranks out of step: one rank's next collective would meet another's former one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddip

from .notebook import Notebook
from .variants import few

PROOF = "y = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"
SETUP = "import threading, time, torch, torch.distributed as dist\nx = torch.ones(1)"
ONE_SIDED = "if rank == 1:\n    w = dist.all_reduce(torch.tensor([100.0]), async_op=True)"


@pytest.fixture
def notices(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Form a new group that has begun a collective; return the fixture that captures later messages."""
    # Drops what other tests created in the group
    cells.run("import torch.distributed as dist; dist.destroy_process_group()")
    cells.run(f"{SETUP}\ndist.all_reduce(torch.ones(1))\nformer = dist.group.WORLD")
    capsys.readouterr()
    return capsys


def test_ranks_out_of_step_are_reported_and_old_tensors_dropped(
    cells: ddip.Group, notices: pytest.CaptureFixture[str]
) -> None:
    cells.run(ONE_SIDED)
    text = notices.readouterr().err
    found = re.search(r"\(rank 0: (\d+), rank 1: (\d+)\)", text)
    assert found is not None and int(found[2]) == int(found[1]) + 1, text
    assert "in the default group" in text and "--unmatched" in text
    assert re.search(r"  rank 1: cell \[\d+\] line 2: w = dist.all_reduce\(torch.tensor\(\[100.0\]\), async_op", text)
    cells.run("""
        y = torch.tensor([1.0])
        w2 = dist.all_reduce(y, async_op=True)
        if rank == 0: w2.wait()
    """)
    cells.run("w2.wait()\nassert y.item() == 2 and dist.group.WORLD is not former")
    cells.run(PROOF)
    assert notices.readouterr().err == ""


@pytest.mark.grid
def test_an_old_tensor_of_another_size_ends_no_rank(cells: ddip.Group, notices: pytest.CaptureFixture[str]) -> None:
    pids = [member.pid for member in cells.members]
    cells.run("if rank == 1: w = dist.all_reduce(torch.ones(10_000), async_op=True)")
    cells.run("""
        y = torch.ones(3)
        dist.all_reduce(y)
        assert y.tolist() == [2.0] * 3
    """)
    assert [member.pid for member in cells.members] == pids


SURPLUS = {
    "under another name": (
        "from torch.distributed import all_reduce as mine\nif rank: mine(x, async_op=True)",
        "if rank: mine(",
    ),
    "by a thread that has ended": (
        "begun = threading.Thread(target=lambda: dist.all_reduce(x, async_op=True))\nif rank:\n"
        "    begun.start()\n    begun.join()",
        "",
    ),
    "three": ("for i in range(3):\n    if rank:\n        dist.broadcast(x, 1, async_op=True)", "dist.broadcast(x, 1"),
    "a method": ("if rank:\n    pair = dist.group.WORLD\n    pair.allreduce([x])", "pair.allreduce([x])"),
    "an error that was caught": (
        "try:\n    if rank: dist.all_reduce(x, async_op=True); 1 / 0\nexcept Exception: pass",
        "if rank: dist.all",
    ),
}


@pytest.mark.parametrize("what", few(SURPLUS, "by a thread that has ended", "a method"))
def test_a_surplus_is_reported_with_its_place(
    cells: ddip.Group, notices: pytest.CaptureFixture[str], what: str
) -> None:
    begin, line = SURPLUS[what]
    cells.run(begin)
    text = notices.readouterr().err
    assert "different numbers of collectives in the default group" in text and line in text
    cells.run(PROOF)


@pytest.mark.grid
def test_a_surplus_begun_in_c_is_reported_without_a_line(
    cells: ddip.Group, notices: pytest.CaptureFixture[str]
) -> None:
    cells.run("if rank: y = torch.ops._c10d_functional.all_reduce(x, 'sum', dist.group.WORLD.group_name)")
    text = notices.readouterr().err
    assert "different numbers of collectives in the default group" in text and "line" not in text
    cells.run(PROOF)


def test_a_surplus_in_a_subgroup_names_the_subgroup(cells: ddip.Group, notices: pytest.CaptureFixture[str]) -> None:
    cells.run(
        "pair, alone = dist.new_group([0, 1]), dist.new_group([0])\nif rank == 0: dist.all_reduce(x, group=alone)"
    )
    assert notices.readouterr().err == ""
    cells.run("if rank == 0: w = dist.all_reduce(x, group=pair, async_op=True)")
    assert "collectives in a group of ranks 0, 1 (rank 1: 0, rank 0: 1), the first too many" in notices.readouterr().err
    cells.run("""
        pair = dist.new_group([0, 1])
        x = torch.ones(1)
        dist.all_reduce(x, group=pair)
        assert x.item() == 2
    """)


@pytest.mark.parametrize(
    "code",
    [
        "dist.all_reduce(x); dist.barrier(); dist.all_gather_object([None] * world_size, rank)",
        "dist.send(x, 1) if rank == 0 else dist.recv(x, 0); dist.send(x, 1) if rank == 0 else dist.recv(x)",
        pytest.param("w = dist.isend(x, 1) if rank == 0 else None", marks=pytest.mark.grid),
        pytest.param("dist.monitored_barrier()", marks=pytest.mark.grid),
        pytest.param("w = dist.all_reduce(x, async_op=True); w.wait()", marks=pytest.mark.grid),
        "pair = dist.new_group([0, 1]); dist.all_reduce(x, group=pair); dist.destroy_process_group(pair)",
        pytest.param(
            "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)); net(x).sum().backward()",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_cells_with_ranks_in_step_keep_the_group_silently(
    cells: ddip.Group, notices: pytest.CaptureFixture[str], code: str
) -> None:
    cells.run(code)
    cells.run("dist.recv(x, 0) if rank else w.wait()" if "isend" in code else "pass")
    cells.run("assert dist.group.WORLD is former")
    assert notices.readouterr().err == ""


def test_sends_and_receives_of_some_ranks_only_are_silent(
    cells: ddip.Group, notices: pytest.CaptureFixture[str]
) -> None:
    cells.run("w = dist.isend(x, 1)", ranks=[0])
    cells.run("dist.recv(x, 0)", ranks=[1])
    cells.run("w.wait()", ranks=[0])
    cells.run(f"assert dist.group.WORLD is former\n{PROOF}")
    assert notices.readouterr().err == ""


def test_a_collective_begun_only_on_some_ranks_is_reported(
    cells: ddip.Group, notices: pytest.CaptureFixture[str]
) -> None:
    cells.run("w = dist.all_reduce(torch.tensor([100.0]), async_op=True)", ranks=[1])
    assert "different numbers of collectives in the default group" in notices.readouterr().err
    cells.run(PROOF)


@pytest.mark.grid
def test_an_accepted_surplus_is_silent_until_it_grows(cells: ddip.Group, notices: pytest.CaptureFixture[str]) -> None:
    cells.run("w = dist.all_reduce(x, async_op=True)", ranks=[0], unmatched=True)
    cells.run("kept = 1")
    cells.run("w = dist.all_reduce(x, async_op=True)", ranks=[1])
    cells.run("w.wait()\nassert x.item() == 2 and dist.group.WORLD is former")
    assert notices.readouterr().err == ""
    cells.run("w = dist.all_reduce(x, async_op=True)", ranks=[0], unmatched=True)
    cells.run("x = torch.ones(1)\nw = dist.all_reduce(x, async_op=True)")
    assert "different numbers" in notices.readouterr().err
    cells.run(f"{PROOF}\nassert dist.group.WORLD is not former")


def test_a_thread_that_continues_collectives_is_not_disturbed(
    cells: ddip.Group, notices: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        own, sums, leave = dist.new_group([0, 1]), [], threading.Event()
        def work():
            for i in range(1000):
                time.sleep(0.01 * rank)
                y = torch.tensor([float(leave.is_set())])
                dist.all_reduce(y, group=own)
                sums.append(y.item())
                if y.item() == 2: return
        thread = threading.Thread(target=work); thread.start()
    """)
    for _ in range(10):
        cells.run(PROOF)
    cells.run("leave.set(); thread.join()\nassert len(sums) < 1000 and dist.group.WORLD is former")
    cells.run(PROOF)
    assert notices.readouterr().err == ""


SLOW_WRITER = """
import torch.distributed.checkpoint as dcp
import logging; logging.getLogger("torch.distributed").setLevel(logging.ERROR)
side, go = dist.new_group([0, 1], backend="gloo"), threading.Event()
class Writer(dcp.FileSystemWriter):
    def prepare_local_plan(self, plan):
        assert go.wait(60) if rank else True
        return super().prepare_local_plan(plan)
former = dist.group.WORLD
"""


@pytest.mark.grid
def test_a_checkpoint_saved_by_a_thread_causes_no_alarm(
    cells: ddip.Group, notices: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rank 0's thread is ahead of rank 1's in every cell."""
    cells.options.failure_grace = 30.0  # both ranks fail alike, but a loaded machine may delay one
    cells.run(SLOW_WRITER)
    save = (
        f"dcp.async_save({{'a': torch.ones(3) * rank}}, storage_writer=Writer({str(tmp_path)!r}), process_group=side)"
    )
    cells.run(f"import ddip.rank.process_group.collectives as c; saved = {save}")
    cells.run("while not rank and c.begun_operations()[f'{side.group_name} cpu']['collectives'] < 1: time.sleep(0.01)")
    for _ in range(3):
        cells.run(PROOF)
        with pytest.raises(ddip.CellError):
            cells.run("1 / 0")
    cells.run(
        "go.set(); saved.result(); y = {'a': torch.zeros(3)}; dcp.load(y, checkpoint_id=" + repr(str(tmp_path)) + ")"
    )
    cells.run(f"{PROOF}\nassert dist.group.WORLD is former", show_ranks=[])
    assert "collectives" not in notices.readouterr().err


@pytest.mark.grid
def test_a_surplus_is_reported_when_its_thread_has_ended(
    cells: ddip.Group, notices: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        own, leave = dist.new_group([0, 1]), threading.Event()
        def work():
            dist.all_reduce(torch.ones(1), group=own)
            if rank == 0: dist.all_reduce(torch.ones(1), group=own, async_op=True)
            leave.wait()
        thread = threading.Thread(target=work); thread.start()
        import ddip.rank.process_group.collectives as c
        while c.begun_operations()[f"{own.group_name} cpu"]["collectives"] < 2 - rank: time.sleep(0.01)
    """)
    cells.run(PROOF)
    assert notices.readouterr().err == ""
    cells.run("leave.set(); thread.join()")
    assert "different numbers of collectives in a group of ranks 0, 1" in notices.readouterr().err
    cells.run(f"{PROOF}\nassert dist.group.WORLD is not former")


@pytest.mark.grid
def test_messages_of_a_thread_are_not_mistaken_for_collectives(
    cells: ddip.Group, notices: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        def work():
            for i in range(300):
                y = torch.ones(1)
                dist.send(y, 1, tag=7) if rank == 0 else dist.recv(y, 0, tag=7)
        thread = threading.Thread(target=work); thread.start()
        for i in range(300): dist.all_reduce(torch.ones(1))
        thread.join()
    """)
    cells.run(f"{PROOF}\nassert dist.group.WORLD is former")
    assert notices.readouterr().err == ""


TQDM = """
from tqdm import tqdm
bar = tqdm(total=2, disable=False)  # an old tqdm ends its thread with its last bar
assert type(tqdm.monitor) in map(type, threading.enumerate())
"""


@pytest.mark.parametrize("before", ["", TQDM], ids=["no other thread", "tqdm has one of its own"])
def test_a_collective_of_an_unmatched_thread_is_reported(
    cells: ddip.Group, notices: pytest.CaptureFixture[str], before: str
) -> None:
    """Otherwise it met the next cell's all_reduce: that one returned 101, and this rank waited forever."""
    cells.run(before, show_ranks=[])
    cells.run("""
        import ddip.rank.process_group.collectives as c
        before = c.counts_by_group()
        if rank == 1:
            threading.Thread(target=lambda: dist.all_reduce(torch.tensor([100.0]))).start()
            while c.counts_by_group() == before: time.sleep(0.01)
    """)
    assert "different numbers of collectives in the default group" in notices.readouterr().err
    cells.run(f"{PROOF}\nassert dist.group.WORLD is not former", timeout=20)


@pytest.mark.grid
def test_a_group_formed_by_a_cell_is_also_watched(cells: ddip.Group, notices: pytest.CaptureFixture[str]) -> None:
    cells.run(
        "dist.destroy_process_group(); dist.init_process_group('gloo')\ndist.barrier(); former = dist.group.WORLD"
    )
    cells.run("dist.all_reduce(torch.ones(1))", ranks=[0, 1])
    cells.run(f"{PROOF}\nassert dist.group.WORLD is former")
    assert notices.readouterr().err == ""
    cells.run(ONE_SIDED)
    assert "(rank 0: 3, rank 1: 4)" in notices.readouterr().err
    cells.run(PROOF)


def test_the_magic_accepts_unmatched_collectives(notebook: Notebook) -> None:
    notebook.ok(f"%%dip\n{SETUP}\npair = dist.new_group([0, 2])")
    shown = notebook.ok("%%dip -r 0\nw = dist.all_reduce(x, group=pair, async_op=True)")
    assert "a group of ranks 0, 2 (rank 2: 0, rank 0: 1)" in shown.stderr
    shown = notebook.ok("%%dip\npair = dist.new_group([0, 2])")
    shown = notebook.ok("%%dip -r 0 --unmatched\nw = dist.all_reduce(x, group=pair, async_op=True)")
    assert shown.stderr == ""
    shown = notebook.ok("""
        %%dip -r 2
        dist.all_reduce(x, group=pair)
        assert x.item() == 2
    """)
    assert shown.stderr == ""
    shown = notebook.ok("%%dip -r 0,2\ndist.all_reduce(x, group=pair)")
    assert shown.stderr == ""
