"""Output of processes that a cell starts is shown in order and in its cell, as in a kernel."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

import ddip
from ddip.protocol.start_methods import NOT_FORKED

from .notebook import Notebook

FORK = "%%dip -S 0\nimport multiprocessing, os, sys, time\nfork = multiprocessing.get_context('fork')\n"
LOADER = """
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 3
    def __getitem__(self, i):
        print('item', i)
        print('warning', i, file=sys.stderr)
        return i
loader = DataLoader(Data(), None, num_workers=1, multiprocessing_context=fork)
"""


def streams_of(notebook: Notebook, code: str) -> list[tuple[str, str]]:
    """Return what the cell has written by its end, as (stream, text) in order."""
    messages = notebook.ok(FORK + code).messages
    return [(content["name"], content["text"]) for kind, content in messages if kind == "stream"]


def test_workers_of_a_loader_write_in_order_before_cells_end(notebook: Notebook) -> None:
    texts = streams_of(notebook, f"{LOADER}\nfor _ in loader: pass\nprint('end')")
    items = [(name, f"{what} {i}\n") for i in range(3) for name, what in (("stdout", "item"), ("stderr", "warning"))]
    assert texts == [*items, ("stdout", "end\n")]


@pytest.mark.grid(in_ci=True)
def test_a_worker_of_a_forkserver_writes_each_line_at_once(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(
        "class Data:\n    def __len__(self): return 3\n    def __getitem__(self, i): print('item', i); return i\n"
    )
    texts = streams_of(
        notebook,
        f"sys.path.insert(0, {str(tmp_path)!r})\nimport telling\nfrom torch.utils.data import DataLoader\n"
        "loader = DataLoader(\n    telling.Data(), None, num_workers=1, multiprocessing_context='forkserver',\n"
        "    persistent_workers=True)\n"  # they do not end with the cell
        "for _ in loader: pass\nprint('end')",
    )
    assert "".join(text for _, text in texts) == "item 0\nitem 1\nitem 2\nend\n"
    notebook.ok(f"%%dip\ndel loader, telling, sys.modules['telling']\nsys.path.remove({str(tmp_path)!r})")


def test_output_of_child_processes_keeps_its_place_between_prints(notebook: Notebook) -> None:
    for start in (
        "p = fork.Process(target=print, args=('in between',)); p.start(); p.join()",
        "with fork.Pool(1) as pool: pool.apply(print, ('in between',))",
        "import subprocess; subprocess.run(['echo', 'in between'])",
        "os.write(1, b'in between\\n'); time.sleep(0.001)",  # output within the same microseconds is not ordered
        "p = multiprocessing.get_context('spawn').Process(target=print, args=('in between',)); p.start(); p.join()",
    ):
        texts = streams_of(notebook, f"print('before')\n{start}\nprint('after')")
        assert texts == [("stdout", "before\nin between\nafter\n")], start


@pytest.mark.skipif(sys.version_info < (3, 14), reason="workers are forked by default")
def test_a_process_without_a_cells_function_gives_advice(notebook: Notebook) -> None:
    texts = streams_of(notebook, "def work(): pass\np = multiprocessing.Process(target=work); p.start(); p.join()")
    shown = re.sub(r"\x1b\[[\d;]*m", "", "".join(text for _, text in texts))
    assert f"AttributeError: module '__main__' has no attribute 'work'; {NOT_FORKED}" in shown


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_within_a_line_loses_nothing(notebook: Notebook, end: str) -> None:
    code = (
        "import warnings\nwith warnings.catch_warnings(action='ignore'):  # Python's own, as the rank has threads\n"
        "    pid = os.fork()\n"
        f"if not pid:\n    print('a line'); print('half', end='')\n    {end}\nos.waitpid(pid, 0); None"
    )
    assert streams_of(notebook, code) == [("stdout", "a line\nhalf")]


def test_a_character_written_in_parts_arrives_complete(notebook: Notebook) -> None:
    text = "é█" * 5_000
    code = f"os.write(1, {text.encode()!r})\np = fork.Process(target=print, args=({text!r},)); p.start(); p.join()"
    assert streams_of(notebook, code) == [("stdout", f"{text}{text}\n")]


def test_a_process_belongs_to_the_cell_that_has_forked_it(notebook: Notebook) -> None:
    loader = "DataLoader(Data(), None, num_workers=1, persistent_workers=True, multiprocessing_context=fork)"
    assert ("stdout", "item 2\n") in streams_of(notebook, f"{LOADER}\nloader = {loader}\nfor _ in loader: pass")
    assert streams_of(notebook, "for _ in loader: pass\nprint('second')") == [("stdout", "second\n")]
    first = notebook.begin(
        FORK + "go = fork.Event()\nlate = fork.Process(target=lambda: (go.wait(), print('late'))); late.start()"
    )
    assert notebook.finish(first).stdout == ""
    assert streams_of(notebook, "go.set(); late.join(); del loader; print('third')") == [("stdout", "third\n")]
    assert "late\n" in notebook.late(first, "late")


@pytest.mark.grid
def test_long_output_of_other_processes_loses_its_middle(notebook: Notebook) -> None:
    forked = """
