"""Snapshots of a busy rank's variables, taken while its cell continues."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import ddip
from ddip.errors import BadInput, CellError, RequestFailed, RequestInterrupted, TransferError
from ddip.group.objects import delivery, transfer

from .leftovers import controllers_of, wait_until
from .meanwhile import meanwhile, press_stop, suspended
from .notebook import Notebook
from .test_objects import shared_memory_of_notebook, shared_memory_of_ranks
from .variants import few

LARGE = 2 * delivery.LARGE
THREAD = "ddip-beside"
"""Name of the pickling thread."""


@contextlib.contextmanager
def running_cell(cells: ddip.Group, folder: Path, code: str) -> Iterator[None]:
    """Run `code` in a cell meanwhile; it calls ``begun()``, and ends once ``end()`` is true."""
    errors: list[BaseException] = []
    set_up = f"""
from pathlib import Path
import time
end = Path({str(folder / "end")!r}).exists
begun = lambda: Path({str(folder)!r}, f"begun{{rank}}").touch()
def wait():
    begun()
    while not end(): time.sleep(0.001)
"""

    def run_cell() -> None:
        try:
            cells.run(set_up + code, quiet=True, show_ranks=[])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_cell)
    thread.start()
    try:
        wait_until(lambda: errors or all((folder / f"begun{rank}").exists() for rank in range(2)))
        assert not errors
        yield
    finally:
        (folder / "end").touch()
        thread.join()
    assert not errors


def threads_of(cells: ddip.Group, rank: int = 0) -> list[str]:
    """Return the names of the threads of `rank`."""
    stack = cells.stacks()[rank]
    return [] if stack is None else list(stack.threads)


def pending_snapshots(cells: ddip.Group) -> list[tuple[int, int]]:
    """Return, per rank, how many snapshots it still holds and how many are being pickled."""
    cells.run("from ddip.rank.objects import rank_peek as peek\nleft = len(peek._peeks), len(peek._pickling)")
    return [values["left"] for values in cells.pull_all(["left"], [0, 1])[0]]


@pytest.mark.native("pause")
def test_a_value_changes_while_a_loop_runs(cells: ddip.Group, tmp_path: Path) -> None:
    loop = """
losses, weight = [], torch.zeros(3)
begun()
while not end():
    losses.append(len(losses)); weight += 1
"""
    with running_cell(cells, tmp_path, f"import torch\n{loop}"):
        first = cells.peek(["losses", "weight"])
        assert first["losses"] == [*range(len(first["losses"]))]
        wait_until(lambda: len(cells.peek(["losses"])["losses"]) > len(first["losses"]))
        wait_until(lambda: cells.peek(["weight"])["weight"][0] > first["weight"][0])
        assert [info.state for info in cells.info()] == ["busy", "busy"]


def test_all_ranks_answer_while_some_wait_in_a_collective(cells: ddip.Group, tmp_path: Path) -> None:
    set_up = "import torch, torch.distributed as dist\nx = torch.ones(1) + rank"
    code = f"{set_up}\nbegun()\nif rank: wait()\ndist.all_reduce(x)"
    with running_cell(cells, tmp_path, code):
        wait_until(lambda: str(cells.stacks()[0].place).startswith("all_reduce"))  # type: ignore[union-attr]
        values, moved = cells.peek_all(["rank", "x"], [0, 1])
        assert values == [{"rank": 0, "x": torch.ones(1)}, {"rank": 1, "x": torch.full((1,), 2.0)}] and moved == []
        assert cells.peek(["rank"], 1) == {"rank": 1}
    assert cells.peek_all(["x"], [1, 0])[0] == [{"x": torch.full((1,), 3.0)}] * 2  # also of idle ranks


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("size", [100_000, *(pytest.param(n, marks=pytest.mark.grid) for n in (3_000, 5_000_000))])
@pytest.mark.native("pause")
def test_a_tensor_is_consistent_while_operators_write_to_it(
    cells: ddip.Group, tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without synchronization, 69 of 116 snapshots of 100 000 numbers mixed two values."""
    loop = f"import torch\nx, other = torch.zeros({size}), torch.zeros({size})\nbegun()\n"
    with running_cell(cells, tmp_path, loop + "while not end():\n    for _ in range(20): x.add_(1); other.sub_(1)"):
        last = -1.0
        for _ in range(30):
            values = cells.peek(["x", "other"], seconds=30)
            assert values["x"].min() == values["x"].max() >= last
            assert values["other"].min() == values["other"].max()
            last = values["x"][0].item()
            assert 0 <= last + values["other"][0] <= 1  # both are from the same moment
    assert capsys.readouterr().err == ""


