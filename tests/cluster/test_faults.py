"""The table of faults: activity of the ranks x fault x what the user sees; the same proof after each."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

import ddip
from ddip.errors import CellInterrupted, CellTimeout, GroupError, RankError
from ddip.group.cells import cell_state, running
from ddip.group.debugging import open_questions
from ddip.protocol import on_rank

from .conftest import begin_test
from .leftovers import wait_until
from .meanwhile import meanwhile, press_stop
from .rank_errors import raises_on_ranks
from .variants import few

STAGES = {
    "all_reduce": "dist.all_reduce(x)",
    "barrier": "dist.barrier()",
    "broadcast_object_list": "dist.broadcast_object_list([rank], 0)",
    "all_gather_object": "dist.all_gather_object([None] * world_size, rank)",
    "recv": "dist.recv(x, 0)",
    "send": "dist.send(torch.ones(1_000_000), 0)",
    "wait": "work = dist.all_reduce(x, async_op=True); work.wait()",
    "subgroup": "dist.all_reduce(x, group=everybody)",
    "new_group": "dist.new_group(list(range(world_size)))",
    "DDP constructor": "DDP(torch.nn.Linear(2, 2))",
    "DDP backward": "loss.backward()",
    "FSDP forward": "sharded(torch.ones(1, 4))",
}
"""Activity of the ranks when the fault happens; rank 0 does not take part."""
if tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 6):
    del STAGES["FSDP forward"]  # FSDP needs a GPU in older versions
NAMES = {
    "broadcast_object_list": "broadcast.*",
    "all_gather_object": "all_gather.*",
    "recv": "i?recv",  # the connection may be closed before it waits
    "send": "i?send",
    "wait": "",
    "subgroup": "all_reduce",
    "DDP constructor": "DistributedDataParallel",
    "DDP backward": "backward",
    "FSDP forward": "(all_gather.*|foreach_all_gather)",
}
"""Names of the waits in messages, if they differ from the typed name."""
SET_UP = """
import os, signal, threading, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
x = torch.ones(3)
marker = f"rank {rank}"
"""
ALSO = {
    "subgroup": "everybody = dist.new_group(list(range(world_size)))",
    "DDP backward": "wrapper = DDP(torch.nn.Linear(2, 2))\nloss = wrapper(torch.ones(1, 2)).sum()",
    "FSDP forward": (
        "from torch.distributed.fsdp import fully_shard\nsharded = torch.nn.Linear(4, 4)\nfully_shard(sharded);"
    ),
}
"""Additional set-up of a stage."""
PROOF = """
import torch, torch.distributed as dist
y = torch.full((3,), float(rank))
dist.all_reduce(y)
assert y.tolist() == [world_size * (world_size - 1) / 2] * 3
assert rank in {lost} or marker == f"rank {{rank}}"
"""


def prove_ranks_work(group: ddip.Group, lost: tuple[int, ...] = ()) -> None:
    """Prove that an all_reduce over all ranks is right, and that only `lost` ranks have lost variables."""
    group.run(PROOF.format(lost=lost))


@pytest.fixture(scope="module")
def shared_four(warmed_up: None) -> Iterator[ddip.Group]:
    with pytest.MonkeyPatch.context() as patch, ddip.Group(4, failure_grace=0.1) as group:
        patch.setattr(cell_state, "STOP_GRACE_SECONDS", 0.2)
        yield group


@pytest.fixture
def four_ranks(shared_four: ddip.Group, request: pytest.FixtureRequest) -> ddip.Group:
    """Return four ranks with the definitions that the stages need."""
    shared_four.options.failure_grace, shared_four.options.stall_timeout = 0.1, 10.0
    begin_test(shared_four, request.session, SET_UP)
    return shared_four


@pytest.fixture
def stage(request: pytest.FixtureRequest, four_ranks: ddip.Group) -> str:
    """Prepare four ranks for a stage."""
    four_ranks.run(ALSO.get(request.param, ""))
    return str(request.param)


@pytest.fixture
def thread_of_rank_0(four_ranks: ddip.Group) -> Iterator[None]:
    """Run a thread of the user on rank 0: it could begin a collective, so that no wait for this rank is in vain."""
    four_ranks.run("""
        if rank == 0:
            is_over = threading.Event()
            thread = threading.Thread(target=lambda: is_over.wait())
            thread.start()
    """)
    yield
    four_ranks.run("if rank == 0: is_over.set(); thread.join()")


class Clock:
    """A clock that a test can advance by a minute."""

    ahead = 0

    def put_forward(self) -> None:
        self.ahead = 60

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock that a cell uses."""
    clock = Clock()
    for module in (running, open_questions):
        monkeypatch.setattr(module, "time", clock)
    return clock


