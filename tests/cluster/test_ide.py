"""``%dipdebug --dap``: an IDE attaches to ranks with the Debug Adapter Protocol."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from .dap_client import DapClient
from .leftovers import wait_until
from .notebook import Notebook
from .test_debugger import PROOF, SETUP

IN_GRID = pytest.mark.grid(in_ci=True)
STEPS = "%%dip\nresult = train(10, stop_at=(1, 3))\nassert_same(result, train(10))"

SHAPES = "def double(x):\n    y = x + x\n    return y\n"


class Ide:
    """The notebook and the launch configurations of its ranks."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        text = notebook.ok("%dipdebug --dap").stdout
        self.file = json.loads(text[text.index("{") :])
        self.launch: list[dict[str, Any]] = self.file["configurations"]
        self.clients: list[DapClient] = []

    def connect(self, rank: int) -> DapClient:
        """Connect to the port of `rank`."""
        self.clients.append(DapClient(self.launch[rank]["connect"]["port"]))
        return self.clients[-1]

    def attach(self, rank: int, *breakpoints: tuple[str, int]) -> DapClient:
        """Attach to `rank` with breakpoints."""
        client = self.connect(rank)
        client.attach(self.launch[rank], *breakpoints)
        return client


@pytest.fixture
def ide(notebook: Notebook) -> Iterator[Ide]:
    """Serve the three ranks, which have defined `train` and `assert_same`, to IDEs."""
    notebook.ok(f"%%dip\n{SETUP}")
    opened = Ide(notebook)
    yield opened
    for client in opened.clients:
        client.close()
    notebook.ok("%dipdebug --off")
    threads = "[each.name for each in threading.enumerate() if each.name == 'ddip-ide' or 'pydev' in each.name]"
    notebook.ok(f"%%dip\nimport sys, threading\nassert sys.gettrace() is None and not {threads}, {threads}")
    for configuration in opened.launch:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", configuration["connect"]["port"]))