@pytest.mark.grid
def test_an_operation_that_may_have_written_in_part_is_named(
    cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import torch, torch.distributed as dist\nx = torch.ones(3)\nbegun()\nif rank: wait()\ndist.all_reduce(x)"
    with running_cell(cells, tmp_path, code):
        wait_until(lambda: str(cells.stacks()[0].place).startswith("all_reduce"))  # type: ignore[union-attr]
        assert cells.peek(["rank"]) == {"rank": 0} and capsys.readouterr().err == ""
        cells.peek(["x"])
    stderr = capsys.readouterr().err
    assert re.search(
        "rank 0 was inside all_reduce, .* line 12 during the pull; a tensor that it writes to may", stderr
    ), stderr


@pytest.mark.native("pause")
def test_a_thread_that_writes_to_a_tensor_is_an_error(cells: ddip.Group, tmp_path: Path) -> None:
    code = """
import threading, torch
x, done = torch.zeros(2_000_000), False
def write():
    while not done: x.add_(1)
thread = threading.Thread(target=write); thread.start()
wait()
done = True; thread.join()
"""
    with running_cell(cells, tmp_path, code):
        wait_until(lambda: is_refused(cells, "x", "another thread writes to a tensor in it"))


def is_refused(cells: ddip.Group, name: str, why: str) -> bool:
    try:
        cells.peek([name], seconds=30)
    except TransferError as error:
        return why in str(error)
    return False


@pytest.mark.grid
def test_a_child_of_the_cell_is_not_paused(cells: ddip.Group, tmp_path: Path) -> None:
    """A forked child inherits a call that is pending for the main thread."""
    code = """
import os, torch
x, ended = torch.zeros(1000), 0
begun()
while not end():
    if (child := os.fork()) == 0: os._exit(0)
    ended += os.waitpid(child, 0)[1] == 0
"""
    with running_cell(cells, tmp_path, code):
        for _ in range(20):
            cells.peek(["x"], seconds=30)
        before = cells.peek(["ended"])["ended"]
        wait_until(lambda: cells.peek(["ended"])["ended"] > before)


def test_a_snapshot_names_a_missing_variable(cells: ddip.Group, tmp_path: Path) -> None:
    with running_cell(cells, tmp_path, "def train():\n    inner = 1\n    wait()\nouter = 2\ntrain()"):
        assert cells.peek(["outer"]) == {"outer": 2}
        with pytest.raises(TransferError, match="rank 0 .*inner;"):
            cells.peek(["outer", "inner"])
    with pytest.raises(TransferError, match="rank 1 .*inner; .*%%dip"):
        cells.peek(["inner"], 1)


def test_an_unpicklable_object_is_named_and_nothing_arrives(cells: ddip.Group) -> None:
    cells.run(f"import threading, numpy; lock = threading.Lock(); fine = 1; large = numpy.zeros({LARGE})")
    with pytest.raises(TransferError, match="lock .*rank 0: TypeError"):
        cells.peek(["large", "lock", "fine"])
    assert shared_memory_of_ranks(cells) == [] and pending_snapshots(cells) == [(0, 0), (0, 0)]


def test_containers_that_variables_share_are_still_shared(cells: ddip.Group) -> None:
    cells.run("log = {'losses': [1]}; losses = log['losses']; mine = []; mine.append(mine)")
    for names in (["losses", "log"], ["log", "losses"]):
        values = cells.peek(names)
        assert values["log"]["losses"] is values["losses"]
    mine = cells.peek(["mine"])["mine"]
    assert mine[0] is mine


@pytest.mark.grid(in_ci=True)
def test_a_constantly_changing_dict_arrives_consistently(cells: ddip.Group, tmp_path: Path) -> None:
    code = """
import threading
table = {i: i for i in range(10_000)}
def change():
    i = 10_000
    while not done:
        table[i] = i; table.pop(i - 1 if i > 10_000 else None, None); i += 1
done = False
thread = threading.Thread(target=change); thread.start()
wait()
done = True; thread.join()
"""
    with running_cell(cells, tmp_path, code):
        for _ in range(10):
            table = cells.peek(["table"])["table"]
            assert all(table[i] == i for i in range(10_000)) and len(table) <= 10_002


@pytest.mark.parametrize("times", [3, 1000], ids=["a few times", "always"])
def test_an_object_that_changes_size_while_pickled_is_retried(cells: ddip.Group, times: int) -> None:
    cells.run(f"""
        class Grows:
            left = {times}
            def __reduce__(self):
                if Grows.left > 0:
                    Grows.left -= 1; inner[len(inner)] = 0
                return int, ()
        inner = {{"grows": Grows(), "last": 1}}
        outer = {{"inner": inner}}
    """)
    if times == 3:
        assert len(cells.peek(["outer"])["outer"]["inner"]) == 5
    else:
        with pytest.raises(TransferError, match="outer .*rank 0: ObjectChanged: .*20 times"):
            cells.peek(["outer"])


@pytest.mark.parametrize("times", [pytest.param(1, id="once"), pytest.param(1000, id="always", marks=pytest.mark.grid)])
def test_a_tensor_freed_while_pickled_causes_no_crash(cells: ddip.Group, times: int) -> None:
    cells.run(f"""
        import torch
        class Frees:
            left = {times}
            def __reduce__(self):
                if Frees.left > 0:
                    Frees.left -= 1
                    storage = pair[0].untyped_storage(); size = storage.nbytes()
                    storage.resize_(0); storage.resize_(size if Frees.left == 0 else size + 2 ** 20)
                    if Frees.left == 0: pair[0].fill_(1)
                return int, ()
        pair = [torch.ones({1 << 23}), Frees()]
    """)
    if times == 1:
        assert cells.peek(["pair"])["pair"][0].sum() == 1 << 23
    else:
        with pytest.raises(TransferError, match="pair .*rank 0: ObjectChanged: .*tensor .*20 times"):
            cells.peek(["pair"])
    assert shared_memory_of_ranks(cells) == [] and pending_snapshots(cells) == [(0, 0), (0, 0)]


HANGS = {"loops": "while True: pass", "lock": "lock.acquire()", "sleeps": "time.sleep(3)"}


@pytest.mark.parametrize(
    "how", [pytest.param("loops", marks=pytest.mark.native("threads")), *few(list(HANGS)[1:], "lock")]
)
def test_an_object_that_hangs_is_abandoned_without_losing_ranks(cells: ddip.Group, tmp_path: Path, how: str) -> None:
    code = f"""
import threading, time
lock = threading.Lock(); lock.acquire(); fine = 7
class Bad:
    def __getstate__(self):
        {HANGS[how]}
bad = Bad()
wait()
"""
    with running_cell(cells, tmp_path, code):
        began = time.monotonic()
        with pytest.raises(TransferError) as error:
            cells.peek(["fine", "bad"], seconds=0.5)
        assert time.monotonic() - began < 2.5
        where = re.escape(HANGS[how])
        assert re.search(rf"rank 0 .* 0\.5 s: .* fine, bad, .*line \d+.*: {where}; -t SECONDS", str(error.value))
        assert cells.peek(["fine"]) == {"fine": 7}
        if how == "lock":
            assert THREAD in threads_of(cells)
        else:
            wait_until(lambda: THREAD not in threads_of(cells))
    cells.run("import torch.distributed as dist; dist.barrier(); lock.release()")
    wait_until(lambda: pending_snapshots(cells) == [(0, 0), (0, 0)])


@pytest.mark.grid
def test_the_number_of_hanging_snapshots_is_limited(cells: ddip.Group) -> None:
    cells.run("""
        import threading
        lock, fine = threading.Lock(), 1
        class Bad:
            def __reduce__(self):
                with lock: return int, ()
        bad = Bad(); lock.acquire()
    """)
    for _ in range(8):
        with pytest.raises(TransferError, match="rank 0 .* 0.1 s"):
            cells.peek(["bad"], seconds=0.1)
    with pytest.raises(TransferError, match="rank 0: RuntimeError: 8 .*line 5$"):
        cells.peek(["fine"])
    cells.run("lock.release()")
    wait_until(lambda: pending_snapshots(cells) == [(0, 0), (0, 0)])
    assert cells.peek(["fine"]) == {"fine": 1}


@pytest.mark.grid
def test_a_suspended_rank_is_named_and_continues(cells: ddip.Group) -> None:
    cells.run("kept = rank")
    pid = cells.members[1].pid
    with suspended([pid]), pytest.raises(TransferError, match=rf"rank 1 .* 0\.5 s: .*kill -CONT {pid} .*-t SECONDS"):
        cells.peek_all(["kept"], [0, 1], seconds=0.5)
    assert cells.peek(["kept"], 1) == {"kept": 1}
    assert pending_snapshots(cells) == [(0, 0), (0, 0)]


@pytest.mark.grid
def test_a_suspended_controller_is_named(cells: ddip.Group) -> None:
    cells.run("kept = rank")
    pids = [controllers_of(os.getpid())[0].pid]
    with suspended(pids), pytest.raises(TransferError, match="controller .*SIGSTOP"):
        cells.peek(["kept"], seconds=0.3)
    assert cells.peek(["kept"], 1) == {"kept": 1}
    wait_until(lambda: pending_snapshots(cells) == [(0, 0), (0, 0)])


@pytest.mark.grid
def test_a_rank_whose_main_thread_holds_the_interpreter_is_named(cells: ddip.Group, tmp_path: Path) -> None:
    code = "import ctypes\nkept = rank\nbegun()\nif rank: ctypes.PyDLL(None).usleep(2_500_000)\nwait()"
    with running_cell(cells, tmp_path, code):
        with pytest.raises(TransferError, match=r"rank 1 .* 0.2 s: .*line \d+.*C code"):
            cells.peek(["kept"], 1, seconds=0.2)
        assert cells.peek(["kept"], 1) == {"kept": 1}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_has_ended_is_named(cells: ddip.Group, when: str) -> None:
    cells.run("""
        import os, signal
        class Dies:
            def __reduce__(self): os.kill(os.getpid(), signal.SIGKILL)
        dies = Dies()
    """)
    if when == "before":
        with pytest.raises(CellError):
            cells.run("if rank: os.kill(os.getpid(), signal.SIGKILL)")
    began = time.monotonic()
    with pytest.raises(RequestFailed, match="rank 1: RankEnded: .*--repair"):
        cells.peek_all(["rank", "dies" if when == "meanwhile" else "signal"], [1], seconds=30)
    assert time.monotonic() - began < 20
    assert cells.repair() == [1]


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("way", few(["memory", "parts"], "parts"))
def test_large_objects_arrive_completely_and_leave_nothing(
    cells: ddip.Group, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "parts":
        monkeypatch.setattr(transfer, "read_shared", lambda path, size: None)
        monkeypatch.setattr("ddip.group.objects.part_size.MOST", LARGE // 3)
    before = sorted(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else []
    code = f"import numpy, torch; large = numpy.arange({LARGE}) + rank; tensor = torch.arange({LARGE}) - rank\nwait()"
    with running_cell(cells, tmp_path, code):
        values, _ = cells.peek_all(["large", "tensor", "rank"], [0, 1])
        for rank, value in enumerate(values):
            assert (value["large"] == np.arange(LARGE) + rank).all()
            assert torch.equal(value["tensor"], torch.arange(LARGE) - rank)
            value["large"][0] = value["tensor"][0] = 1000  # changes only our copy
        again = cells.peek(["large", "tensor"], 1)
        assert again["large"][0] == 1 and again["tensor"][0] == -1
    assert shared_memory_of_ranks(cells) == [] and pending_snapshots(cells) == [(0, 0), (0, 0)]
    del values, value, again  # they hold the received memory
    assert shared_memory_of_notebook() == []
    assert not before or sorted(os.listdir("/dev/shm")) == before


def test_the_stop_button_ends_only_the_wait_for_a_snapshot(cells: ddip.Group, tmp_path: Path) -> None:
    code = """
import threading
lock = threading.Lock(); lock.acquire()
class Bad:
    def __reduce__(self):
        with lock: return int, ()
bad, fine = Bad(), 1
wait()
"""
    with running_cell(cells, tmp_path, code):
        thread = meanwhile(lambda: THREAD in threads_of(cells), press_stop)
        with pytest.raises(RequestInterrupted):
            cells.peek(["bad"], seconds=60)
        thread.join()
        assert cells.peek(["fine"]) == {"fine": 1}
    cells.run("lock.release()")
    wait_until(lambda: pending_snapshots(cells) == [(0, 0), (0, 0)])


@pytest.mark.grid(in_ci=True)
def test_a_cell_can_be_stopped_while_something_large_is_pickled(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("large = [float(i) for i in range(3_000_000)]")
    pulled: list[object] = []
    with running_cell(
        cells, tmp_path, "begun()\ntry:\n    while not end(): pass\nexcept KeyboardInterrupt: stopped = True"
    ):
        thread = threading.Thread(target=lambda: pulled.append(len(cells.peek(["large"], 0, 60)["large"])))
        thread.start()
        wait_until(lambda: THREAD in threads_of(cells))
        cells.interrupt()
        wait_until(lambda: cells.info()[0].state == "idle", 5)
        thread.join()
    assert pulled == [3_000_000] and cells.pull(["stopped"]) == {"stopped": True}


def test_bad_input_is_refused(cells: ddip.Group) -> None:
    with pytest.raises(BadInput, match="rank 7"):
        cells.peek(["x"], 7)
    with pytest.raises(BadInput, match=r"ranks=\[\]"):
        cells.peek_all(["x"], [])


def test_the_magic_pulls_a_snapshot(notebook: Notebook) -> None:
    notebook.ok("%makedip -n 2\n%dipper g")
    notebook.ok("import threading, time, os\nif os.path.exists('end'): os.remove('end')")
    code = 'import os, time\\nmine, step = rank * 10, 0\\nwhile not os.path.exists("end"): step += 1; time.sleep(0.001)'
    notebook.ok(f"cell = threading.Thread(target=g.run, args=('{code}',)); cell.start()")
    notebook.ok("while not g.has_name('step'): time.sleep(0.01)")
    shown = notebook.ok("%dipull --now mine -r all\nassert mine == [0, 10]")
    assert "pulled mine: " in shown.text and shown.text.endswith("from ranks 0, 1\n")
    notebook.ok("%dipull --now -t 20 step mine\nassert mine == 0\nfirst = step")
    notebook.ok("while step == first:\n    %dipull --now step")
    assert "rank 0 has no variable nix" in notebook.run("%dipull --now nix").message
    notebook.ok("open('end', 'w').close(); cell.join()")
    assert notebook.run("%dipull step -t 3").message == (
        "%dipull step -t 3: -t works only with --now; leave it out, or add --now"
    )
    assert "-t 0: type a time of 0.1 s or more" in notebook.run("%dipull --now step -t 0").message
