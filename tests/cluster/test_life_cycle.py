"""The cluster belongs to the notebook's kernel: however either ends, nothing is left."""

from __future__ import annotations

import glob
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

import ddip
from ddip.protocol import on_rank

from .leftovers import (
    assert_nothing_left,
    controllers_of,
    family_of,
    files_of,
    is_alive,
    processes_of,
    wait_until,
    with_title,
)
from .notebook import Notebook

NewNotebook = Callable[[], Notebook]

IDLE = "started()"
BUSY_IN_PYTHON = "started()\nwhile True: pass"
HOLDING_THE_GIL = "import ctypes; started(); ctypes.PyDLL(None).sleep(1000)"
IN_A_COLLECTIVE = (
    "import torch.distributed as dist; started()\nif rank == 0: dist.barrier()\nwhile rank: time.sleep(0.1)"
)
WITH_WORKERS = (
    "import torch.utils.data as data\n"
    "class Slow(data.Dataset):\n"
    "    def __len__(self): return 1000\n"
    "    def __getitem__(self, i): time.sleep(0.1); return i\n"
    "for _ in data.DataLoader(Slow(), num_workers=1, multiprocessing_context='fork'): started()"
)


def begin_on_two_ranks(notebook: Notebook, code: str) -> str:
    """Start two ranks and `code` on them; return the cell's ID once both have called ``started()``."""
    for former in notebook.folder.glob("started*"):
        former.unlink()
    notebook.ok("%load_ext ddip\n%makedip -n 2")
    running = notebook.begin(
        f"%%dip -S all\nimport pathlib, time\ndef started(): pathlib.Path(f'started{{rank}}').touch()\n{code}"
    )
    wait_until(lambda: {f.name for f in notebook.folder.glob("started*")} == {"started0", "started1"})
    return running


BUSINESS = {
    "idle": IDLE,
    "busy in Python": BUSY_IN_PYTHON,
    "holding the GIL": HOLDING_THE_GIL,
    "in a collective": IN_A_COLLECTIVE,
    "with DataLoader workers": WITH_WORKERS,
}


ANY_BUSINESS = pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=[] if name == "in a collective" else pytest.mark.grid)
        for name, code in BUSINESS.items()
    ],
)


@ANY_BUSINESS
def test_nothing_is_left_of_a_kernel_that_was_killed(new_notebook: NewNotebook, code: str) -> None:
    notebook = new_notebook()
    begin_on_two_ranks(notebook, code)
    family = psutil.Process(notebook.pid).children(recursive=True)
    assert len(family) >= 2 + 2  # engines, the controller and its heart monitor
    notebook.kill()
    began = time.monotonic()
    assert_nothing_left(notebook.pid, 5)
    wait_until(lambda: not any(process.is_running() for process in family), 5 - (time.monotonic() - began))


@pytest.mark.grid(in_ci=True)
@ANY_BUSINESS
def test_the_end_of_the_controller_ends_ranks_with_a_message(bare_notebook: Notebook, code: str) -> None:
    running = begin_on_two_ranks(bare_notebook, code)
    (controller,) = controllers_of(bare_notebook.pid)
    end_and_start_again(bare_notebook, controller, running, code, "the controller process ended")


@pytest.mark.grid
@pytest.mark.skipif("config.getoption('--spawn')", reason="there is no preload process")
@ANY_BUSINESS
def test_the_end_of_the_preload_process_ends_ranks_with_messages(bare_notebook: Notebook, code: str) -> None:
    running = begin_on_two_ranks(bare_notebook, code)
    (warm,) = with_title(family_of(bare_notebook.pid), "ddip preload process")
    expected = "the preload process, from which the ranks were forked, ended"
    end_and_start_again(bare_notebook, warm, running, code, expected)


def end_and_start_again(notebook: Notebook, process: psutil.Process, running: str, code: str, expected: str) -> None:
    """Kill `process`, and prove that the ranks end, errors explain it, and ``%makedip -r`` works.

    The cell that is `running` fails, and the next one fails with the text `expected`.
    """
    former = set(processes_of(notebook.pid))
    if code == IDLE:
        assert notebook.finish(running).status == "ok"
    process.kill()
    wait_until(lambda: not any(is_alive(p.pid) for p in former), 5)
    if code != IDLE:
        shown = notebook.finish(running)
        assert shown.status == "error" and "--repair" not in shown.message
    assert expected in notebook.fails("%%dip\npass").message
    notebook.ok("%makedip -r")
    notebook.ok("""
        %%dip
        import torch.distributed as dist
        dist.barrier()
    """)


@pytest.mark.grid
def test_shutting_down_a_kernel_with_busy_ranks_leaves_nothing(new_notebook: NewNotebook) -> None:
    notebook = new_notebook()
    begin_on_two_ranks(notebook, BUSY_IN_PYTHON)
    notebook.shut_down()
    assert_nothing_left(notebook.pid, 5)


@pytest.mark.grid
@pytest.mark.parametrize("at_once", [False, True])
def test_a_restarted_kernel_starts_without_a_group(new_notebook: NewNotebook, at_once: bool) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 2")
    former = notebook.pid
    notebook.restart(at_once)
    assert notebook.pid != former
    assert_nothing_left(former, 5)
    notebook.ok("""
        %load_ext ddip
        %makedip -n 1
        %makedip -k
    """)


