"""Collectives that fail: their tensors are restored or named, and the group is rebuilt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import ddip

from .conftest import FORGET, begin_test
from .variants import few

SETUP = "import os, time, torch, torch.distributed as dist\nfrom datetime import timedelta"
LINES = {
    "all_reduce": "dist.all_reduce(total)",
    "reduce": "dist.reduce(total, 2)",
    "maximum": "dist.all_reduce(total, dist.ReduceOp.MAX)",
    "method": "dist.group.WORLD.allreduce([total]).wait()",
    "parameter": "dist.all_reduce(parameter.data)",
    "coalesced": "dist.all_reduce_coalesced([total, parameter.data])",
    "asynchronous": "work = dist.all_reduce(total, async_op=True); work.wait()",
    "subgroup": "dist.all_reduce(total, group=side)",
    "broadcast": "dist.broadcast(total, 3)",
}


@pytest.fixture(scope="module")
def shared_four(warmed_up: None) -> Iterator[ddip.Group]:
    with ddip.Group(4) as group:
        yield group


@pytest.fixture
def four_ranks(shared_four: ddip.Group, request: pytest.FixtureRequest) -> ddip.Group:
    """Return four ranks: with fewer, no rank gets part of a sum."""
    begin_test(shared_four, request.session, FORGET)
    shared_four.run(f"{SETUP}\ntotal = torch.tensor([float(rank + 1)]); parameter = torch.nn.Parameter(total.clone())")
    return shared_four


@pytest.mark.parametrize("what", few(LINES, "all_reduce"))
@pytest.mark.native("sockets")
def test_an_aborted_collective_leaves_its_tensors_unchanged(four_ranks: ddip.Group, what: str) -> None:
    line = LINES[what]
    side = "side = dist.new_group([0, 1, 2, 3])"
    four_ranks.run(side, show_ranks=[])
    with pytest.raises(ddip.CellError):
        four_ranks.run(f"if rank == 1: raise ValueError\n{line}")
    completed = 4 if what == "broadcast" else 0  # on ranks that rank 1 did not keep waiting
    four_ranks.run(f"assert total.item() in (rank + 1, {completed}) and parameter.item() == rank + 1")
    four_ranks.run(side, show_ranks=[])
    four_ranks.run(line, show_ranks=[])
    if what == "all_reduce":
        four_ranks.run("assert total.item() == 10")


@pytest.mark.native("sockets")
def test_restored_tensors_are_named(four_ranks: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ddip.CellError):
        four_ranks.run("if rank == 1: raise ValueError\ndist.all_reduce(total)")
    stderr = capsys.readouterr().err
    found = re.findall(r"ranks? (.*): restored the tensor of the aborted collective `dist.all_reduce\(total\)`", stderr)
    assert (
        len(found) == 1
        and "1" not in found[0]
        and re.search(r"`dist.all_reduce\(total\)` \(cell \[\d+\] line 2\)", stderr)
    )
    four_ranks.run("pass")
    assert "restored" not in capsys.readouterr().err


@pytest.mark.native("sockets")
def test_tensors_of_an_unawaited_work_are_also_restored(four_ranks: ddip.Group) -> None:
    with pytest.raises(ddip.CellError):
        four_ranks.run("""
            work = dist.all_reduce(total, async_op=True) if rank != 1 else None
            dist.barrier() if rank != 1 else 1 / 0
        """)
    four_ranks.run("assert total.item() == rank + 1\ndist.all_reduce(total)\nassert total.item() == 10")


@pytest.mark.native("sockets")
def test_a_list_that_changes_meanwhile_costs_no_other_tensor(four_ranks: ddip.Group) -> None:
    four_ranks.run("other = torch.zeros(1); tensors = [total]")
    with pytest.raises(ddip.CellError):
        four_ranks.run("""
            if rank == 1: raise ValueError
            work = dist.group.WORLD.allreduce(tensors)
            tensors[0] = other
            work.wait()
        """)
    four_ranks.run("assert total.item() == rank + 1 and other.item() == 0")


@pytest.mark.native("sockets")
def test_a_large_tensor_is_named(four_ranks: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ddip.CellError):
        four_ranks.run("large = torch.ones(100_000)\nif rank == 1: raise ValueError\ndist.all_reduce(large)")
    stderr = capsys.readouterr().err
    assert (
        "ranks 0, 2, 3: the tensor of `dist.all_reduce(large)` (cell [" in stderr
        and "may hold partial results" in stderr
    )


def test_internal_tensors_are_not_mentioned(four_ranks: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ddip.CellError):
        four_ranks.run("if rank == 1: raise ValueError\ndist.broadcast_object_list([rank], 3)")
    assert "tensor" not in capsys.readouterr().err


AVERAGE = """
for one in net.parameters():
    if rank == 1 and fails and one is net.bias: raise ValueError
    dist.all_reduce(one.data)
