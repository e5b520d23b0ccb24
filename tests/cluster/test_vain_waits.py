"""Waits that can never end are aborted at once; waits that may end are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.errors import CellInterrupted
from ddip.group.cells import cell_state

from .meanwhile import meanwhile, press_stop
from .rank_errors import raises_on_ranks
from .variants import few

pytestmark = pytest.mark.native("sockets")
SET_UP = """
import os, signal, threading, time, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
x = torch.ones(3)
net = torch.nn.Linear(4, 1)
wrapper = DDP(net)
wrapper_with_buffers = DDP(torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1)))
optimizer = torch.optim.AdamW(wrapper.parameters(), 0.1)
def step(number):
    optimizer.zero_grad()
    loss = wrapper(torch.full((2, 4), number + rank + 1.0)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()
def train(): return [step(number) for number in range(10)], [p.tolist() for p in net.parameters()]
"""
WAITS = {
    "all_reduce": "dist.all_reduce(x)",
    "recv": "dist.recv(x, 0)",
    "all_gather_object": "dist.all_gather_object([None] * world_size, rank)",
    "backward": "wrapper(torch.ones(2, 4)).sum().backward()",
    "buffers": "wrapper_with_buffers(torch.ones(2, 4))",
    "tensors of functional collectives": "functional.all_reduce(x, 'sum', dist.group.WORLD).tolist()",
}
PROOF = "y = torch.full((3,), rank + 1.0); dist.all_reduce(y); assert y.tolist() == [3.0] * 3"


@pytest.fixture(scope="module")
def group_without_threads() -> Iterator[ddip.Group]:
    """Return a group on which no earlier test has left a thread, which might take a missing part."""
    with ddip.Group(2, failure_grace=1000, stall_timeout=1000) as group:
        yield group


@pytest.fixture
def ranks(group_without_threads: ddip.Group) -> ddip.Group:
    """Return two ranks that no time limit of a cell unblocks within the test."""
    group_without_threads.run(SET_UP)
    return group_without_threads


@pytest.mark.parametrize("name", few(WAITS, "all_reduce", "backward", "buffers"))
def test_ranks_waiting_for_a_failed_one_are_unblocked_at_once(ranks: ddip.Group, name: str) -> None:
    with raises_on_ranks({0: "ValueError"}, {1: ""}):
        ranks.run(f"if rank == 0: raise ValueError\n{WAITS[name]}")
    ranks.run(PROOF)


def test_ranks_waiting_for_an_ended_process_are_unblocked_at_once(ranks: ddip.Group) -> None:
    with raises_on_ranks({0: "RankEnded"}, {1: ""}):
        ranks.run("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert ranks.repair() == [0]
    ranks.run(SET_UP + PROOF)


def test_a_collective_on_one_rank_ends_the_cell_at_once(ranks: ddip.Group) -> None:
    line = r"rank 0 was blocked in all_reduce, cell \[\d+\] line 1, until ddip aborted it; "
    with pytest.raises(ddip.CellError, match=f"^{line}rank 1 finished the cell without it$"):
        ranks.run("if rank == 0: dist.all_reduce(x)")
    ranks.run(PROOF)


def test_training_after_an_unblocked_wait_equals_an_undisturbed_run(ranks: ddip.Group) -> None:
    ranks.run("undisturbed = train()")
    ranks.run(SET_UP)
    with raises_on_ranks({0: "ValueError"}, {1: "backward"}):
        ranks.run("for number in range(5):\n    if (rank, number) == (0, 3): raise ValueError\n    step(number)")
    ranks.run("net = torch.manual_seed(0) and torch.nn.Linear(4, 1)\nwrapper = DDP(net)")
    ranks.run("optimizer = torch.optim.AdamW(wrapper.parameters(), 0.1)\nassert train() == undisturbed")


def test_a_rank_whose_thread_may_join_is_awaited(ranks: ddip.Group) -> None:
    ranks.run("""
        def reduce_late(): time.sleep(1.5); dist.all_reduce(x)
        thread = threading.Thread(target=reduce_late)
        thread.start() if rank == 1 else dist.all_reduce(x)
    """)
    ranks.run("while x.tolist() != [2.0] * 3: time.sleep(0.01)", timeout=60)


PARTS_OF_RANK_1 = {
    "timer": "threading.Timer(0.6, dist.all_reduce, [x]).start()",
    "executor": "pool = ThreadPoolExecutor(1); pool.submit(time.sleep, 0.6); pool.submit(dist.all_reduce, x)",
    "task": "task = asyncio.ensure_future(reduce_late())",
    "loop": "threading.Thread(target=asyncio.run, args=[reduce_late()]).start()",
    "callback": "dist.all_reduce(y, async_op=True).get_future().then(lambda _: (time.sleep(0.6), dist.all_reduce(x)))",
}


@pytest.mark.parametrize("name", few(PARTS_OF_RANK_1, "executor", "task"))
def test_a_rank_whose_pending_code_may_join_is_awaited(ranks: ddip.Group, name: str) -> None:
    ranks.run(f"""
        import asyncio; from concurrent.futures import ThreadPoolExecutor
        y = torch.ones(3)
        async def reduce_late(): await asyncio.sleep(0.6); dist.all_reduce(x)
        if rank == 1: {PARTS_OF_RANK_1[name]}
        else: {"dist.all_reduce(y);" * (name == "callback")} dist.all_reduce(x)
    """)
    ranks.run("while x.tolist() != [2.0] * 3: time.sleep(0.01)", timeout=60)


def test_later_operations_are_not_part_of_a_wait(ranks: ddip.Group) -> None:
    ranks.run("""
        from datetime import timedelta
        from ddip.rank.process_group import collectives
        def find_awaited(work):
            (use,) = collectives.awaited_operations(work).values()
            return use["collectives"] - former, use["messages"]
        (use,) = collectives.begun_operations().values()
        former, sent = use["collectives"], use["messages"].get("to 0", 0)
        works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
        if rank == 1: works += [dist.isend(x, 0) for _ in range(2)]
        else: dist.recv(x, 1), dist.recv(x, 1)
        found = [find_awaited(work) for work in works]
        limits = [collectives.tallies.timeout_of_message(work) for work in works]
        assert limits == [None, None] + [timedelta(days=1)] * (len(works) - 2), limits
        for work in works: work.wait()
        assert found[:2] == [(1, {}), (2, {})], found
        assert found[2:] == [(-former, {"to 0": sent + n}) for n in range(1, len(found) - 1)], found
    """)


@pytest.mark.grid
def test_a_receive_outlasts_the_setup_of_a_group(ranks: ddip.Group) -> None:
    ranks.run("if rank == 0: time.sleep(6); dist.send(x, 1)\nelse: dist.recv(x, 0)")
    ranks.run("if rank == 0: time.sleep(6); dist.recv(x, 1)\nelse: dist.isend(x, 0).wait()")


@pytest.mark.grid
def test_a_rank_whose_own_cell_may_join_is_awaited(ranks: ddip.Group) -> None:
    waiting = ranks.start("dist.all_reduce(x)", ranks=[0])
    ranks.run("time.sleep(1); dist.all_reduce(x)", ranks=[1])
    assert waiting.wait_for_end(60) and waiting.outcome == "ok"
    ranks.run("assert x.tolist() == [2.0] * 3, x")


@pytest.mark.grid(in_ci=True)
def test_a_rank_that_computes_may_still_fail_by_itself(ranks: ddip.Group) -> None:
    """Rank 1 is not named as blocked: its own error is the second one."""
    with raises_on_ranks({0: "ValueError", 1: "KeyError"}, {}):
        ranks.run("if rank == 0: raise ValueError\ntime.sleep(1.5)\nraise KeyError")


def test_a_stop_ends_ranks_that_wait_for_a_stopped_one(ranks: ddip.Group) -> None:
    stopped = meanwhile(lambda: "barrier" in str(ranks.stacks()[1].place), press_stop)  # type: ignore[union-attr]
    with pytest.raises(CellInterrupted, match="ranks 0, 1$"):
        ranks.run("if rank == 0: time.sleep(1000)\ndist.barrier()")
    stopped.join()
    ranks.run(PROOF)


DEADLOCKS = {
    "two groups": "dist.barrier(pair) if rank == 0 else dist.all_reduce(x)",
    "each receives": "dist.recv(x, 1 - rank)",
}


@pytest.mark.parametrize("name", few(DEADLOCKS, "two groups"))
def test_a_stop_ends_ranks_that_wait_for_each_other(
    ranks: ddip.Group, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cell_state, "STOP_GRACE_SECONDS", 1000.0)
    monkeypatch.setattr(cell_state, "STOP_SECONDS", 1000.0)
    ranks.run("pair = dist.new_group()")
    waits = {"barrier", "all_reduce", "recv"}

    def all_wait() -> bool:
        return all(stack.place is not None and stack.place.function in waits for stack in ranks.stacks().values())

    stopped = meanwhile(all_wait, press_stop)
    with pytest.raises(CellInterrupted):
        ranks.run(DEADLOCKS[name])
    stopped.join()
    ranks.run(PROOF)