@pytest.mark.grid
def test_a_controller_killed_with_its_kernel_leaves_no_scheduler(new_notebook: NewNotebook) -> None:
    """The next notebook removes the files that no process was left to remove, and ends a rank's children."""
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 1")
    notebook.ok("""
        %%dip
        import subprocess
        sleeper = subprocess.Popen(['sleep', '1000']).pid
    """)
    sleeper = int(notebook.ok("%dipull sleeper\nprint(sleeper)").stdout.split()[-1])
    (controller,) = controllers_of(notebook.pid)
    controller.suspend()  # so that it cannot clean up
    notebook.kill()
    controller.kill()
    wait_until(lambda: not processes_of(notebook.pid), 10)
    assert files_of(notebook.pid) and is_alive(sleeper)
    heir = new_notebook()
    heir.ok("%load_ext ddip\n%makedip -k")
    assert_nothing_left(notebook.pid, 0)
    assert not is_alive(sleeper)


@pytest.mark.grid
def test_two_simultaneous_notebooks_are_independent(new_notebook: NewNotebook) -> None:
    first, second = new_notebook(), new_notebook()
    for name, notebook in (("first", first), ("second", second)):
        notebook.ok("%load_ext ddip\n%makedip -n 2")
        notebook.ok(f"%%dip\nname = {name!r}")
    first.ok("%%dip\nassert name == 'first'")
    mine = {p.pid for p in processes_of(second.pid)}
    first.ok("%makedip -r\n%makedip -k")
    assert_nothing_left(first.pid, 0)
    assert {p.pid for p in processes_of(second.pid)} == mine
    second.ok("""
        %%dip
        import torch.distributed as dist
        dist.barrier()
        assert name == 'second'
    """)


@pytest.mark.grid
@pytest.mark.timeout(600)
@pytest.mark.grid
def test_two_threads_can_start_groups_at_the_same_time(bare_notebook: Notebook) -> None:
    bare_notebook.ok("""
        import sys, ddip
        from concurrent.futures import ThreadPoolExecutor
        def start(size):
            with ddip.Group(size) as group:
                group.run("found = world_size")
                return group.pull(["found"])["found"]
        path = list(sys.path)
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(start, [1, 2])) == [1, 2]
        assert sys.path == path
    """)


def test_a_forked_process_gets_an_error_instead_of_the_group(group: ddip.Group) -> None:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = []
            for use in (lambda: group.run("1"), lambda: group.pull(["rank"]), group.repair, group.restart):
                try:
                    use()
                except ddip.GroupError as error:
                    found.append("forked" in str(error))
            group.shutdown()
            os.write(writes, repr(found).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reads, 1000) == repr([True] * 4).encode()
    os.close(reads)
    os.close(writes)
    group.run("assert rank >= 0")


@pytest.mark.grid(in_ci=True)
def test_repeated_starts_and_ends_leak_no_resources(bare_notebook: Notebook) -> None:
    notebook = bare_notebook
    notebook.ok("%makedip -n 2\n%makedip -k")
    before = notebook.descriptors(), notebook.threads()
    for _ in range(8):
        notebook.ok("%makedip -n 2")
        notebook.ok("%makedip -k")
        assert processes_of(notebook.pid) == []
        assert files_of(notebook.pid) == []
    # A leak would be 8 of them
    wait_until(lambda: notebook.descriptors() <= before[0] and notebook.threads() <= before[1])


@pytest.mark.grid
def test_kill_ends_ranks_that_ignore_an_interrupt(bare_notebook: Notebook) -> None:
    notebook = bare_notebook
    running = begin_on_two_ranks(
        notebook, "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nstarted()\nwhile True: time.sleep(1)"
    )
    notebook.interrupt()
    shown = notebook.finish(running)
    assert shown.error == "CellInterrupted"
    assert "did not stop:\n" in shown.message and "while True: time.sleep(1)" in shown.message
    assert "busy" in notebook.ok("%makedip -i").stdout
    assert "ranks 0, 1 are still running the interrupted cell:" in notebook.fails("%%dip\npass").message
    notebook.ok("%makedip -k")
    assert_nothing_left(notebook.pid, 0)


@pytest.mark.grid
def test_messages_for_an_ended_controller_keep_no_descriptor() -> None:
    def count_eventfds() -> int:
        return str([os.readlink(link) for link in glob.glob("/proc/self/fd/*") if os.path.lexists(link)]).count(
            "eventfd"
        )

    counts = []
    for _ in range(3):
        with ddip.Group(2) as group:
            controller = controllers_of(os.getpid())[-1].pid
            os.kill(controller, signal.SIGKILL)
            wait_until(lambda pid=controller: not is_alive(pid))
            group.ranks.call_on_control_channel([0, 1], on_rank.make_hello())
        counts.append(count_eventfds())
    wait_until(lambda: count_eventfds() <= counts[0], seconds=5, what=f"the first count of {counts}")
