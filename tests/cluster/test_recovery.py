"""After a failure: what is kept, what must be recreated, and which messages say so."""

from __future__ import annotations

import gc
import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

import ddip
from ddip.cluster import ipp_private
from ddip.errors import CellInterrupted, GroupError, RequestFailed, RequestInterrupted, TransferError
from ddip.group.members.placement import Request
from ddip.output.cells.router import CellOutput
from ddip.protocol import on_rank, switches

from .apps import installed_app
from .leftovers import controllers_of, is_alive, wait_until
from .meanwhile import StderrText, meanwhile, press_stop
from .notebook import ANSI
from .rank_errors import raises_on_ranks
from .self_harm import DIES_CONNECTING, KINDS, SET_UP, prove_repair
from .variants import few

PROOF = "import torch, torch.distributed as dist\ny = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"
DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(rank)
net = torch.nn.Linear(2, 1)
wrapper = DDP(net)
def step(wrapper):
    wrapper.zero_grad()
    wrapper(torch.full((4, 2), rank + 1.0)).sum().backward()
    with torch.no_grad():
        for p in wrapper.parameters(): p -= 0.1 * p.grad
def same():
    found = [None] * world_size
    dist.all_gather_object(found, [p.tolist() for p in net.parameters()])
    return all(f == found[0] for f in found)
"""


@pytest.fixture(autouse=True)
def short_time_limits(group: ddip.Group) -> None:
    group.options.failure_grace, group.options.stall_timeout, group.options.timeout = 0.1, 10.0, 60


# -- kept variables


def test_a_rebuild_keeps_the_cells_device_and_threads(cells: ddip.Group) -> None:
    read = "torch.get_num_threads(), {name: os.environ.get(name) for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')}"
    cells.run(f"import os, torch, torch.distributed as dist\nformer_threads, former = {read}")
    cells.run("device = {'kind': 'thermometer'}; torch.set_num_threads(2); os.environ['OMP_NUM_THREADS'] = '2'")
    cells.run("dist.destroy_process_group()")
    cells.run(f"dist.barrier(); found = device, {read}")
    cells.run("torch.set_num_threads(former_threads); device = torch.device('cpu')")
    cells.run("os.environ.update({name: value for name, value in former.items() if value is not None})")
    for rank in range(2):
        device, threads, variables = cells.pull_all(["found"], [rank])[0][0]["found"]
        assert (device, threads, variables["OMP_NUM_THREADS"]) == ({"kind": "thermometer"}, 2, "2")


@pytest.mark.parametrize("code", ["1 / 0", "dist.all_reduce(x); 1 / 0", "wrapper(torch.ones(1, 2)); nothing"])
def test_an_error_with_ranks_in_step_keeps_the_group(cells: ddip.Group, code: str) -> None:
    cells.run(DDP + "x = torch.ones(1)\nformer = dist.group.WORLD")
    cells.options.failure_grace = 30  # all ranks end by themselves, even if one is slow
    with pytest.raises(ddip.CellError):
        cells.run(code)
    cells.run("""
        assert dist.group.WORLD is former
        step(wrapper)
        assert same()
    """)


def test_an_error_with_ranks_out_of_step_rebuilds_the_group(cells: ddip.Group) -> None:
    """Every rank has ended by itself, but rank 0's next all_reduce would meet rank 1's last one."""
    cells.run("""
        import torch, torch.distributed as dist
        x = torch.ones(1)
        former = dist.group.WORLD
    """)
    with raises_on_ranks({0: "ValueError"}):
        cells.run("if rank == 0: raise ValueError\nwork = dist.all_reduce(x, async_op=True)")
    cells.run("assert dist.group.WORLD is not former\n" + PROOF)


@pytest.mark.grid
def test_a_failed_cell_on_some_ranks_rebuilds_the_group(cells: ddip.Group) -> None:
    cells.run("import torch, torch.distributed as dist\nx = torch.ones(1)")
    with pytest.raises(ddip.CellError):
        cells.run("work = dist.all_reduce(torch.tensor([100.0]), async_op=True)\nraise ValueError", ranks=[0])
    cells.run("dist.all_reduce(x)\nassert x.item() == 2")


@pytest.mark.grid
@pytest.mark.parametrize(
    "own",
    [
        "raise RuntimeError('of gloo/transport')",
        pytest.param("dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.2))", marks=pytest.mark.grid),
    ],
)
@pytest.mark.native("sockets")
def test_an_error_of_a_collective_without_abort_is_unchanged(cells: ddip.Group, own: str) -> None:
    cells.run("import datetime, time, torch.distributed as dist\nkept = rank")
    with raises_on_ranks({0: "RuntimeError"}, {1: "barrier"}) as caught:
        cells.run(f"if rank == 0: {own}\ntime.sleep(1)\ndist.barrier()")
    assert "RuntimeError" in "\n".join(caught.value._render_traceback_())
    cells.run(f"{PROOF}\nassert kept == rank")


def test_an_error_in_the_report_of_a_rank_is_shown(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("""
        import ddip.rank.process_group.membership as p
        kept, former = rank, p.report_state
        if rank == 1: p.report_state = None
    """)
    expected = "rank 1 cannot check its process group (TypeError: 'NoneType' object"
    assert expected in capsys.readouterr().err
    cells.run("p.report_state = former")
    cells.run(f"{PROOF}\nassert kept == rank")
    assert "cannot check" not in capsys.readouterr().err


@pytest.mark.grid
def test_a_cell_ends_even_if_a_rank_cannot_report(cells: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank has written output, and the message that marks its end never comes."""
    monkeypatch.setattr(cells.options, "timeout", 8.0)  # how long the repair waits for an answer
    cells.run("kept = rank; import time; get_ipython().kernel.log.setLevel('DEBUG')")
    with raises_on_ranks({1: "TypeError"}):
        cells.run("print('last words')\nif rank == 1: time.time = None")
    assert cells.repair() == [1]
    cells.run("assert rank == 1 or kept == rank")