def on_stages(*names: str, of: Collection[str] = STAGES) -> pytest.MarkDecorator:
    """Parametrize over stages; those in `names` run on each change, the others with the grids."""
    return pytest.mark.parametrize("stage", few(of, *(name for name in names if name in of)), indirect=True)


def do_when_ranks_wait(group: ddip.Group, do: Callable[[], None]) -> threading.Thread:
    """Run `do` once ranks 1 to 3 wait for rank 0."""

    def read_progress() -> list[object]:
        answers = group.ranks.call_on_control_channel(range(4), on_rank.main_thread_pulse(), 10)
        places = group.ranks.stack_locations(range(4), 10)
        idle = places[0] is not None and places[0].state == "idle"
        waiting = all(place is not None and place.line == 2 for rank, place in places.items() if rank)
        return [idle and waiting, *(answers[rank] and answers[rank][0] for rank in (1, 2, 3))]

    def ranks_wait() -> bool:
        before = read_progress()
        return bool(before[0]) and read_progress() == before

    return meanwhile(ranks_wait, do)


def waiting_pattern(stage: str) -> str:
    name = NAMES.get(stage, stage)
    return rf"{name}, cell \[\d+\] line 2" if name else r"cell \[\d+\] line 2"


@on_stages("all_reduce")
@pytest.mark.native("sockets")
def test_one_rank_raises_and_the_others_wait(four_ranks: ddip.Group, stage: str) -> None:
    with raises_on_ranks({0: "ValueError"}, dict.fromkeys((1, 2, 3), "")) as caught:
        four_ranks.run(f"if rank == 0: raise ValueError('boom')\n{STAGES[stage]}")
    assert all(re.fullmatch(waiting_pattern(stage), caught.value.by_rank[rank].waited) for rank in (1, 2, 3))
    shown = "\n".join(caught.value._render_traceback_())
    assert "boom" in shown and "gloo" not in shown and "Connection" not in shown
    prove_ranks_work(four_ranks)


@pytest.mark.grid(in_ci=True)
@on_stages("DDP backward")
@pytest.mark.native("sockets")
@pytest.mark.usefixtures("thread_of_rank_0")
def test_when_one_rank_finishes_a_stop_ends_the_others(four_ranks: ddip.Group, stage: str) -> None:
    thread = do_when_ranks_wait(four_ranks, press_stop)
    with pytest.raises(CellInterrupted, match="ranks 1-3$"):
        four_ranks.run(f"if rank:\n    {STAGES[stage]}")
    thread.join()
    prove_ranks_work(four_ranks)


@on_stages("all_reduce", of=("all_reduce", "new_group", "DDP backward"))  # the other stages behave as above
@pytest.mark.native("sockets")
@pytest.mark.usefixtures("thread_of_rank_0")
def test_when_one_rank_finishes_a_timeout_ends_the_others(four_ranks: ddip.Group, stage: str, clock: Clock) -> None:
    thread = do_when_ranks_wait(four_ranks, clock.put_forward)
    with pytest.raises(CellTimeout) as caught:
        four_ranks.run(f"if rank:\n    {STAGES[stage]}", timeout=60)
    thread.join()
    assert re.search(f"\n  ranks 1-3: {waiting_pattern(stage)}", str(caught.value))
    prove_ranks_work(four_ranks)