def test_training_goes_on_after_steps_in_the_ide(ide: Ide) -> None:
    client = ide.attach(1)
    cell = ide.notebook.begin(STEPS)
    thread, frame = client.wait_for_stop()
    assert (frame["name"], client.evaluate("step", frame)) == ("train", "3")
    source = client.request("source", sourceReference=frame["source"]["sourceReference"], source=frame["source"])
    assert "def train(" in source["body"]["content"]  # an earlier cell, which has no file
    for _ in range(5):
        client.request("next", threadId=thread)
        thread, frame = client.wait_for_stop()
    assert client.evaluate("float(loss) > 0", frame) == "True"
    client.request("continue", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"
    ide.notebook.ok("%%dip\nassert_same(result, train(10))")


def test_breakpoints_of_modules_and_cells_stop(ide: Ide) -> None:
    (ide.notebook.folder / "shapes.py").write_text(SHAPES)
    client = ide.attach(2, (str(ide.notebook.folder / "shapes.py"), 3))
    code = "%%dip -r 2\nimport shapes\nbreakpoint()\na = 1\nb = shapes.double(rank)"
    cell = ide.notebook.begin(code)
    thread, frame = client.wait_for_stop()
    file = Path(frame["source"]["path"])
    assert file.read_text().splitlines()[frame["line"] - 1] in ("breakpoint()", "a = 1")
    client.set_breakpoint(str(file), 4)
    lines = []
    for _ in range(2):
        client.request("continue", threadId=thread)
        thread, frame = client.wait_for_stop()
        lines.append((frame["name"], frame["line"]))
        if frame["name"] == "double":
            assert client.evaluate("y", frame) == "4"
    assert lines == [("<module>", 4), ("double", 3)]
    client.request("continue", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"
    other = ide.attach(1, (str(file), 4))  # the same file on another rank
    cell = ide.notebook.begin(code.replace("-r 2", "-r 1"))
    for line in (3, 4):
        thread, frame = other.wait_for_stop()
        assert (frame["source"]["path"], frame["line"]) == (str(file), line)
        other.request("continue", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"
    ide.notebook.ok("%dipdebug --off")
    assert not file.exists()


@pytest.mark.grid(in_ci=True)
def test_no_alarm_while_a_rank_has_stopped(ide: Ide) -> None:
    notebook, client = ide.notebook, ide.attach(1)
    notebook.ok("%config DipMagics.stall_timeout = 1\n%config DipMagics.failure_grace = 0.2")
    cell = notebook.begin("%%dip --timeout 3\nif rank == 1: breakpoint()\ndist.barrier()")
    thread, _ = client.wait_for_stop()
    time.sleep(4)  # longer than the cell's timeout
    client.request("continue", threadId=thread)
    shown = notebook.finish(cell)
    assert (shown.status, "no rank has made progress" in shown.text) == ("ok", False), shown.message
    notebook.ok("%config DipMagics.stall_timeout = 10\n%config DipMagics.failure_grace = 1")


@pytest.mark.slow
@pytest.mark.native("sockets")
def test_the_stop_button_ends_a_cell_that_has_stopped(ide: Ide) -> None:
    client = ide.attach(1)
    cell = ide.notebook.begin(
        "%%dip\nkept = rank\ndist.barrier()\nif rank == 1: breakpoint()\ndist.barrier()\ncontinued = 1"
    )
    client.wait_for_stop()
    ide.notebook.interrupt()
    assert ide.notebook.finish(cell).error == "CellInterrupted"
    ide.notebook.ok("%%dip\nassert kept == rank and 'continued' not in globals()")
    ide.notebook.ok(PROOF)
    cell = ide.notebook.begin(STEPS)
    thread, _ = client.wait_for_stop()
    client.request("continue", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["disconnect", *(pytest.param(how, marks=IN_GRID) for how in ("crash", "--off"))])
def test_a_rank_continues_without_its_ide(ide: Ide, how: str) -> None:
    client = ide.attach(1)
    run = ide.notebook.begin(STEPS.replace("%%dip", "%%dip --bg"))
    client.wait_for_stop()
    ide.notebook.finish(run)
    if how == "disconnect":
        assert client.request("disconnect", terminateDebuggee=True)["success"]
    elif how == "crash":
        client.close()
    else:
        ide.notebook.ok("%dipdebug --off")
    ide.notebook.ok("%dipwait")
    ide.notebook.ok("%%dip\nassert_same(result, train(10))")
    client.close()
    if how == "--off":  # no thread has kept its state: nothing stops under the next debugger, which has no client
        ide.notebook.ok("%dipdebug --dap")
        ide.notebook.ok("%%dip\nassert_same(result, train(10))")
    else:  # the port is free again
        wait_until(lambda: ide.connect(1).greet(**ide.launch[1])["success"])


def test_only_a_client_with_the_token_attaches(ide: Ide) -> None:
    for token in ({}, {"ddipToken": "0" * 32}, {"ddipToken": 7}):
        client = ide.connect(0)
        answer = client.greet(**{**ide.launch[0], "ddipToken": None, **token})
        assert not answer["success"] and "%dipdebug --dap" in answer["message"], answer
        assert client.is_closed()
    for words in (b"GET / HTTP/1.0\r\n\r\n", b"Content-Length: 99999999\r\n\r\n", b"Content-Length: 2\r\n\r\n[]"):
        client = ide.connect(0)
        client.socket.sendall(words)
        assert client.is_closed()
    ide.attach(0)
    second = ide.connect(0).greet(**ide.launch[0])
    assert not second["success"] and "another IDE" in second["message"]


def test_a_step_ends_with_its_cell(ide: Ide) -> None:
    client = ide.attach(1)
    cell = ide.notebook.begin("%%dip -r 1\nbreakpoint()\na = 1")
    thread, _ = client.wait_for_stop()
    client.request("next", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"
    ide.notebook.ok("%%dip -r 1\nb = 2")


@pytest.mark.skipif(
    sys.version_info >= (3, 12) and metadata.version("debugpy") == "1.8.15",
    reason="this debugpy does not stop in other threads",
)
def test_threads_of_a_cell_stop(ide: Ide) -> None:
    (ide.notebook.folder / "shapes.py").write_text(SHAPES)
    client = ide.attach(1, (str(ide.notebook.folder / "shapes.py"), 3))
    code = (
        "import threading, shapes\nwork = threading.Thread(target=shapes.double, args=[7])\nwork.start(), work.join()"
    )
    cell = ide.notebook.begin(f"%%dip -r 1\n{code}")
    thread, frame = client.wait_for_stop()
    assert (frame["name"], client.evaluate("y", frame)) == ("double", "14")
    client.request("continue", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"


def test_breakpoints_stop_after_the_debugger_was_off(ide: Ide) -> None:
    """A debugger of Python 3.12 or later remembers which functions have no breakpoints."""
    shapes, others = ide.notebook.folder / "shapes.py", ide.notebook.folder / "others.py"
    for file in (shapes, others):
        file.write_text(SHAPES)
    ide.notebook.ok("%%dip -r 1\nimport shapes")
    for _ in range(2):  # the first debugger of a process counts differently
        ide.attach(1, (str(others), 3))
        ide.notebook.ok("%%dip -r 1\nshapes.double(7)")
        ide.notebook.ok("%dipdebug --off")
        ide.launch = Ide(ide.notebook).launch
    client = ide.attach(1, (str(shapes), 3))
    cell = ide.notebook.begin("%%dip -r 1\nshapes.double(7)")
    thread, frame = client.wait_for_stop()
    assert frame["name"] == "double"
    client.request("continue", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"


FORKS = """%%dip
import multiprocessing, os, subprocess, sys, threading, torch.utils.data, shapes
if rank == 0: breakpoint()
def work(*_):
    results = [sys.gettrace() is None, shapes.double(2)]
    thread = threading.Thread(target=lambda: results.append(shapes.double(2)))
    thread.start()
    thread.join()
    return results == [True, 4, 4]
class Works(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return work()
loader = torch.utils.data.DataLoader(Works(), num_workers=2, multiprocessing_context="fork")
assert [bool(each) for each in loader] == [True] * 4
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map(work, [0]) == [True]
child = os.fork()
if not child: os._exit(0 if work() else 9)
assert os.waitpid(child, 0)[1] == 0
trace = "import sys; sys.exit(sys.gettrace() is not None)"
assert subprocess.run([sys.executable, "-c", trace], preexec_fn=work).returncode == 0"""


@pytest.mark.grid(in_ci=True)
def test_forked_processes_neither_stop_nor_hang(ide: Ide) -> None:
    (ide.notebook.folder / "shapes.py").write_text(SHAPES)
    client = ide.attach(0, (str(ide.notebook.folder / "shapes.py"), 3))
    cell = ide.notebook.begin(f"{FORKS}\nwaits = subprocess.Popen(['sleep', '1000'])\nif rank == 0: shapes.double(1)")
    thread, _ = client.wait_for_stop()
    client.request("continue", threadId=thread)
    thread, frame = client.wait_for_stop()  # in the rank itself, after all forks
    assert (frame["name"], client.evaluate("x", frame)) == ("double", "1")
    client.request("continue", threadId=thread)
    assert ide.notebook.finish(cell).status == "ok"
    ide.notebook.ok("%%dip\nwaits.kill(), waits.wait()")


def test_the_launch_file_names_ranks(notebook: Notebook) -> None:
    two = notebook.ok("%dipdebug --dap -r 1-2").stdout
    assert json.loads(two[two.index("{") :])["compounds"][0]["configurations"] == ["ddip rank 1", "ddip rank 2"]
    assert "leave out 12" in notebook.fails("%dipdebug 12 --dap").message
    one = notebook.ok("%dipdebug --dap -r 2").stdout
    assert 'start "ddip rank 2"' in one and '"compounds": []' in one
    assert Ide(notebook).file["compounds"][0]["configurations"] == [f"ddip rank {rank}" for rank in range(3)]
    again = notebook.ok("%dipdebug --dap -r 2").stdout
    assert json.loads(again[again.index("{") :]) == json.loads(one[one.index("{") :])
    notebook.ok("%dipdebug --off")


def begin_stopped(ide: Ide, client: DapClient) -> tuple[int, int]:
    """Start a background cell, and wait until rank 1 has stopped; return the thread and the number of the cell."""
    code = "import torch.distributed as dist\nif rank == 1: breakpoint()\ndist.barrier()"
    number = ide.notebook.ok(f"%%dip --bg\n{code}").number
    return client.wait_for_stop()[0], number


@pytest.mark.slow
@pytest.mark.native("sockets")
def test_magics_work_while_a_rank_has_stopped(ide: Ide) -> None:
    _, number = begin_stopped(ide, ide.attach(1))
    assert "rank 1: at a prompt" in ide.notebook.ok("%dipstack").text
    assert ide.notebook.ok("%dipstack -v").text and ide.notebook.ok("%dipwatch --once").text
    assert "does not wait at a prompt" in ide.notebook.fails(f"%dipdebug {number}").message
    ide.notebook.ok(f"%dipstop {number}")
    assert ide.notebook.fails(f"%dipwait {number}").error == "CellInterrupted"
    ide.notebook.ok(PROOF)


def test_a_rank_without_an_ide_asks_in_the_notebook(ide: Ide) -> None:
    client = ide.attach(1)

    def continue_both() -> None:
        client.request("continue", threadId=client.wait_for_stop()[0])
        ide.notebook.client.input("c")

    asked = ide.notebook.converse("%%dip -r 0-1\nbreakpoint()\nx = rank", "p rank", continue_both)
    assert (asked.shown.status, asked.prompts[0][:6]) == ("ok", "rank 0"), asked


@pytest.mark.grid(in_ci=True)
def test_a_stopped_rank_may_be_killed(ide: Ide) -> None:
    pid = int(ide.notebook.ok("%%dip -r 1\nimport os\nprint(os.getpid())").stdout)
    client = ide.attach(1)
    _, number = begin_stopped(ide, client)
    os.kill(pid, signal.SIGKILL)
    assert client.is_closed()
    assert ide.notebook.fails(f"%dipwait {number}").error == "CellError"
    ide.notebook.ok("%makedip --repair")
    ide.notebook.ok(f"%%dip\n{SETUP}")
    ide.notebook.ok(PROOF)
    ide.launch = Ide(ide.notebook).launch  # the new rank has another port
    client = ide.attach(1)
    cell = ide.notebook.begin("%%dip -r 1\nbreakpoint()\nx = 1")
    client.request("continue", threadId=client.wait_for_stop()[0])
    assert ide.notebook.finish(cell).status == "ok"


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "how", ["%makedip -k", *(pytest.param(how, marks=pytest.mark.grid) for how in ("%makedip -r", "restart"))]
)
def test_a_group_ends_with_a_rank_in_the_ide(bare_notebook: Notebook, how: str) -> None:
    bare_notebook.ok("%makedip -n 2")
    ide = Ide(bare_notebook)
    client = ide.attach(1)
    bare_notebook.ok("%%dip --bg\nimport torch.distributed as dist\nif rank == 1: breakpoint()\ndist.barrier()")
    _, frame = client.wait_for_stop()
    file = Path(frame["source"]["path"])
    assert file.exists()
    if how == "restart":
        bare_notebook.restart()
        bare_notebook.ok("%load_ext ddip\n%config DipMagics.report_after = 10")
    else:
        bare_notebook.ok(how)
    assert client.is_closed()
    client.close()
    wait_until(lambda: not file.exists())


def test_one_error_says_that_debugpy_is_missing(notebook: Notebook) -> None:
    notebook.ok("%%dip\nimport sys\nkept = sys.modules.pop('debugpy', None)")
    notebook.ok("%%dip -r 1\nsys.modules['debugpy'] = None")
    assert "%pip install debugpy" in notebook.fails("%dipdebug --dap").message
    notebook.ok("%%dip\nsys.modules.pop('debugpy', None)\nif kept: sys.modules['debugpy'] = kept")
    Ide(notebook)  # the service has ended on the other ranks, and starts on all
    notebook.ok("%dipdebug --off")