def test_a_group_that_failed_to_form_can_be_formed(cells: ddip.Group) -> None:
    """torch counts the groups it has begun to form, and derives their names from the count."""
    cells.run("import torch.distributed as dist\nkept = rank")
    with pytest.raises(ddip.CellError):
        cells.run("dist.destroy_process_group()\nif rank: dist.init_process_group('gloo', init_method='tcp://no:0')")
    cells.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.native("sockets")
def test_a_subgroup_can_be_recreated(cells: ddip.Group) -> None:
    cells.run("""
        import torch, torch.distributed as dist
        x = torch.ones(1)
        pair = dist.new_group([0, 1])
    """)
    with raises_on_ranks({0: "ValueError"}, {1: "all_reduce"}):
        cells.run("if rank == 0: raise ValueError\ndist.all_reduce(x, group=pair)")
    cells.run("pair = dist.new_group([0, 1])\ndist.all_reduce(x, group=pair)")


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_objects_lost_with_a_group_are_listed_once(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("""
        import torch, torch.distributed as dist, torch.distributed.rpc as rpc
        from torch.distributed.device_mesh import init_device_mesh
        from torch.nn.parallel import DistributedDataParallel as DDP
        from ddip.rank.process_group import membership as process_group
        mesh, pair = init_device_mesh("cpu", (2,)), dist.new_group([0, 1])
        wrapper, lost = DDP(torch.nn.Linear(1, 1)), DDP(torch.nn.Linear(1, 1), process_group=pair)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
        form, failures = process_group._form_group, [1, 2]
        def fails_at_first(rank_spec):
            if rank_spec.world_size > 1 and failures: raise OSError(f"planted, {failures.pop()}")
            return form(rank_spec)
        if rank == 1: process_group._form_group = fails_at_first
    """)
    with raises_on_ranks({1: "ValueError"}, {0: "barrier"}):
        cells.run("if rank == 1: raise ValueError\ndist.barrier()")
    with pytest.raises(ddip.GroupError, match="planted"):
        cells.run("pass")
    assert "the group was rebuilt" not in capsys.readouterr().err
    cells.run("process_group._form_group = form\nwrapper(torch.ones(1, 1)).sum().backward()")
    expected = (
        "the DDP wrapper was rebuilt, with rank 0's parameters and buffers on every rank; other wrappers in lost (DDP, "
        "FSDP), device meshes and subgroups that were made before must be recreated; RPC still knows the former ranks: "
        "type %makedip -r before you use it again"
    )
    assert expected in capsys.readouterr().err
    for size in (3, 2):
        cells.change(ddip.Request(n=size))
    assert "mesh" not in capsys.readouterr().err
    cells.run("rpc.shutdown(graceful=False)")


@pytest.mark.native("sockets")
def test_the_name_of_a_lost_subgroup_is_not_reused(cells: ddip.Group) -> None:
    """Functional collectives, device meshes and DTensors find their group by name.

    With a reused name they found another group, of other ranks, and the sum was wrong.
    """
    cells.run("""
        import torch, torch.distributed as dist
        old = dist.new_group([0, 1])
        name = old.group_name
    """)
    with raises_on_ranks({0: "ValueError"}, {1: "barrier"}):
        cells.run("if rank == 0: raise ValueError\ndist.barrier()")
    cells.run("new = [dist.new_group([r]) for r in range(world_size)][rank]\nassert new.group_name != name")
    sum_up = "import torch.distributed._functional_collectives as f\ny = f.all_reduce(torch.ones(1), 'sum', old) + 0"
    with pytest.raises(ddip.CellError, match="^ranks 0, 1: "):
        cells.run(sum_up)


@pytest.mark.native("sockets")
def test_a_cell_on_some_ranks_waiting_for_others_names_them_and_ends(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.options.stall_timeout = 0.2
    stderr_text = StderrText(capsys)
    thread = meanwhile(lambda: "rank 0 does not run this cell" in stderr_text.text(), press_stop)
    with pytest.raises(CellInterrupted):
        cells.run("import torch.distributed as dist\ndist.barrier()", ranks=[1])
    thread.join()
    cells.run(PROOF)


@pytest.mark.native("sockets")
def test_a_cell_may_catch_the_error_that_unblocked_it(cells: ddip.Group) -> None:
    with raises_on_ranks({0: "ValueError"}):
        cells.run("""
            import torch.distributed as dist
            if rank == 0: raise ValueError
            try: dist.barrier()
            except RuntimeError: caught = True
        """)
    cells.run("assert rank == 0 or caught\n" + PROOF)


ITSELF = {
    "destroyed": "dist.destroy_process_group()",
    "destroyed on one rank": "dist.destroy_process_group() if rank else None",
    "formed anew": "dist.destroy_process_group(); dist.init_process_group('gloo')",
    "formed by each alone": "dist.destroy_process_group()\n"
    "if rank: dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
    "formed in another order": "dist.destroy_process_group()\n"
    "dist.init_process_group('gloo', rank=1 - rank, world_size=2)",
}


@pytest.mark.parametrize("how", few(ITSELF, "destroyed on one rank", "formed anew", "formed in another order"))
def test_a_cell_may_destroy_or_form_the_group_itself(cells: ddip.Group, how: str) -> None:
    cells.run(f"import torch.distributed as dist\nkept = rank\n{ITSELF[how]}\nhere = dist.group.WORLD")
    cells.run(f"{PROOF}\nassert kept == rank == dist.get_rank()")
    if how == "formed anew":
        cells.run("assert dist.group.WORLD is here")


@pytest.mark.grid
def test_groups_formed_successively_do_not_meet_at_their_port(cells: ddip.Group) -> None:
    """The listener of the first group may still exist when another rank begins to listen for the second."""
    for _ in range(4):
        cells.run("import torch.distributed as dist\ndist.destroy_process_group(); dist.init_process_group('gloo')")
        cells.run("""
            import time
            if rank == 0: time.sleep(0.2)  # rank 0 listens
            dist.destroy_process_group(); dist.init_process_group('gloo', rank=1 - rank, world_size=2)
        """)


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_many_failures_leave_no_additional_descriptor_or_thread(cells: ddip.Group) -> None:
    count = "import os, threading\nheld = len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))"

    def fail_and_rebuild() -> None:
        with pytest.raises(ddip.CellError):
            cells.run("if rank == 0: raise ValueError\ndist.barrier()")
        cells.run(PROOF)

    def count_resources() -> list[tuple[int, int]]:
        cells.run(count)
        return [value["held"] for value in cells.pull_all(["held"], [0, 1])[0]]

    cells.run("import torch.distributed as dist")
    fail_and_rebuild()
    gc.collect()
    before, here = count_resources(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        fail_and_rebuild()
    assert count_resources() == before
    assert len(os.listdir("/proc/self/fd")) <= here  # leftovers of earlier tests may be closed meanwhile


# -- interrupts


BUSINESS = {
    "a Python loop": "begun()\nwhile True: pass",
    "sleep": "begun()\ntime.sleep(1000)",
    "C code that lets go of the interpreter": "x = torch.randn(700, 700)\nbegun()\nwhile True: x @ x @ x",
    "data loader workers": (
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 100\n"
        "    def __getitem__(self, i): time.sleep(0.2); return i\n"
        "for _ in torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context='fork'): begun()"
    ),
    "a collective": "begun()\ndist.barrier() if rank else time.sleep(1000)",
    "await": "import asyncio\nbegun()\nawait asyncio.sleep(1000)",
}


@pytest.fixture
def no_interrupts_here() -> Iterator[None]:
    """Ignore SIGINT in this process, as a kernel does once the cell has ended."""
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("business", "presses"),
    [
        *((business, 1) for business in BUSINESS if business != "a collective"),
        *(pytest.param("a collective", presses, marks=pytest.mark.native("sockets")) for presses in (1, 3)),
        pytest.param("a Python loop", 3, marks=pytest.mark.grid),
        pytest.param("data loader workers", 3, marks=pytest.mark.grid),
    ],
)
def test_the_stop_button_ends_every_cell(
    cells: ddip.Group, business: str, presses: int, tmp_path: Path, no_interrupts_here: None
) -> None:
    def press() -> None:
        for _ in range(presses):
            press_stop()
            time.sleep(0.05)

    cells.run(f"""
        import time, pathlib, torch, torch.utils.data, torch.distributed as dist
        kept = rank
        def begun(): (pathlib.Path({str(tmp_path)!r}) / str(rank)).touch()
    """)
    thread = meanwhile(lambda: {f.name for f in tmp_path.iterdir()} == {"0", "1"}, press)
    with pytest.raises(CellInterrupted, match="ranks 0, 1$"):
        cells.run(BUSINESS[business])
    thread.join()
    cells.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.grid
def test_a_stop_leaves_no_lock_closed_and_no_context_entered(cells: ddip.Group, no_interrupts_here: None) -> None:
    """The stop may come before ``__enter__`` returns, in which case Python does not call ``__exit__``."""
    cells.run("import threading, torch\nlock = threading.Condition(threading.Lock())")
    for within in ("lock", "torch.no_grad()"):
        for _ in range(6):
            stopped = meanwhile(lambda: [info.state for info in cells.info()] == ["busy", "busy"], press_stop)
            with pytest.raises(CellInterrupted):
                cells.run(f"while True:\n    with {within}: pass")
            stopped.join()
            cells.run("assert lock.acquire(blocking=False); lock.release()\nassert torch.is_grad_enabled()")


@pytest.mark.grid(in_ci=True)
def test_an_interrupt_during_another_leaves_no_lock_closed(cells: ddip.Group) -> None:
    cells.run("""
        import os, signal, threading
        lock, kernel, entered = threading.Condition(threading.Lock()), get_ipython().kernel, 0
        def press(cell):
            while kernel._cell == cell:
                if entered: os.kill(os.getpid(), signal.SIGINT)
    """)
    for _ in range(8):
        with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
            cells.run("""
                entered = 0
                threading.Thread(target=press, args=(kernel._cell,)).start()
                while True:
                    with lock: entered += 1
            """)
        cells.run("assert lock.acquire(blocking=False); lock.release()")


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
def test_a_finalizer_that_waits_indefinitely_ends_with_the_stop(cells: ddip.Group, no_interrupts_here: None) -> None:
    cells.run("""
        import threading, torch
        kept, lock = rank, threading.Lock()
        lock.acquire()
        class Waits:
            def __del__(self): lock.acquire()
    """)
    with raises_on_ranks({1: "ValueError"}):
        cells.run("if rank == 1:\n    def fail(held): raise ValueError\n    fail(Waits())")
    waits = "^releasing objects of its last cell, .* in __del__$"
    stopped = meanwhile(lambda: re.match(waits, str(cells.stacks()[1].place)), press_stop)  # type: ignore[union-attr]
    with pytest.raises((RequestInterrupted, CellInterrupted)):  # the rank frees it before or after the comparison
        cells.run("import torch.distributed as dist; dist.barrier()")
    stopped.join()
    cells.run(f"{PROOF}\nassert kept == rank")


def test_a_late_interrupt_does_not_stop_the_next_cell(cells: ddip.Group) -> None:
    """Send interrupts for the former cell by hand, for the whole length of the next one."""
    cells.run("former = get_ipython().kernel.get_parent('shell')['header']['msg_id']")
    former = {rank: values["former"] for rank, values in enumerate(cells.pull_all(["former"], [0, 1])[0])}
    done = threading.Event()

    def press() -> None:
        wait_until(lambda: [info.state for info in cells.info()] == ["busy", "busy"])
        while not done.is_set():
            cells.ranks.interrupt(former)
            time.sleep(0.01)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        for _ in range(20):
            cells.run("import time; time.sleep(0.05)")
    finally:
        done.set()
        thread.join()


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_a_rank_that_ignores_stop_is_free_afterwards(cells: ddip.Group, tmp_path: Path) -> None:
    thread = meanwhile(lambda: {f.name for f in tmp_path.iterdir()} == {"deaf", "waits"}, press_stop)
    with pytest.raises(CellInterrupted) as caught:
        cells.run(f"""
            import pathlib, signal, time, torch.distributed as dist
            folder = pathlib.Path({str(tmp_path)!r})
            kept = rank
            if rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                (folder / 'deaf').touch()
                while not (folder / 'go-on').exists(): time.sleep(0.01)
            else:
                (folder / 'waits').touch()
                dist.barrier()
        """)
    thread.join()
    assert list(caught.value.by_rank) == [0]
    # The rank may be caught in the call that checks for the file
    assert re.search(r"\nrank 1 .*\n  rank 1: (\w+, )?cell \[", str(caught.value))
    assert "while not (folder / 'go-on').exists()" in str(caught.value)
    with pytest.raises(GroupError, match="^rank 1 .*interrupted"):
        cells.run("pass")
    (tmp_path / "go-on").touch()
    wait_until(lambda: cells.info()[1].state == "idle")
    cells.run(f"{PROOF}\nassert kept == rank")


def test_a_cell_that_awaits_is_stopped_while_it_computes(cells: ddip.Group, tmp_path: Path) -> None:
    thread = meanwhile(lambda: {f.name for f in tmp_path.iterdir()} == {"0", "1"}, press_stop)
    with pytest.raises(CellInterrupted, match="ranks 0, 1$"):
        cells.run(f"""
            import asyncio, pathlib, time
            kept = rank
            await asyncio.sleep(0)
            (pathlib.Path({str(tmp_path)!r}) / str(rank)).touch()
            while True: time.sleep(0.01)
        """)
    thread.join()
    cells.run(f"{PROOF}\nassert kept == rank")


def test_a_stop_at_the_end_is_not_lost(
    cells: ddip.Group, no_interrupts_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddip.output.cells.router.CellOutput.finish", lambda *_: press_stop())
    with pytest.raises(CellInterrupted, match="already ended"):
        cells.run("pass")


# -- places of waiting ranks


def test_a_stall_shows_the_place_of_each_waiting_rank(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.options.stall_timeout = 1
    stderr_text = StderrText(capsys)
    thread = meanwhile(lambda: "the cell keeps waiting" in stderr_text.text(), press_stop)
    with pytest.raises(CellInterrupted):
        cells.run("""
            import torch, torch.distributed as dist
            dist.all_reduce(torch.ones(3))
            if rank == 0:
                dist.recv(torch.ones(1))  # from any rank, so it is not known which one it waits for
        """)
    thread.join()
    lines = stderr_text.text().splitlines()
    assert lines[0] == "ddip: no rank has made progress for 1 s:"
    assert lines[1].startswith("  rank 0: recv, cell [") and " line 4: dist.recv(" in lines[1]
    assert re.fullmatch(r"    last collective, \d+ of the default group: all_reduce of \(3,\) float32", lines[2])
    assert lines[3] == "  rank 1: finished"
    assert "Ctrl-C ends the cell and keeps all variables, and so does %%dip --timeout SECONDS" in lines[4]
    if switches.is_on(switches.SOCKETS):  # otherwise the rank has to be replaced
        cells.run(PROOF)


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_a_failure_is_reported_despite_an_earlier_stall_notice(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells.options.stall_timeout = 1
    stderr_text = StderrText(capsys)
    fail = meanwhile(lambda: "no rank has made progress for 1 s" in stderr_text.text(), (tmp_path / "fail").touch)
    with pytest.raises(CellInterrupted):
        stop = meanwhile(lambda: "rank 0: ValueError: the news; rank 1 still runs" in stderr_text.text(), press_stop)
        cells.run(f"""
            import pathlib, time
            while rank == 0 and not pathlib.Path({str(tmp_path / "fail")!r}).exists(): time.sleep(0.01)
            if rank == 0: raise ValueError('the news')
            time.sleep(1000)
        """)
    fail.join()
    stop.join()


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("work", ["x @ x", pytest.param("print('.')", marks=pytest.mark.grid)])
def test_working_ranks_cause_no_stall_notice(cells: ddip.Group, capsys: pytest.CaptureFixture[str], work: str) -> None:
    cells.options.stall_timeout = 1
    cells.run(
        "import time, torch, torch.distributed as dist\nx = torch.randn(800, 800)\nend = time.monotonic() + 2.5\n"
        f"if rank == 0:\n    while time.monotonic() < end:\n        {work}; time.sleep(0.01)\ndist.barrier()"
    )
    assert "progress" not in capsys.readouterr().err


# -- cells that damage their rank


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout = None",
        "import sys; sys.stdout = sys.stderr = 3",
        "import sys; sys.stdout.flush = None",
        "import builtins; builtins.print = None",
        "import sys; sys.stdout = open('/dev/full', 'w'); print('x' * 100000)",
    ],
)
def test_a_cell_that_breaks_its_output_affects_no_later_cell(cells: ddip.Group, code: str) -> None:
    cells.run("import builtins, sys; kept = print")
    try:
        with pytest.MonkeyPatch.context():
            cells.run(f"try:\n    {code}\nexcept OSError: pass")
        cells.run(PROOF)
    finally:
        cells.run("builtins.print = kept; sys.stdout.__dict__.pop('flush', None)")


def test_a_stream_that_fails_between_cells_loses_no_answer(cells: ddip.Group) -> None:
    cells.run("""
        import sys, threading
        kept = sys.stdout
        sys.stdout = open('/dev/full', 'w')
        go, gone = threading.Event(), threading.Event()
        def write():
            go.wait()
            sys.stdout.write('x')
            gone.set()
        thread = threading.Thread(target=write); thread.start()
    """)
    cells.run("go.set(); _ = gone.wait()", timeout=20)
    cells.run("thread.join()\ntry: sys.stdout.flush()\nexcept OSError: failed = True\nassert failed", timeout=20)
    cells.run(f"sys.stdout = kept\n{PROOF}", timeout=20)


def test_a_replaced_stream_that_a_cell_closes_is_restored(cells: ddip.Group) -> None:
    cells.run("import os, sys\nsys.stdout = open(os.devnull, 'w')")
    cells.run("sys.stdout.close()")
    cells.run("print('heard')")
    cells.run("sys.stdout.close(); sys.stderr.close()")
    cells.run("print('heard'); print('heard', file=sys.stderr)")


ODD = """
class Odd(Exception):
    def __{method}__(self, *args): raise TypeError('odd')
raise Odd('x')
"""


@pytest.mark.parametrize("method", few(["str", "repr", "reduce", "reduce_ex", "getattr"], "str", "reduce_ex"))
def test_an_exception_without_text_does_not_break_the_next(cells: ddip.Group, method: str) -> None:
    with pytest.raises(ddip.CellError, match="^ranks 0, 1: Odd"):
        cells.run(ODD.format(method=method))
    cells.run(PROOF)


def test_an_error_without_streams_is_shown(cells: ddip.Group) -> None:
    with raises_on_ranks(dict.fromkeys((0, 1), "ZeroDivisionError")) as caught:
        cells.run("""
            import sys
            sys.stdout = sys.stderr = None
            1 / 0
        """)
    assert "1 / 0" in ANSI.sub("", caught.value.by_rank[0].traceback)
    cells.run(PROOF)


def test_a_syntax_error_is_shown_once_and_nothing_runs(cells: ddip.Group) -> None:
    with pytest.raises(ddip.CellError, match=r"^ranks 0, 1: SyntaxError") as caught:
        cells.run("""
            ran = True
            if rank
                pass
        """)
    assert "\n".join(caught.value._render_traceback_()).count("SyntaxError") == 2  # in the traceback and in the summary
    cells.run("assert 'ran' not in globals()")


def test_output_of_a_running_thread_disturbs_no_later_cell(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        import threading, time
        stop = threading.Event()
        def chat():
            while not stop.wait(0.001): print('chatter', flush=True)
        thread = threading.Thread(target=chat); thread.start()
    """)
    for _ in range(20):
        cells.run("pass")
    cells.run("stop.set(); thread.join()\n" + PROOF)
    cells.run("pass")
    kept = [value for value in list(cells.cluster.client.metadata.values()) if isinstance(value, dict)]
    assert not [value["stdout"] for value in kept if value["stdout"]]


def test_a_failed_cell_does_not_keep_its_objects(cells: ddip.Group) -> None:
    with pytest.raises(ddip.CellError):
        cells.run("""
            import weakref, torch
            def f():
                global gone
                x = torch.ones(1000)
                gone = weakref.ref(x)
                1 / 0
            f()
        """)
    cells.run("assert gone() is None")


@pytest.mark.native("sockets")
def test_the_controllers_own_processes_are_not_needed(cells: ddip.Group) -> None:
    for process in controllers_of(os.getpid())[0].children():
        process.kill()
    cells.run(PROOF)
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 0: raise ValueError\ndist.barrier()")
    cells.run(PROOF)


# -- repair

APP = """
import os
def prepare():
    from ddip.rank import user_namespace
    user_namespace()["prepared"] = user_namespace().get("prepared", 0) + 1
"""


@pytest.mark.grid
def test_a_repair_prepares_the_app_and_copies_names(tmp_path: Path) -> None:
    with installed_app(tmp_path, APP), ddip.Group(2, app="toy", failure_grace=0.1) as group:
        group.run("""
            import threading, torch
            net = torch.nn.Linear(2, 2)
            tensor = net(torch.ones(1, 2))[0].detach()
            lock = threading.Lock()
        """)
        os.kill(group.members[0].pid, signal.SIGKILL)
        wait_until(lambda: group.ranks.ended)
        with pytest.raises(TransferError, match="lock .*rank 1"):
            group.repair(["net", "lock"], source=1)
        assert group.ranks.ended == [0]
        assert group.repair(["net", "tensor"], source=1) == [0]
        group.run(PROOF + "\nassert prepared == 1 and torch.equal(net(torch.ones(1, 2))[0], tensor)")
        group.run("assert ('lock' in globals()) == (rank == 1)")


@pytest.mark.grid
def test_a_repair_with_unpicklable_names_still_replaces_the_rank(cells: ddip.Group) -> None:
    cells.run("""
        class Odd:
            def __reduce__(self): return (int, ('no number',))
        odd = Odd()
        kept = rank
    """)
    os.kill(cells.members[0].pid, signal.SIGKILL)
    wait_until(lambda: cells.ranks.ended)
    with pytest.raises(TransferError, match="^ddip replaced rank 0, but nothing was pushed: odd"):
        cells.repair(["odd"], source=1)
    assert cells.repair() == []
    cells.run(f"{PROOF}\nassert rank == 0 or kept == 1")


@pytest.mark.grid
def test_a_rank_abandoned_by_the_controller_is_replaced(cells: ddip.Group) -> None:
    """Unregister the engine by hand, as the Hub does after thirty missed heartbeats; the process lives on."""
    cells.run("kept = rank")
    engine, pid = cells.members[1].engine, cells.members[1].pid
    ipp_private.unregister_engine(cells.cluster.client, engine)
    wait_until(lambda: engine not in cells.cluster.client.ids)
    with pytest.raises(GroupError, match=f"^rank 1: pid {pid} .*heartbeat.*--repair"):
        cells.run("pass")
    with pytest.raises(RequestFailed) as failed:  # as if the rank had been lost at this point
        cells.ranks.ask([0, 1], on_rank.drop_transfers())
    assert [error.name for error in failed.value.by_rank.values()] == ["RankEnded"]
    with raises_on_ranks({1: "RankEnded"}), ExitStack() as stack:  # or at this point
        cells.lifecycle.parts.cells.run(cells._admit("pass", [0, 1], CellOutput([0]), None, stack))
    cells.interrupt()
    assert cells.repair() == [1]
    wait_until(lambda: not is_alive(pid))
    cells.run(f"{PROOF}\nassert rank == 1 or kept == 0")


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "kind",
    few(
        ["interface", "no builtins", "sockets shut down", "SIGKILL"],
        "no builtins",
    ),
)
def test_a_repair_suffices_for_every_kind_of_damage(cells: ddip.Group, kind: str) -> None:
    """``tests/system/test_self_harm.py`` runs all kinds."""
    prove_repair(cells, KINDS[kind])


def test_a_rank_may_be_later_than_the_set_up_timeout(cells: ddip.Group) -> None:
    """``setup.SET_UP_SECONDS`` must not be the timeout of the group's collectives."""
    cells.run("from ddip.rank.process_group import setup\nformer, setup.SET_UP_SECONDS = setup.SET_UP_SECONDS, 0.3")
    try:
        cells.run("import time, torch.distributed as dist\nlate = dist.new_group()")
        cells.run("if rank: time.sleep(1)\ndist.barrier(late)")
    finally:
        cells.run("setup.SET_UP_SECONDS = former")


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "set_timeout"), reason="before torch 2.9, such a wait is not timed")
def test_a_rank_dying_while_gloo_connects_delays_others_briefly(cells: ddip.Group) -> None:
    cells.run("from ddip.rank.process_group import setup\nsetup.SET_UP_SECONDS = 0.2")
    cells.run(f"{SET_UP}\nif rank == 1:{textwrap.indent(DIES_CONNECTING, '    ')}")
    pids = [member.pid for member in cells.members]
    with raises_on_ranks({1: "RankEnded"}, {0: "new_group"}):
        cells.run("dist.new_group()", timeout=20)
    assert cells.repair() == [1]
    assert cells.members[0].pid == pids[0]
    cells.run(f"{PROOF}\nassert rank == 1 or kept == 0\ndist.barrier(dist.new_group())")
    cells.run("""
        from datetime import timedelta
        later = dist.new_group(timeout=timedelta(seconds=77))
        assert later._get_backend(torch.device("cpu")).options._timeout.seconds == 77
    """)


@pytest.mark.grid
def test_a_repair_finds_ranks_that_form_groups_only_alone(cells: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells.options, "timeout", 10 if cells.options.spawn else 2)
    cells.run("import torch.distributed as dist\nkept, former = rank, dist.init_process_group")
    with pytest.raises(ddip.CellError):
        cells.run("""
            def apart(*args, world_size, **kwargs):
                former('gloo', store=dist.HashStore(), rank=0, world_size=world_size)
            if rank == 1: dist.init_process_group = apart
            else: raise ValueError
            dist.barrier()
        """)
    assert cells.repair() == [1]
    cells.run(f"{PROOF}\nassert rank == 1 or kept == 0")


@pytest.mark.grid
def test_an_app_failing_on_one_rank_can_be_repaired(tmp_path: Path) -> None:
    with installed_app(tmp_path, APP), ddip.Group(2) as group:
        group.run("""
            import sys
            kept = rank
            if rank: sys.modules['toy_app'] = None
        """)
        with pytest.raises(GroupError, match="rank 1: ModuleNotFoundError: .*--repair"):
            group.change(Request(app="toy"))
        with pytest.raises(GroupError, match="rank 1: ModuleNotFoundError: .*--repair"):
            group.run("pass")
        assert group.repair() == [1]
        group.run(f"{PROOF}\nassert prepared and (rank or kept == 0)")


@pytest.mark.grid
def test_an_app_that_cannot_be_prepared_anywhere_is_left_out(tmp_path: Path) -> None:
    app = """
import os, time
def prepare():
    if os.environ["RANK"] == "1":
        time.sleep(2.5)
    raise OSError("no way")
"""
    with installed_app(tmp_path, app), ddip.Group(2) as group:
        group.run("kept = rank")
        with pytest.raises(GroupError, match="ranks 0, 1: OSError"):
            group.change(Request(app="toy"))
        group.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.grid
def test_a_repair_that_does_not_start_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run("kept = rank")
        os.kill(group.members[0].pid, signal.SIGKILL)
        wait_until(lambda: group.ranks.ended)
        with monkeypatch.context() as patch:
            patch.setattr(group.options, "timeout", 0.001)
            with pytest.raises(GroupError, match="engines .*-t SECONDS"):
                group.repair()
        assert group.repair() == [0]
        group.run(PROOF + "\nassert rank == 0 or kept == 1")


# -- stacks


def test_a_rank_waiting_in_c_shows_its_stack(cells: ddip.Group) -> None:
    seen: list[object] = []

    def show_stack_and_stop() -> None:
        seen.append(cells.stacks()[1])
        press_stop()

    def is_in_barrier() -> bool:
        place = cells.ranks.stack_locations([1], 5)[1]
        return place is not None and place.function == "barrier"

    thread = meanwhile(is_in_barrier, show_stack_and_stop)
    with pytest.raises(CellInterrupted) as stopped:
        cells.run("""
            import torch.distributed as dist
            def wait():
                dist.barrier()
            if rank == 1:
                wait()
        """)
    thread.join()
    (stack,) = seen
    place = stack.place  # type: ignore[attr-defined]
    assert (place.function, place.line, place.source) == ("barrier", 3, "dist.barrier()")
    main = stack.threads["main"].splitlines()  # type: ignore[attr-defined]
    assert main[0].endswith("line 5, in <module>") and main[0].startswith("  cell [")
    assert f"{Path(ddip.__file__).parent}/" not in stack.threads["main"]  # type: ignore[attr-defined]
    if switches.is_on(switches.SOCKETS):  # otherwise the rank has to be replaced
        assert "did not stop" not in str(stopped.value)
        # garbage may be collected first, which takes a second on a busy machine
        wait_until(
            lambda: {place and place.state for place in cells.ranks.stack_locations([0, 1], 5).values()} == {"idle"}
        )