@on_stages("all_reduce")
@pytest.mark.native("sockets")
def test_one_rank_dies_and_the_others_wait(four_ranks: ddip.Group, stage: str) -> None:
    pid = four_ranks.members[0].pid
    with raises_on_ranks({0: "RankEnded"}, dict.fromkeys((1, 2, 3), "")) as caught:
        four_ranks.run(f"if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n{STAGES[stage]}")
    by_rank = caught.value.by_rank
    assert by_rank[0].pid == pid and "SIGKILL" in by_rank[0].message
    assert all(re.fullmatch(waiting_pattern(stage), by_rank[rank].waited) for rank in (1, 2, 3))
    assert "%makedip --repair" in str(caught.value)
    with pytest.raises(GroupError, match=f"^rank 0: pid {pid} .*--repair"):
        four_ranks.run("pass")
    assert four_ranks.repair() == [0]
    prove_ranks_work(four_ranks, lost=(0,))


@pytest.mark.grid
@pytest.mark.timeout(600)  # eight spawned ranks start slowly on a loaded machine
@pytest.mark.parametrize("size", [2, 8])
def test_groups_of_other_sizes_recover(size: int) -> None:
    with ddip.Group(size, failure_grace=0.1) as group:
        for stage in ("all_reduce",) if size == 2 else ("all_reduce", "DDP backward"):
            group.run(SET_UP + ALSO.get(stage, ""))
            with raises_on_ranks({0: "ValueError"}, dict.fromkeys(range(1, size), "")):
                group.run(f"if rank == 0: raise ValueError('boom')\n{STAGES[stage]}")
            prove_ranks_work(group)
        with pytest.raises(ddip.CellError, match="^rank 1: RankEnded"):
            group.run("if rank == 1: os._exit(3)\ndist.barrier()")
        assert group.repair() == [1]
        prove_ranks_work(group, lost=(1,))


@pytest.mark.parametrize(
    ("death", "told"),
    [
        pytest.param("import ctypes; ctypes.string_at(0)", r"\(SIGSEGV\): a crash in C code", marks=pytest.mark.grid),
        pytest.param("os.abort()", r"\(SIGABRT\): a crash in C code", marks=pytest.mark.grid),
        pytest.param(
            "os._exit(3)", r"\(exit code 3\): the cell, or a library, ended the process", marks=pytest.mark.grid
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"\(SIGKILL\): .*OOM killer \(its last known memory use was"),
    ],
)
def test_the_cause_of_a_death_is_shown(four_ranks: ddip.Group, death: str, told: str, tmp_path: Path) -> None:
    engine = four_ranks.members[2].engine
    four_ranks.ranks._memory_of_engine.clear()
    # Its memory has been sampled
    thread = meanwhile(lambda: engine in four_ranks.ranks._memory_of_engine, (tmp_path / "seen").touch)
    with pytest.raises(ddip.CellError) as caught:
        four_ranks.run(
            "import pathlib\nif rank == 2:\n"
            f"    while not pathlib.Path({str(tmp_path / 'seen')!r}).exists(): time.sleep(0.01)\n    {death}"
        )
    thread.join()
    assert re.search(told, caught.value.by_rank[2].message)
    assert four_ranks.repair(["marker"], source=1) == [2]
    four_ranks.run("assert marker == ('rank 1' if rank == 2 else f'rank {rank}')")


@pytest.mark.grid
def test_only_log_lines_of_the_last_cell_explain_ended_ranks(four_ranks: ddip.Group) -> None:
    four_ranks.run("if rank > 1: os.write(2, b'an earlier problem\\n')")
    with raises_on_ranks({2: "RankEnded", 3: "RankEnded"}) as caught:
        four_ranks.run("if rank > 1: os._exit(3)")
    assert [caught.value.by_rank[rank].traceback for rank in (2, 3)] == ["", ""]
    with pytest.raises(GroupError, match="^ranks 2, 3: .*exit code 3"):
        four_ranks.run("pass")
    four_ranks.repair()
    with pytest.raises(ddip.CellError) as caught:  # printed text waits until the log has all earlier output
        four_ranks.run(
            "import os\nif rank == 2: print('printed', flush=True); os.write(2, b'the cause\\n'); print(); os._exit(3)"
        )
    assert caught.value.by_rank[2].traceback == "end of its log:\nprinted\nthe cause"
    four_ranks.repair()
    four_ranks.run(SET_UP)