def flood():
    for i in range(60_000): print('line', i, '.' * 30)
p = fork.Process(target=flood); p.start(); p.join()"""
    dots = "." * 30
    program = f"import subprocess; subprocess.run(['seq', '-f', 'line %.0f {dots}', '0', '59999']); None"
    for flood in (forked, program):
        shown = notebook.ok(FORK + flood)
        assert "lines left out" in shown.text and "line 59999 ." in shown.text and len(shown.text) < 700_000
        assert shown.stdout.startswith("line 0 ")
    log = notebook.ok(FORK + "print(os.fstat(sys.stdout.fileno()).st_size)").stdout
    assert int(log) < 1_100_000  # stdout is the rank's log


@pytest.mark.grid
def test_a_fork_while_other_threads_print_does_not_hang(notebook: Notebook) -> None:
    code = (
        "import threading\nstop = threading.Event()\n"
        "def chatter():\n    while not stop.is_set(): print('chatter')\n"
        "threads = [threading.Thread(target=chatter) for _ in range(2)]\nfor thread in threads: thread.start()\n"
        "ended = []\nfor i in range(20):\n"
        "    p = fork.Process(target=lambda: (print('a child'), sys.stdout.flush())); p.start(); p.join(20); "
        "ended.append(p.exitcode)\n"
        "stop.set()\nfor thread in threads: thread.join()\nassert ended == [0] * 20, ended"
    )
    notebook.ok(FORK + code)


@pytest.mark.grid(in_ci=True)
def test_a_rank_that_writes_faster_than_it_sends_waits(notebook: Notebook) -> None:
    """Fill the queue of the sending thread: writes wait while that thread orders the output."""
    output = notebook.ok("""%%dip -S 0
        import sys, threading
        sends, go = sys.stdout.pub_thread, threading.Event()
        sends.schedule(go.wait)
        threading.Timer(0.5, go.set).start()
        for _ in range(20_000):
            sys.stdout._flush_pending = False
            print('.', end='')
    """)
    assert output.text.count(".") == 20_000


def test_a_process_may_outlive_its_cell_and_be_killed(notebook: Notebook) -> None:
    cell = notebook.begin(
        FORK + "def chatter():\n    while True: print('chatter' * 50)\np = fork.Process(target=chatter); p.start()"
    )
    notebook.finish(cell)
    notebook.late(cell, "chatter")
    assert streams_of(notebook, "p.kill(); p.join(); print('next')") == [("stdout", "next\n")]


@pytest.mark.grid
def test_a_process_of_an_ended_rank_waits_for_no_reader(tmp_path: Path) -> None:
    """A child that waits for a reader would fill the pipe and never end."""
    file = tmp_path / "done"
    with ddip.Group(2) as group:
        pid = group.members[1].pid
        group.run(f"""
import os, time
child = os.fork() if rank == 1 else 0
if rank == 1 and not child:
    os.setsid()
    while os.getppid() == {pid}: time.sleep(0.01)
    for i in range(10_000): print('x' * 100)
    open({str(file)!r}, 'w').close()
    os._exit(0)
""")
        child = psutil.Process(group.pull(["child"], 1)["child"])
        os.kill(pid, signal.SIGKILL)
        child.wait(30)
    assert file.exists()


def test_output_of_forked_processes_appears_under_pytest(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """ipykernel does not capture descriptors under pytest; a rank is not a pytest process."""
    assert "PYTEST_CURRENT_TEST" in os.environ
    cells.run(
        "import os, multiprocessing\nos.write(1, b'from C\\n')\n"
        "p = multiprocessing.get_context('fork').Process(target=print, args=('from a child',)); p.start(); p.join()",
        show_ranks=[0],
    )
    assert capsys.readouterr().out == "from C\nfrom a child\n"
