"""Leftovers of a cell do not disturb the rank's own code: it answers, and keeps its variables."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

import ddip
from ddip.errors import GroupError

from .leftovers import is_alive, wait_until
from .rank_errors import raises_on_ranks
from .variants import few

PROOF = "import torch, torch.distributed as dist\ny = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"


@pytest.fixture(autouse=True)
def short_time_limits(group: ddip.Group) -> None:
    group.options.failure_grace, group.options.stall_timeout = 0.1, 10.0


def prove_ranks_work(cells: ddip.Group) -> None:
    cells.run(f"{PROOF}\nassert kept == rank", timeout=60)


HANDLER = "def handler(number, frame):\n    global came\n    came = True\n    {}\n"
RAISES = HANDLER.format("raise ValueError('of a handler')")
ALARM = "_ = signal.signal(signal.SIGALRM, handler); _ = signal.setitimer(signal.ITIMER_REAL, 0.3)"
LEFT = {
    "a handler of SIGALRM": RAISES + ALARM,
    "a handler of SIGALRM that exits": HANDLER.format("sys.exit()") + ALARM,
    "a handler of SIGALRM that interrupts": HANDLER.format("raise KeyboardInterrupt") + ALARM,
    "a handler of SIGCHLD": RAISES + "import subprocess\nsignal.signal(signal.SIGCHLD, handler)\n"
    "child = subprocess.Popen(['sleep', '0.3'])",
    "a handler of SIGTERM": RAISES + "signal.signal(signal.SIGTERM, handler)\n"
    "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()",
    "a stopped loop": "came = True\nasyncio.get_event_loop().stop()",
    "a callback that stops the loop": "def stop():\n    global came\n    came = True\n"
    "    asyncio.get_running_loop().stop()\n"
    "_ = asyncio.get_running_loop().call_later(0.2, stop)",
    "a callback that exits": "def leave():\n    global came\n    came = True\n    sys.exit(3)\n"
    "_ = asyncio.get_running_loop().call_later(0.2, leave)",
    "a callback that interrupts": "def stop():\n    global came\n    came = True\n    raise KeyboardInterrupt\n"
    "_ = asyncio.get_running_loop().call_later(0.2, stop)",
    "a task that exits": "async def leave():\n    global came\n    await asyncio.sleep(0.2)\n    came = True\n"
    "    sys.exit(3)\n"
    "task = asyncio.ensure_future(leave())",
}
SOME = ("a handler of SIGALRM", "a stopped loop", "a task that exits")


def test_unreachable_workers_of_a_data_loader_delay_no_cell(cells: ddip.Group) -> None:
    """Leave a data loader in a reference cycle, as tqdm.auto does with each bar.

    Its workers check only once per hour whether their loader still exists.
    """
    cells.run("""
        import gc, torch
        from torch.utils.data import DataLoader, _utils
        gc.disable()  # a collection within the cell would wait, as in plain torch
        kept, usual = rank, _utils.MP_STATUS_CHECK_INTERVAL
        _utils.MP_STATUS_CHECK_INTERVAL = 3600.0
        class Bar: pass
        bar = Bar()
        bar.itself, bar.iterator = bar, iter(DataLoader(torch.arange(8), num_workers=2))
        first, second = next(bar.iterator), next(bar.iterator)  # both workers run
        workers = [worker.pid for worker in bar.iterator._workers]
        del bar
    """)
    answers, _ = cells.pull_all(["workers"], range(2))
    wait_until(lambda: not any(is_alive(pid) for answer in answers for pid in answer["workers"]))
    prove_ranks_work(cells)
    cells.run("gc.enable()\nassert _utils.MP_STATUS_CHECK_INTERVAL == 3600.0\n_utils.MP_STATUS_CHECK_INTERVAL = usual")


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="shared memory has no files here")
def test_a_worker_killed_while_sharing_a_tensor_leaves_no_file(cells: ddip.Group) -> None:
    """End a worker between the moments when torch creates its shared file and removes it."""
    cells.run("""
        import os, time
        from torch.utils.data import DataLoader
        class Data:
            def __len__(self): return 1
            def __getitem__(self, i):
                open(f'/dev/shm/torch_{os.getpid()}_1_1', 'x').close()
                while True: time.sleep(1)
        class Bar: pass
        bar = Bar()
        bar.itself, bar.iterator = bar, iter(DataLoader(Data(), num_workers=1, multiprocessing_context='fork'))
        path = f'/dev/shm/torch_{bar.iterator._workers[0].pid}_1_1'
        while not os.path.exists(path): time.sleep(0.01)
        del bar
    """)
    answers, _ = cells.pull_all(["path"], range(2))
    wait_until(lambda: not any(Path(answer["path"]).exists() for answer in answers))


@pytest.mark.parametrize("left", few(LEFT, *SOME))
def test_an_exception_between_two_cells_costs_no_rank(cells: ddip.Group, left: str) -> None:
    pids = [member.pid for member in cells.members]
    cells.run("""
        import asyncio, os, signal, sys, threading, time
        kept = rank
        came = False
    """)
    cells.run("former = {n: signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM)}")
    cells.run(LEFT[left])
    wait_until(lambda: all(values["came"] for values in cells.pull_all(["came"], [0, 1])[0]))  # a cell would raise
    for _ in range(3):
        prove_ranks_work(cells)
    assert [member.pid for member in cells.members] == pids
    cells.run("for number, handler in former.items(): signal.signal(number, handler)", show_ranks=[])


def test_the_next_cell_has_the_signal_handler_of_the_user(cells: ddip.Group) -> None:
    cells.run("""
        import signal
        def handler(*_): raise ValueError('mine')
        _ = signal.signal(signal.SIGALRM, handler)
    """)
    cells.run("assert signal.getsignal(signal.SIGALRM) is handler")
    with raises_on_ranks(dict.fromkeys((0, 1), "ValueError")):
        cells.run("""
            import time
            _ = signal.setitimer(signal.ITIMER_REAL, 0.2)
            time.sleep(30)
        """)
    cells.run("_ = signal.signal(signal.SIGALRM, signal.SIG_DFL)")


@pytest.mark.grid
def test_a_sigterm_handler_that_exits_ends_the_rank(warmed_up: None) -> None:
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run("import signal, sys\n_ = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))")
        os.kill(group.members[1].pid, signal.SIGTERM)
        wait_until(lambda: group.ranks.ended == [1])
        with pytest.raises(GroupError, match=r"^rank 1: .*\(SIGTERM\): someone ended it"):
            group.run("pass")


@pytest.mark.grid
def test_alarms_around_the_end_of_a_cell_cost_no_answer(cells: ddip.Group) -> None:
    """Send alarms while the cell runs, while its answer is built, and after the answer is sent."""
    cells.run("""
        import random, signal
        kept = rank
        def handler(*_): raise ValueError('alarm')
        _ = signal.signal(signal.SIGALRM, handler)
    """)
    failed = 0
    for _ in range(60):
        try:
            cells.run("_ = signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-3))", timeout=60)
        except ddip.CellError as error:
            failed += 1
            assert "alarm" in str(error)
    assert failed < 60
    with contextlib.suppress(ddip.CellError):  # the last alarm may arrive during this cell
        cells.run("while signal.getitimer(signal.ITIMER_REAL)[0]: pass")
    cells.run("_ = signal.signal(signal.SIGALRM, signal.SIG_DFL)")
    prove_ranks_work(cells)


HARM = {
    "recursion limit": "sys.setrecursionlimit(150)",
    "a recursion": "sys.setrecursionlimit(150)\ndef f(): f()\ntry: f()\nexcept RecursionError: pass",
    "trace": "def trace(*_): raise ValueError('trace')\nsys.settrace(trace)",
    "profile": "def trace(*_): raise ValueError('profile')\nsys.setprofile(trace)",
    "excepthook": "def hook(*_): raise ValueError\nsys.excepthook = threading.excepthook = hook",
    "displayhook": "sys.displayhook = None",
    "gc": "gc.disable(); gc.set_threshold(1)",
    "faulthandler": "import faulthandler; faulthandler.disable()",
    "atexit": "import atexit\n_ = atexit.register(lambda: 1 / 0)",
    "threads that raise": "for _ in range(5): threading.Thread(target=lambda: 1 / 0).start()",
    "no folder": "import tempfile\nwith tempfile.TemporaryDirectory() as gone: os.chdir(gone)",
    "stdin": "os.close(0)",
    "stdout": "os.close(1)",
    "stderr": "os.close(2)",
    "all three": "os.closerange(0, 3)",
    "print": "import builtins; builtins.print = None",
    "SIGINT": "_ = signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "In and Out": "In = Out = 3",
    "get_ipython": "get_ipython = None",
    "the environment": "os.environ.clear()",
    "the path": "sys.path.clear()",
    "the warnings": "import warnings; warnings.simplefilter('error')",
    "logging": "import logging; logging.disable(); logging.raiseExceptions = False; logging.Handler.emit = None",
}


@pytest.mark.grid
def test_harmful_changes_to_the_interpreter_cost_no_rank(warmed_up: None) -> None:
    """Run each piece of code in its own cell, on ranks that no other test uses."""
    with ddip.Group(2, failure_grace=0.1) as group:
        pids = [member.pid for member in group.members]
        group.run("import gc, os, signal, sys, threading, time, torch, torch.distributed as dist\nkept = rank")
        for what, code in HARM.items():
            try:
                group.run(code, timeout=60)
            except ddip.CellError as error:
                assert what in ("trace", "profile"), (what, error)
            group.run("y = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == 2 and kept == rank", timeout=60)
            with raises_on_ranks({0: "ValueError"}, {1: ""}):
                group.run("if rank == 0: raise ValueError('x')\ndist.barrier()", timeout=60)
            assert [member.pid for member in group.members] == pids, what
            group.run("sys.settrace(None); sys.setprofile(None)")


STEPS = """
import resource, torch
def step():
    return [torch.ones(2_000_000).add_(1) for _ in range(40)]

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): _ = step()[0].sum()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
"""Each step needs 320 MB, which has 80 000 pages."""


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.native("heap")
def test_freed_memory_is_reused_within_cells_and_returned_afterwards(cells: ddip.Group) -> None:
    before = [resident_bytes(member.pid) for member in cells.members]
    cells.run(STEPS)
    faults = [pulled["faults"] for pulled in cells.pull_all(["faults"], [0, 1])[0]]
    assert max(faults) < 40_000, faults
    for member, least in zip(cells.members, before, strict=True):
        wait_until(lambda pid=member.pid, least=least: resident_bytes(pid) < least + 200e6)  # type: ignore[misc]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return psutil.Process(pid).memory_info().rss