def test_the_next_cell_reports_the_death_of_an_idle_rank(four_ranks: ddip.Group) -> None:
    os.kill(four_ranks.members[3].pid, signal.SIGKILL)
    wait_until(lambda: four_ranks.ranks.ended)
    with pytest.raises(GroupError, match="^rank 3: .*SIGKILL"):
        four_ranks.run("pass")
    four_ranks.repair()
    prove_ranks_work(four_ranks, lost=(3,))


@pytest.mark.grid
def test_a_rank_may_die_during_a_rebuild(four_ranks: ddip.Group) -> None:
    """Leave some ranks that have begun to join, and others that have not."""
    four_ranks.run(
        "from ddip.rank.process_group import membership\nif rank == 1: membership.join_group = lambda seat: os._exit(5)"
    )
    with pytest.raises(ddip.CellError):
        four_ranks.run("if rank == 0: raise ValueError\ndist.barrier()")
    with pytest.raises(GroupError, match="rank 1: RankEnded: .*--repair"):
        four_ranks.run("pass")
    assert four_ranks.repair() == [1]
    prove_ranks_work(four_ranks, lost=(1,))


def test_processes_forked_by_dead_ranks_end_with_them(four_ranks: ddip.Group) -> None:
    """Forked processes hold connections of the dead ranks: unless they end, the other ranks wait for them."""
    four_ranks.run("child = os.fork() if rank in (1, 2) else 0\nif rank in (1, 2) and not child: time.sleep(1000)")
    with pytest.raises(ddip.CellError, match="^ranks? [12]"):
        four_ranks.run("if rank in (1, 2): os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert four_ranks.repair() == [1, 2]
    prove_ranks_work(four_ranks, lost=(1, 2))


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_a_daemon_of_a_dead_rank_delays_no_other_rank(four_ranks: ddip.Group, tmp_path: Path) -> None:
    """The kernel does not notify the other ranks while the daemon keeps the connections open."""
    four_ranks.run(f"""
        import pathlib
        child = os.fork() if rank == 1 else 0
        if rank == 1 and not child:
            os.setsid()
            pathlib.Path({str(tmp_path / "daemon")!r}).write_text(str(os.getpid()))
            time.sleep(1000)
    """)
    wait_until(lambda: (tmp_path / "daemon").exists() and (tmp_path / "daemon").read_text())
    try:
        with raises_on_ranks({1: "RankEnded"}, dict.fromkeys((0, 2, 3), "gather")):
            four_ranks.run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.gather(x, None, 1)", timeout=20)
    finally:
        os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)
    assert four_ranks.repair() == [1]
    prove_ranks_work(four_ranks, lost=(1,))


