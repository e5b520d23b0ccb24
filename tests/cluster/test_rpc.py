"""RPC in a cell that fails: whoever waits in it is released, and it can be started again in the next cell."""

from __future__ import annotations

import os
import signal

import pytest

import ddip

from .leftovers import wait_until

BEGIN = """
import torch, torch.distributed as dist, torch.distributed.rpc as rpc
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
other = f"worker{(rank + 1) % world_size}"
assert rpc.rpc_sync(other, torch.add, args=(torch.ones(1), 1)).item() == 2
"""
END = "rpc.shutdown()"
SLOW = """
import threading
let_go = threading.Event()
def slow(): let_go.wait()
"""
FAILS = {
    "before it ends": (BEGIN, "if rank == 1: raise ValueError\nrpc.shutdown()"),
    "on rank 0, before it ends": (BEGIN, "if rank == 0: raise ValueError\nrpc.shutdown()"),
    "before it begins": ("", f"if rank == 1: raise ValueError\n{BEGIN}"),
    "on rank 0, before it begins": ("", f"if rank == 0: raise ValueError\n{BEGIN}"),
    "in a collective": (BEGIN, "if rank == 1: raise ValueError\ndist.barrier()"),
}

SOME = {"before it ends", "before it begins"}
"""The others are of the grid."""


@pytest.fixture
def ranks(cells: ddip.Group) -> ddip.Group:
    cells.failure_grace = 0.1
    return cells


@pytest.mark.parametrize(
    "where", [where if where in SOME else pytest.param(where, marks=pytest.mark.grid) for where in FAILS]
)
def test_rpc_begins_and_ends_again_after_a_rank_has_failed(
    ranks: ddip.Group, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, code = FAILS[where]
    ranks.run(before)
    with pytest.raises(ddip.CellError, match="ValueError; rank . was blocked in"):
        ranks.run(code, timeout=30)
    for _ in range(2):
        ranks.run(BEGIN, timeout=30)
        ranks.run(END, timeout=30)
    told = "RPC was shut down: call init_rpc again" in capsys.readouterr().err
    assert told or not before


def test_a_call_whose_answer_does_not_come_is_released(ranks: ddip.Group) -> None:
    """And it goes on there; until it returns, RPC is refused with a word."""
    ranks.run(BEGIN + SLOW + "from ddip.rank import rpc as ours; usual, ours.SECONDS = ours.SECONDS, 0.5")
    with pytest.raises(ddip.CellError, match="rank 1: ValueError; rank 0 was blocked in rpc_sync"):
        ranks.run("if rank == 0: rpc.rpc_sync(other, slow, timeout=0)\nraise ValueError", timeout=30)
    with pytest.raises(ddip.CellError, match="rank 1: RuntimeError: a function .* still runs .* %makedip --repair"):
        ranks.run(BEGIN, timeout=30)
    ranks.run("""
        let_go.set()
        ours.SECONDS = usual
        for thread in threading.enumerate():
            if thread.name == "ddip-rpc": thread.join()
    """)
    ranks.run(BEGIN, timeout=30)
    ranks.run(END, timeout=30)


@pytest.mark.grid
def test_a_new_rank_begins_rpc_with_the_others_unless_these_have_ended_one() -> None:
    """torch counts the ends in each process; ranks with different numbers would wait for each other."""
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run(BEGIN)
        replace(group, 1)
        group.run(BEGIN, timeout=30)
        group.run(END, timeout=30)
        replace(group, 1)
        with pytest.raises(ddip.CellError, match="ranks 0, 1: RuntimeError: RPC cannot begin again: .* %makedip -r,"):
            group.run(BEGIN, timeout=30)


def replace(group: ddip.Group, rank: int) -> None:
    os.kill(group.members[rank].pid, signal.SIGKILL)
    wait_until(lambda: group.ranks.ended)
    group.repair()


@pytest.mark.grid
def test_references_of_a_second_rpc_do_not_hold_up_its_end(ranks: ddip.Group) -> None:
    """torch alone waits for 100 s there, twice."""
    remote = f"{BEGIN}assert rpc.remote(other, torch.add, args=(torch.ones(1), 1)).to_here().item() == 2\n{END}"
    ranks.run(remote, timeout=30)
    ranks.run(remote, timeout=60)
