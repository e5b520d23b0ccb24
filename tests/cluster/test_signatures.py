"""Collectives that meet although they do not match: reported if they have ended, and aborted if they never end."""

from __future__ import annotations

import concurrent.futures

import pytest

import ddip
from ddip.group.cells.cell_state import Action, Event, RankAction
from ddip.group.cells.running import RunningCell

from .variants import few

SET_UP = """
import time, torch, torch.distributed as dist
ones = torch.ones(4)
kind = torch.float32, torch.int32
formats = torch.contiguous_format, torch.channels_last
"""
WRONG = {
    "dtypes": "dist.all_reduce(ones if rank == 0 else ones.int())",
    "memory formats": "dist.all_reduce(ones.view(1, 2, 1, 2).contiguous(memory_format=formats[rank]))",
    "reductions": "dist.all_reduce(ones, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])",
    "gathered dtypes": "dist.all_gather([ones.to(kind[rank]) for _ in kind], ones.to(kind[rank]))",
    "in an earlier collective": "dist.all_reduce(ones if rank == 0 else ones.int())\nfor _ in 'ab': dist.barrier()",
}
ENDLESS = {
    "operations": "dist.all_reduce(ones) if rank == 0 else dist.broadcast(ones, 0)",
    "sizes": "dist.all_reduce(torch.ones(3 + rank))",
    "roots": "dist.broadcast(ones, rank)",
    "roots of reduce": "dist.reduce(ones, rank)",
    "with a slow end": "try: dist.all_reduce(torch.ones(3 + rank))\nfinally: time.sleep(4)",
}
RIGHT = """
parts = [torch.zeros(2) for _ in range(world_size)]
dist.all_gather(parts, torch.ones(2))
dist.all_gather_into_tensor(torch.zeros(2 * world_size), torch.ones(2))
dist.scatter(torch.zeros(2), parts if rank == 0 else None)
dist.gather(torch.ones(2), parts if rank == 0 else None)
dist.reduce(torch.ones(2), 1)
try: dist.reduce_scatter(torch.zeros(2), parts)
except RuntimeError: pass  # gloo of torch 2.7 has none
dist.all_to_all_single(torch.zeros(3), torch.ones(3), [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1])
found = [None] * world_size
dist.all_gather_object(found, "x" * 1000 * rank)
dist.gather_object("x" * rank, found if rank == 0 else None)
dist.broadcast_object_list(found if rank == 0 else [None] * world_size, 0)
dist.scatter_object_list([None], ["a", "bc"] if rank == 0 else None)
dist.all_reduce(torch.ones(2, 3) if rank == 0 else torch.ones(3, 2))
dist.all_reduce(torch.ones(2, dtype=torch.complex64))
dist.all_reduce(torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
dist.all_reduce(torch.ones(2, 3, 1, 1).contiguous(memory_format=formats[rank]))
dist.barrier()
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1 + rank, 2)).sum().backward()
"""
PROOF = "total = torch.ones(2); dist.all_reduce(total); assert total.tolist() == [2.0, 2.0]"


@pytest.fixture
def ranks(cells: ddip.Group) -> ddip.Group:
    """Return the shared group, whose cells report no stall."""
    cells.options.stall_timeout = 1000.0
    cells.run(SET_UP)
    return cells