for one in net.parameters(): one.data /= world_size
"""
TRAIN = """
for _ in range({steps}):
    optimizer.zero_grad(); net(torch.ones(2, 4) * (rank + 1)).sum().backward(); optimizer.step()
    for one in net.parameters(): dist.all_reduce(one.data); one.data /= world_size
"""
NET = """
torch.manual_seed(0); net, fails = torch.nn.Linear(4, 2), False
optimizer = torch.optim.Adam(net.parameters(), 0.1)
total = torch.tensor([float(rank)])
"""


@pytest.mark.native("sockets")
def test_training_after_an_aborted_average_equals_an_undisturbed_run(four_ranks: ddip.Group) -> None:
    four_ranks.run(f"{NET}{TRAIN.format(steps=3)}\ndist.all_reduce(net.bias.data){TRAIN.format(steps=10)}")
    four_ranks.run("wanted = [one.detach().clone() for one in net.parameters()]")
    four_ranks.run(f"{NET}{TRAIN.format(steps=3)}")
    with pytest.raises(ddip.CellError):
        four_ranks.run("if rank == 1: raise ValueError\ndist.all_reduce(net.bias.data)")
    four_ranks.run(f"dist.all_reduce(net.bias.data){TRAIN.format(steps=10)}")
    four_ranks.run("assert all(a.equal(b) for a, b in zip(wanted, net.parameters()))")


TIMES_OUT = """
def collective():
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=0.3), dist.group.WORLD)
    while rank and not os.path.exists({file!r}): time.sleep(0.01)
    time.sleep(0.3 * rank)  # gloo's thread on this rank sees the closed connection first
    try: dist.all_reduce(torch.ones(1))
    finally: open({file!r}, "w").close()
"""
CATCHES = "try: collective()\nexcept RuntimeError: pass"


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "set_timeout"), reason="torch 2.9 has gloo groups take another timeout"
)
@pytest.mark.parametrize(
    "code", ["collective()", pytest.param(CATCHES, marks=pytest.mark.grid)], ids=["raised", "caught"]
)
def test_a_group_in_which_a_collective_timed_out_is_rebuilt(cells: ddip.Group, tmp_path: Path, code: str) -> None:
    cells.run(f"{SETUP}\n{TIMES_OUT.format(file=str(tmp_path / 'failed'))}\nformer = dist.group.WORLD")
    if code == CATCHES:
        cells.run(code)
    else:
        with pytest.raises(ddip.CellError):
            cells.run(code)
    cells.run("""
        for i in range(10):
            y = torch.tensor([float(i)])
            dist.all_reduce(y)
            assert y.item() == 2 * i
        assert dist.group.WORLD is not former
    """)


@pytest.mark.grid(in_ci=True)
def test_an_unmatched_collective_under_detail_breaks_no_later_cell(cells: ddip.Group) -> None:
    """Set DETAIL, which makes torch check each collective in a second group.

    That group closes its connections when it has waited too long.
    """
    cells.run(f"""
        {SETUP.replace(chr(10), "; ")}
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.destroy_process_group()
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        try: dist.init_process_group("gloo", timeout=timedelta(seconds=1))  # torch 2.4 cuts off fractions
        finally: dist.set_debug_level(dist.DebugLevel.OFF)
        dist.all_reduce(torch.ones(1))
        former = dist.group.WORLD
    """)
    cells.run("try: dist.all_reduce(torch.ones(1)) if rank else None\nexcept RuntimeError: pass")
    cells.run("""
        for i in range(10):
            y = torch.tensor([float(i)])
            dist.all_reduce(y)
            assert y.item() == 2 * i
        assert dist.group.WORLD is not former
    """)