@pytest.mark.grid
def test_a_rank_that_cannot_be_stopped_is_named_and_replaced(
    four_ranks: ddip.Group, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_and_advance_clock() -> None:
        press_stop()
        wait_until(lambda: [info.state for info in four_ranks.info() if info.rank != 1] == ["idle"] * 3)
        clock.put_forward()

    monkeypatch.setattr(cell_state, "STOP_SECONDS", 60)
    thread = meanwhile((tmp_path / "held").exists, stop_and_advance_clock)
    with pytest.raises(CellInterrupted) as caught:
        four_ranks.run(f"""
            import ctypes, pathlib
            if rank == 1:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                print("sleeping", flush=True)
                pathlib.Path({str(tmp_path / "held")!r}).touch()
                while True: ctypes.PyDLL(None).sleep(1000)  # holds the interpreter
            else: dist.barrier()
        """)
    thread.join()
    shown = r"\nrank 1 .*\n  rank 1: line 6 .*C code.*\n\[rank 1\] last output:\nsleeping\n.*%makedip --repair"
    assert re.search(shown, str(caught.value))
    with pytest.raises(GroupError, match="^rank 1 .*\n  rank 1: line 6 "):
        four_ranks.run("pass")
    assert four_ranks.repair(["marker"], 0) == [1]
    prove_ranks_work(four_ranks, lost=(1,))


@pytest.mark.native("sockets")
def test_an_error_raised_by_a_rank_itself_is_reported(four_ranks: ddip.Group, tmp_path: Path) -> None:
    first = tmp_path / "first"
    thread = meanwhile(lambda: first.exists() and four_ranks.info()[0].state == "idle", (tmp_path / "go").touch)
    with raises_on_ranks({0: "ValueError", 1: "KeyError"}, {2: "barrier", 3: "barrier"}) as caught:
        four_ranks.run(f"""
            import pathlib; first, go = pathlib.Path({str(first)!r}), pathlib.Path({str(tmp_path / "go")!r})
            if rank == 0: first.touch(); raise ValueError('first')
            while rank == 1 and not go.exists(): time.sleep(0.01)
            if rank == 1: raise KeyError('second')
            dist.barrier()
        """)
    thread.join()
    by_rank = caught.value.by_rank
    assert all(re.fullmatch(r"barrier, cell \[\d+\] line 5", by_rank[rank].waited) for rank in (2, 3))
    assert all(isinstance(error, RankError) for error in by_rank.values())
    prove_ranks_work(four_ranks)


@pytest.mark.parametrize(
    ("ranks", "lists"),
    [
        ([0, 1, 2, 3], "[0, 1] if rank == 0 else [1, 2]"),
        *(
            pytest.param(ranks, lists, marks=pytest.mark.grid)
            for ranks, lists in [
                ([0, 1, 2, 3], "[rank, (rank + 1) % 4]"),
                ([0, 1, 2], "[0, 1, 2] if rank else [0, 2, 3]"),
                ([0, 1, 2, 3], "[0, 1] if rank == 0 else [0, 2]"),
                ([0, 1, 2, 3], "[0, 1] if rank == 0 else [2, 3]"),
                ([0, 1, 2, 3], "[0, 1] if rank < 2 else [1, 2, 3]"),
                ([0, 1, 2, 3], "[0, 1, 2, 3] if rank else [0, 1]"),
                ([0, 1, 2, 3], "[0, 1] if rank < 2 else [2, 3]"),
                ([0, 1], "[0, 1] if rank == 0 else [1, 2]"),
                ([0, 1, 2], "[0, 1] if rank == 0 else [1, 2]"),
            ]
        ),
    ],
)
def test_disagreeing_members_of_a_new_group_cause_an_error(
    four_ranks: ddip.Group, ranks: list[int], lists: str
) -> None:
    four_ranks.options.failure_grace = 0.5
    began = time.monotonic()
    with pytest.raises(ddip.CellError, match=r"RuntimeError: .*rank \d has \[.*\], rank \d has \["):
        four_ranks.run(f"made = dist.new_group({lists})", ranks)
    assert time.monotonic() - began < 20  # about 2 s on an idle machine
    prove_ranks_work(four_ranks)
    four_ranks.run("""
        made = dist.new_group([0, 1, 2, 3])
        dist.all_reduce(x, group=made)
        assert x.tolist() == [4.0] * 3
    """)


def test_subgroups_formed_by_some_ranks_do_not_break_later_ones(four_ranks: ddip.Group) -> None:
    four_ranks.run("pair = dist.new_group([0, 1])", [0, 1])
    four_ranks.run("pair = dist.new_group([2, 3])\npair = dist.new_group([2, 3])", [2, 3])
    four_ranks.run(
        "all_ranks = dist.new_group([0, 1, 2, 3])\nfor group in (pair, all_ranks): dist.all_reduce(x, group=group)"
    )
    four_ranks.run("assert x.tolist() == [8.0] * 3")


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "make",
    [
        "init_device_mesh('cpu', (2, 2) if rank else (4, 1), mesh_dim_names=('a', 'b'))['a'].get_group()",
        pytest.param(
            "dist.split_group(split_ranks=[[0, 1], [2, 3]] if rank == 0 else [[0], [1, 2, 3]])", marks=pytest.mark.grid
        ),
    ],
)
def test_ranks_that_disagree_about_splits_can_be_unblocked(four_ranks: ddip.Group, make: str) -> None:
    four_ranks.run("from torch.distributed.device_mesh import init_device_mesh")
    with pytest.raises(ddip.CellError):
        four_ranks.run(make, timeout=3)
    prove_ranks_work(four_ranks)