@pytest.mark.parametrize("name", few(WRONG, "dtypes", "memory formats"))
def test_wrong_results_of_different_collectives_are_reported(
    ranks: ddip.Group, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(WRONG[name])
    shown = capsys.readouterr().err
    assert "different collectives" in shown and "  rank 1: all_" in shown and "] line 1: dist.all" in shown
    ranks.run(PROOF)
    assert "different" not in capsys.readouterr().err


@pytest.mark.native("sockets")
@pytest.mark.parametrize("name", few(ENDLESS, "sizes"))
def test_different_collectives_that_wait_for_each_other_are_aborted(ranks: ddip.Group, name: str) -> None:
    with pytest.raises(ddip.CellError, match=r"different collectives.*\n  rank 0: .*line 1: .*\n  rank 1: "):
        ranks.run(ENDLESS[name])
    ranks.run(PROOF)


def test_collectives_that_match_are_not_reported(ranks: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(RIGHT)
    ranks.run(PROOF)
    ranks.run(PROOF, ranks=[0, 1])
    assert "different" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.native("sockets")
def test_a_cell_that_fails_or_catches_the_error_reports_them(
    ranks: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ddip.CellError, match="ZeroDivisionError") as caught:
        ranks.run(f"{WRONG['dtypes']}\n1 / 0")
    shown = str(caught.value) + capsys.readouterr().err  # the error reports them if both ranks waited in them
    assert "different collectives" in shown
    ranks.run(f"{SET_UP}\ntry: dist.all_reduce(torch.ones(3 + rank))\nexcept RuntimeError: pass")
    assert "different collectives" in capsys.readouterr().err
    ranks.run(PROOF)


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
def test_a_later_error_reports_aborted_different_collectives(ranks: ddip.Group) -> None:
    with pytest.raises(ddip.CellError, match="(?s)ZeroDivisionError.*different collectives"):
        ranks.run(f"try: {ENDLESS['roots']}\nexcept RuntimeError: pass\n1 / 0")
    ranks.run(PROOF)


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_a_timeout_reports_aborted_different_collectives(ranks: ddip.Group) -> None:
    with pytest.raises(ddip.CellTimeout, match="different collectives"):
        ranks.run(f"try: {ENDLESS['roots']}\nfinally: time.sleep(60)", timeout=12)
    ranks.run(PROOF)


@pytest.mark.slow
def test_a_slow_rank_that_is_aborted_hides_no_wrong_results(
    ranks: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.options.failure_grace = 0.0
    with pytest.raises(ddip.CellError, match="ZeroDivisionError"):
        ranks.run(f"{WRONG['dtypes']}\nif rank == 0: 1 / 0\ntime.sleep(1)")
    assert capsys.readouterr().err.count("different collectives") == 1
    ranks.run(PROOF)


@pytest.mark.native("sockets")
def test_different_collectives_before_one_that_a_rank_alone_has_begun_are_reported(
    ranks: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ddip.CellError, match="ZeroDivisionError"):
        ranks.run(f"{WRONG['dtypes']}\nif rank == 0: 1 / 0\ndist.barrier()")
    shown = capsys.readouterr().err
    assert shown.count("different collectives") == 1 and "  rank 1: all_reduce (4 int32, SUM), cell" in shown
    ranks.run(PROOF)


@pytest.mark.slow
def test_a_release_after_the_last_report_hides_no_wrong_results(
    ranks: ddip.Group, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load, the other rank's report may be on its way when the group is released."""
    perform = RunningCell._perform

    def perform_late(running: RunningCell, action: Action) -> Event | None:
        if action is RankAction.ABORT:
            concurrent.futures.wait(running.replies.values(), timeout=60)
        return perform(running, action)

    monkeypatch.setattr(RunningCell, "_perform", perform_late)
    ranks.options.failure_grace = 0.0
    with pytest.raises(ddip.CellError, match="ZeroDivisionError"):
        ranks.run(f"{WRONG['dtypes']}\ntime.sleep(rank)\n1 / 0")
    assert capsys.readouterr().err.count("different collectives") == 1
    ranks.run(PROOF)


@pytest.mark.grid
def test_a_rank_that_cannot_be_stopped_hides_no_wrong_results(
    ranks: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = "while rank:\n    try: time.sleep(1)\n    except BaseException: pass"
    with pytest.raises(ddip.CellTimeout, match="rank 1 did not stop"):
        ranks.run(f"{WRONG['dtypes']}\n{endless}", timeout=2)
    assert capsys.readouterr().err.count("different collectives") == 1
    ranks.repair()
    ranks.run(SET_UP + PROOF)


@pytest.mark.grid
def test_uneven_batches_in_join_are_not_reported(ranks: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that has no batches left begins in Python what the reducers of the others begin in C++."""
    ranks.run("""
        def train(number):
            with net.join():
                for _ in range(number): net(torch.ones(1, 2)).sum().backward()
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True)
    """)
    ranks.run("train(2 + rank)")
    ranks.run("train(3 - rank)")
    assert "different" not in capsys.readouterr().err


@pytest.mark.grid
def test_intended_differences_keep_the_group(ranks: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run("pair = dist.new_group()")
    ranks.run(WRONG["dtypes"].replace("int())", "int(), group=pair)"), unmatched=True)
    ranks.run("dist.barrier(pair)")
    assert "different" not in capsys.readouterr().err
