"""Cells on the ranks of a group of this process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

import ddip
from ddip.errors import BadInput, CellInterrupted

from .leftovers import collection_counts, wait_until
from .meanwhile import meanwhile, press_stop
from .notebook import ANSI
from .rank_errors import raises_on_ranks


def test_output_of_rank_0_is_shown_unchanged(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("print('out', rank); import sys; print('err', rank, file=sys.stderr)")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("out 0\n", "err 0\n")


def test_lines_of_several_ranks_are_labelled(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("print('a', rank); print('b', end='')", show_ranks=[0, 1])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank 0] a 0", "[rank 0] b", "[rank 1] a 1", "[rank 1] b"]
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == sorted(mine)


def test_quiet_output_appears_at_the_end_in_rank_order(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("import time; time.sleep(0.3 * (1 - rank)); print('a', rank)", show_ranks=[0, 1], quiet=True)
    assert capsys.readouterr().out == "[rank 0] a 0\n[rank 1] a 1\n"


def test_only_the_given_ranks_run(cells: ddip.Group) -> None:
    cells.run("here = True", ranks=[1])
    cells.run("found = 'here' in globals()")
    assert [v["found"] for v in cells.pull_all(["found"], [0, 1])[0]] == [False, True]


def test_an_error_on_a_hidden_rank_fails_the_cell(cells: ddip.Group) -> None:
    with raises_on_ranks({1: "ZeroDivisionError"}) as caught:
        cells.run("x = 1\n1 / (1 - rank)", show_ranks=[0])
    shown = ANSI.sub("", "\n".join(caught.value._render_traceback_()))
    assert "----> 2 1 / (1 - rank)" in shown
    assert "ddip" not in shown and "ipyparallel" not in shown


def test_the_same_error_on_all_ranks_is_shown_once(cells: ddip.Group) -> None:
    with pytest.raises(ddip.CellError, match="^ranks 0, 1: NameError[^;]*$"):
        cells.run("nothing")


@pytest.mark.grid(in_ci=True)
def test_a_rank_answers_at_once_after_an_error(cells: ddip.Group) -> None:
    for _ in range(20):
        with pytest.raises(ddip.CellError):
            cells.run("1 / 0")
        cells.run("fine = 1")
        assert cells.pull(["fine"]) == {"fine": 1}


def test_variables_survive_an_error(cells: ddip.Group) -> None:
    with pytest.raises(ddip.CellError):
        cells.run("kept = rank\nraise ValueError")
    assert [v["kept"] for v in cells.pull_all(["kept"], [0, 1])[0]] == [0, 1]


@pytest.mark.parametrize("leave", ["exit", "exit()", "quit", "import sys; sys.exit()", "raise SystemExit(3)"])
def test_exit_ends_the_cell_but_not_the_rank(cells: ddip.Group, leave: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("kept = 1")
    capsys.readouterr()
    with raises_on_ranks(dict.fromkeys((0, 1), "SystemExit")):
        cells.run(leave)
    assert "To exit" not in "".join(capsys.readouterr())  # IPython's warning
    cells.run("pass")
    assert cells.pull(["kept"]) == {"kept": 1}


def test_input_is_refused(cells: ddip.Group) -> None:
    with raises_on_ranks(dict.fromkeys((0, 1), "StdinNotImplementedError")):
        cells.run("input()")


def test_the_ranks_run_at_the_same_time(cells: ddip.Group) -> None:
    cells.run("""
        import torch.distributed as dist
        dist.barrier()
        dist.barrier()
    """)


def test_a_cell_that_awaits_ends(cells: ddip.Group) -> None:
    cells.run("""
        import asyncio
        await asyncio.sleep(0.01)
        awaited = rank
    """)
    assert cells.pull(["awaited"], 1) == {"awaited": 1}


def test_an_interrupt_ends_a_python_loop_on_every_rank(cells: ddip.Group) -> None:
    def press_stop() -> None:
        wait_until(lambda: [info.state for info in cells.info()] == ["busy", "busy"])
        os.kill(os.getpid(), signal.SIGINT)

    cells.run("kept = 5")
    thread = threading.Thread(target=press_stop)
    thread.start()
    with pytest.raises(CellInterrupted, match="ranks 0, 1"):
        cells.run("while True: pass")
    thread.join()
    cells.run("""
        import torch, torch.distributed as dist
        x = torch.ones(1)
        dist.all_reduce(x)
    """)
    assert cells.pull(["kept"]) == {"kept": 5}


@pytest.mark.parametrize("lines", [1, 100, 1000, 5000])
def test_an_interrupt_in_a_flood_of_output_is_not_lost(
    cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: int
) -> None:
    def press_stop() -> None:
        wait_until((tmp_path / "now").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_stop)
    thread.start()
    cells.run("kept = 0")
    with pytest.raises(CellInterrupted, match="ranks 0, 1"):
        cells.run(
            f"import pathlib\nkept, n = 1, 0\nwhile True:\n    n += 1\n"
            f"    if n < {lines} + 20_000: print('x' * 50)\n"
            f"    if n == {lines}: pathlib.Path({str(tmp_path / 'now')!r}).touch()",
            show_ranks=[0, 1],
        )
    thread.join()
    assert {"kept": 1} in cells.pull_all(["kept"], [0, 1])[0]


def test_an_interrupt_prevents_a_rank_from_beginning_the_cell(cells: ddip.Group, tmp_path: Path) -> None:
    """Delay rank 1 before it begins: the signal finds it idle, and it must not begin afterwards."""
    cells.run(f"""
        import pathlib, time
        folder = pathlib.Path({str(tmp_path)!r})
        def hold():
            (folder / 'held').touch()
            while not (folder / 'go-on').exists(): time.sleep(0.01)
        if rank == 1:
            import asyncio
            asyncio.get_running_loop().call_later(0.1, hold)
    """)
    wait_until((tmp_path / "held").exists)

    def press_stop() -> None:
        wait_until(lambda: cells.info()[0].state == "busy")
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: cells.info()[0].state == "idle")
        (tmp_path / "go-on").touch()

    thread = threading.Thread(target=press_stop)
    thread.start()
    with pytest.raises(CellInterrupted) as caught:
        cells.run("begun = rank\nwhile True: pass")
    thread.join()
    assert caught.value.by_rank[1].message == "before the cell began"
    cells.run("has_begun = 'begun' in globals()")
    assert [found["has_begun"] for found in cells.pull_all(["has_begun"], [0, 1])[0]] == [True, False]


AT_THE_EDGE = """
import os, signal
kernel = get_ipython().kernel
def at_the_edge(argument):
    del kernel.{method}
    {what}
    return kernel.{method}(argument)
if rank == 0: kernel.{method} = at_the_edge
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
ABORT = "kernel.aborted.add(kernel.get_parent('shell')['header']['msg_id'])"


@pytest.mark.parametrize("what", [INTERRUPT, ABORT], ids=["interrupted", "aborted"])
def test_a_cell_stopped_just_before_it_begins_never_runs(cells: ddip.Group, what: str) -> None:
    cells.run(AT_THE_EDGE.format(method="run_cell", what=what))  # called when the next cell arrives
    with raises_on_ranks({0: "KeyboardInterrupt"}):
        cells.run("here = 1")
    cells.run("ran = 'here' in globals()")
    assert [found["ran"] for found in cells.pull_all(["ran"], [0, 1])[0]] == [False, True]


def test_an_interrupt_just_after_a_cell_keeps_its_answer(cells: ddip.Group) -> None:
    cells.run(AT_THE_EDGE.format(method="was_silent", what=INTERRUPT))  # called when the cell has ended
    cells.run("assert kernel.was_silent is not at_the_edge")


SWALLOWED = {
    "a hook of IPython": (
        "def hook(*_):\n    get_ipython().events.unregister('pre_run_cell', hook)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.01)\n"
        "get_ipython().events.register('pre_run_cell', hook)"
    ),
    "a finalizer": (
        "class Final:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(0.01)\n"
        "final = Final()"
    ),
}


@pytest.mark.parametrize("place", SWALLOWED)
def test_an_interrupt_survives_code_that_swallows_exceptions(cells: ddip.Group, place: str) -> None:
    cells.run(f"import os, signal, time\n{SWALLOWED[place]}")
    with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
        cells.run("final = None\ntime.sleep(60)", timeout=30)
    cells.run("pass")


FORKS = """
import os, signal
def press():
    global pressed
    if not pressed:
        pressed = True
        os.kill(os.getpid(), signal.SIGINT)
pressed = True
os.register_at_fork(after_in_parent=press)
"""


def test_an_interrupt_swallowed_by_a_fork_callback_is_not_lost(cells: ddip.Group) -> None:
    cells.run(FORKS)
    with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
        cells.run(
            "pressed = False\nwhile True:\n    pid = os.fork()\n    if not pid: os._exit(0)\n    os.waitpid(pid, 0)",
            timeout=30,
        )


def test_an_interrupt_ends_a_sleep_that_begins_with_it(cells: ddip.Group) -> None:
    """A signal that arrives just before a system call does not interrupt it, like one that another thread takes."""
    with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
        cells.run(
            """
            import signal, threading, time
            def press():
                kernel = get_ipython().kernel
                take, kernel._signal = kernel._signal, lambda number: signal.pthread_kill(threading.get_ident(), number)
                kernel.interrupt_running_cell()
                kernel._signal = take
            threading.Timer(0.2, press).start()
            time.sleep(1000)
            """,
            timeout=60,
        )
    assert [info.state for info in cells.info()] == ["idle", "idle"]


def test_a_stop_that_the_cell_handles_is_not_repeated(cells: ddip.Group) -> None:
    cells.run("""
        import signal, threading, time
        taken = []
        former = signal.signal(signal.SIGINT, lambda *_: taken.append(1))
        threading.Timer(0.2, get_ipython().kernel.interrupt_running_cell).start()
        while not taken: time.sleep(0.01)
        signal.signal(signal.SIGINT, former)
        time.sleep(0.5)
        assert taken == [1]
    """)


def test_an_interrupt_of_idle_ranks_has_no_later_effect(cells: ddip.Group) -> None:
    for _ in range(5):
        cells.interrupt()
        cells.run("import torch.distributed as dist; dist.barrier()")


def test_a_variable_can_be_deleted_by_magic(cells: ddip.Group) -> None:
    cells.run("""
        gone = 1
        %xdel gone
        assert 'gone' not in globals()
    """)


def test_an_interrupted_cell_shows_earlier_errors_of_other_ranks(cells: ddip.Group, tmp_path: Path) -> None:
    def press_stop() -> None:
        wait_until((tmp_path / "begun").exists)
        wait_until(lambda: [info.state for info in cells.info()] == ["idle", "busy"])
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_stop)
    thread.start()
    with pytest.raises(CellInterrupted) as caught:
        cells.run(f"""
            import pathlib
            if rank == 0:
                pathlib.Path({str(tmp_path / "begun")!r}).touch()
                raise ValueError('the cause')
            while True: pass
        """)
    thread.join()
    assert [error.name for error in caught.value.by_rank.values()] == ["ValueError", "KeyboardInterrupt"]
    shown = ANSI.sub("", "\n".join(caught.value._render_traceback_()))
    assert "ValueError: the cause" in shown and shown.endswith(
        "KeyboardInterrupt: the cell was interrupted on ranks 0, 1"
    )


def test_an_interrupted_print_shows_only_lines_of_the_cell(cells: ddip.Group) -> None:
    def is_printing() -> bool:
        places = cells.ranks.stack_locations([0, 1], 5).values()
        return [place.line if place else 0 for place in places] == [1, 1]

    thread = meanwhile(is_printing, press_stop)
    with pytest.raises(CellInterrupted) as caught:
        cells.run("while True: print()")
    thread.join()
    for error in caught.value.by_rank.values():
        assert error.traceback.rstrip().splitlines()[-2:] == ["    while True: print()", "KeyboardInterrupt"]


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "cause",
    ["ValueError: the cause", pytest.param("RuntimeError: gloo/transport: its own", marks=pytest.mark.grid)],
)
@pytest.mark.native("sockets")
def test_ranks_that_run_on_after_an_error_are_named(
    cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str
) -> None:
    """An error like that of an aborted collective is the rank's own if ddip has aborted nothing."""
    kind, text = cause.split(": ", 1)
    errors: list[str] = []

    def is_reported() -> bool:
        errors.append(capsys.readouterr().err)
        return "still runs" in "".join(errors)

    def continue_when_reported() -> None:
        wait_until(is_reported)
        (tmp_path / "go-on").touch()

    thread = threading.Thread(target=continue_when_reported)
    thread.start()
    with raises_on_ranks({0: kind}):
        cells.run(
            f"import pathlib, time\nif rank == 0: raise {kind}({text!r})\n"
            f"while not pathlib.Path({str(tmp_path / 'go-on')!r}).exists(): time.sleep(0.01)"
        )
    thread.join()
    shown = "".join(errors)
    runs = rf"ddip: rank 0: {cause}; rank 1 still runs, outside of collectives:\n  rank 1: (\w+, )?cell \[\d+\] line 3"
    assert re.search(runs, shown)  # the rank may be caught in the call that checks for the file
    assert "Ctrl-C ends the cell and keeps all variables" in shown


@pytest.mark.grid
def test_ranks_that_do_not_stop_are_named_despite_much_output(cells: ddip.Group, tmp_path: Path) -> None:
    def press_stop() -> None:
        wait_until(lambda: {f.name for f in tmp_path.iterdir()} == {"deaf0", "deaf1"})
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_stop)
    thread.start()
    with pytest.raises(CellInterrupted, match=r"\nranks 0, 1 .*\n .*line \d"):
        cells.run(f"""
            import pathlib, signal, time
            folder = pathlib.Path({str(tmp_path)!r})
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            (folder / f'deaf{{rank}}').touch()
            while not (folder / 'go-on').exists(): print('.', flush=True)
        """)
    thread.join()
    (tmp_path / "go-on").touch()
    wait_until(lambda: [info.state for info in cells.info()] == ["idle", "idle"])
    cells.run("pass")


def test_ipyparallels_own_client_can_signal_a_rank(cells: ddip.Group) -> None:
    def send_interrupt() -> None:
        wait_until(lambda: cells.info()[1].state == "busy")
        cells.cluster.client.send_signal("SIGINT", cells.members[1].engine, block=True)

    thread = threading.Thread(target=send_interrupt)
    thread.start()
    with raises_on_ranks({1: "KeyboardInterrupt"}):
        cells.run("import time\nwhile rank: time.sleep(0.01)")
    thread.join()


# -- after each cell


def test_garbage_in_cycles_is_collected_after_each_cell(cells: ddip.Group) -> None:
    cells.run("""
        import gc, weakref
        class Node: pass
        node = Node(); node.me = node; gone = weakref.ref(node)
        gc.disable()
        del node
    """)
    before = collection_counts(cells)
    cells.run("pass")
    wait_until(lambda: all(now > then for now, then in zip(collection_counts(cells), before, strict=True)))
    cells.run("gc.enable(); is_gone = gone() is None")
    assert cells.pull(["is_gone"]) == {"is_gone": True}


@pytest.mark.parametrize("fails", [False, True])
def test_the_answer_comes_before_the_collection(cells: ddip.Group, tmp_path: Path, fails: bool) -> None:
    """Block the collection on a file that is created once the answer has arrived: otherwise it never ends."""
    with pytest.raises(ddip.CellError) if fails else contextlib.nullcontext():
        cells.run(
            "import gc, pathlib, time\n"
            f"folder = pathlib.Path({str(tmp_path)!r})\n"
            "def hold(phase, info):\n"
            "    if phase == 'start' and info['generation'] == 2:\n"
            "        gc.callbacks.remove(hold)\n"
            "        (folder / f'began{rank}').touch()\n"
            "        while not (folder / 'answered').exists(): time.sleep(0.01)\n"
            "gc.callbacks.append(hold)" + ("\n1 / 0" if fails else "")
        )
    wait_until(lambda: {f.name for f in tmp_path.iterdir()} == {"began0", "began1"})
    (tmp_path / "answered").touch()
    cells.run("pass")


def test_a_setting_turns_the_collection_off(cells: ddip.Group) -> None:
    try:
        settled = collection_counts(cells)
        cells.run("pass")
        wait_until(lambda: all(now > then for now, then in zip(collection_counts(cells), settled, strict=True)))
        cells.set_collect(False)
        before = collection_counts(cells)
        for _ in range(3):
            cells.run("pass")
        assert collection_counts(cells) == before
    finally:
        cells.set_collect(True)


@pytest.mark.parametrize("code", ["%reset -f", "del rank, world_size, device", "globals().pop('rank')"])
def test_the_next_cell_restores_the_standing_names(cells: ddip.Group, code: str) -> None:
    cells.run(code)
    cells.run(
        "import torch.distributed as dist\nassert (rank, world_size) == (dist.get_rank(), 2) and device.type == 'cpu'"
    )


def test_an_aggressive_reset_removes_only_modules_of_cells(cells: ddip.Group) -> None:
    cells.run("""
        import builtins, sys, types, ddip.sharded.save_points
        sys.modules['made_here'] = types.ModuleType('made_here')
        builtins.before = ddip.sharded.save_points
        %reset -f --aggressive
    """)
    cells.run("""
        import builtins, sys, ddip.sharded.save_points
        assert 'made_here' not in sys.modules and 'torch.distributed' in sys.modules
        assert ddip.sharded.save_points is builtins.__dict__.pop('before')
    """)


def test_a_standing_name_keeps_a_value_assigned_by_a_cell(cells: ddip.Group) -> None:
    cells.run("rank = 'mine'")
    cells.run("assert rank == 'mine'\ndel rank")
    cells.run("assert rank in (0, 1)")


def test_overwriting_rank_or_world_size_is_reported_once(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells.options, "failure_grace", 60.0)  # a rebuilt group restores rank and world_size
    back = "import torch.distributed as dist; {0} = dist.get_{0}()"

    def stderr_of(code: str) -> str:
        cells.run(code)
        return capsys.readouterr().err

    text = "ddip: this cell overwrote rank (now {}), the rank's number; %%dip: {} restores it\n"
    assert stderr_of("for rank in range(3): pass") == text.format("2 on ranks 0, 1", back.format("rank"))
    assert stderr_of("for rank in range(3): pass") == stderr_of("rank") == ""
    assert stderr_of("rank = 'mine'") == text.format("of type str on ranks 0, 1", back.format("rank"))
    assert stderr_of(back.format("rank")) == ""
    assert stderr_of("for rank in range(2): pass") == text.format("1 on rank 0", back.format("rank"))
    assert stderr_of("del rank") == stderr_of("assert rank < 2") == ""
    assert "overwrote rank (now different on ranks 0, 1)" in stderr_of("rank += 5")
    assert "overwrote world_size (now 7 on ranks 0, 1), the number of ranks" in stderr_of(
        f"{back.format('rank')}; world_size = 7"
    )
    with pytest.raises(ddip.CellError, match="ZeroDivisionError"):
        cells.run(f"{back.format('world_size')}; rank = 9; 1 / 0")
    assert "overwrote rank (now 9 on ranks 0, 1)" in capsys.readouterr().err
    assert stderr_of(back.format("rank")) == ""


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist; rank, world_size = dist.get_rank(), dist.get_world_size()",
        "import os; rank = int(os.environ['RANK'])",
        "import torch; device = torch.device('cpu')",
        "device = 'cuda:0'; del device",
        "def f(rank, world_size): return [rank for rank in range(3)]\nf(7, 8)",
        "%reset -f",
    ],
)
def test_a_rank_with_its_own_number_is_not_reported(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    cells.run(code)
    assert capsys.readouterr().err == ""


def test_a_rebuilt_group_restores_its_numbers_silently(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("import torch.distributed as dist; rank = 9; dist.destroy_process_group()")
    assert capsys.readouterr().err == ""
    cells.run("assert rank == dist.get_rank()")
    cells.run("rank = 9")
    assert "rank (now 9 on ranks 0, 1)" in capsys.readouterr().err
    cells.run("del rank")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda group: group.push({"lr": 1, "rank": 0}), "push rank: "),
        (lambda group: group.repair(["device"]), "repair device: "),
        (lambda group: group.run("ran = True", ranks=[0, 9]), r"ranks=\[0, 9\]: .*rank 9"),
        (lambda group: group.run("ran = True", ranks=[]), r"ranks=\[\]: "),
        (lambda group: group.run("ran = True", show_ranks=[0, 9]), r"show_ranks=\[0, 9\]: .*rank 9"),
        (lambda group: group.push({"ran": True}, ranks=[0, -1]), r"ranks=\[0, -1\]: .*rank -1"),
        (lambda group: group.push({"ran": True}, ranks=[0, 0]), r"ranks=\[0, 0\]: .*rank 0 .*twice"),
        (lambda group: group.pull(["rank"], rank=9), r"rank=\[9\]: .*rank 9"),
        (lambda group: group.pull_all(["rank"], [0, "1"]), r"ranks=\[0, '1'\]: .*'1'"),
        (lambda group: group.interrupt([9]), r"ranks=\[9\]: .*rank 9"),
        (lambda group: group.repair(["rank"], source=9), r"source=\[9\]: .*rank 9"),
    ],
)
def test_invalid_ranks_are_named_before_anything_is_sent(
    cells: ddip.Group, call: Callable[[ddip.Group], object], said: str
) -> None:
    with pytest.raises(BadInput, match=f"^{said}"):
        call(cells)
    cells.run("assert 'ran' not in globals()")


SLOW = """
import os, signal
from . import part
os.kill(os.getpid(), signal.SIGINT)
for _ in range(10000): pass
whole = True
"""
HUNG = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)"


@pytest.fixture
def libraries(cells: ddip.Group, tmp_path: Path) -> Path:
    """Create a folder on the import path of the ranks."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    cells.run(f"import sys; sys.path.append({str(folder)!r})")
    return folder


def write_package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "part.py").write_text("value = 1")
    (folder / name / "__init__.py").write_text(code)


def test_an_interrupt_waits_for_the_import_of_a_library(cells: ddip.Group, libraries: Path) -> None:
    write_package(libraries, "slow_to_import", SLOW)
    with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
        cells.run("import slow_to_import\nwhile True: pass", timeout=30)
    cells.run("import slow_to_import; assert slow_to_import.whole and slow_to_import.part.value")


def test_an_interrupt_waits_for_an_import_in_an_async_cell(cells: ddip.Group, libraries: Path) -> None:
    write_package(libraries, "slow_to_import_too", SLOW)
    with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
        cells.run("import asyncio; await asyncio.sleep(0)\nimport slow_to_import_too\nwhile True: pass", timeout=30)
    cells.run("import slow_to_import_too; assert slow_to_import_too.whole and slow_to_import_too.part.value")


@pytest.mark.grid
def test_an_import_that_hangs_is_interrupted_with_an_explanation(cells: ddip.Group, libraries: Path) -> None:
    write_package(libraries, "hangs", HUNG)
    with pytest.raises(ddip.CellError, match="^ranks 0, 1: .* hangs .*%makedip"):
        cells.run("import hangs", timeout=30)


def test_an_import_of_ones_own_module_is_interrupted_at_once(cells: ddip.Group, tmp_path: Path) -> None:
    write_package(tmp_path, "own", HUNG)
    with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
        cells.run(f"import sys; sys.path.append({str(tmp_path)!r})\nimport own", timeout=30)


PRESS = """
import os, signal, sys, torch
class PressStop:
    def find_spec(self, name, *_):
        if name == "sympy.polys" and self in sys.meta_path:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, PressStop())
assert "sympy.polys" not in sys.modules, "or nothing is tried here"
"""
OPTIMIZE = """
parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
optimizer = torch.optim.SGD([parameter], lr=0.1)
optimizer.step()
"""


@pytest.mark.grid
def test_an_optimizer_works_after_the_first_one_was_interrupted() -> None:
    """Interrupt the first optimizer while it imports torch._dynamo and sympy."""
    with ddip.Group(2, spawn=True) as group:  # spawned ranks have not preloaded these modules
        with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
            group.run(f"{PRESS}{OPTIMIZE}\nwhile True: pass", timeout=60)
        group.run(f"{OPTIMIZE}\nassert parameter.item() < 1")


def test_a_silent_cell_sends_only_its_answer(cells: ddip.Group) -> None:
    client = cells.cluster.client  # type: ignore[attr-defined]
    message_types: list[str] = []
    original_handler = client._dispatch_iopub

    def count_messages(frames: list[zmq.Frame]) -> None:
        _, parts = client.session.feed_identities(frames, copy=False)
        message_types.append(json.loads(parts[1].bytes)["msg_type"])
        original_handler(frames)

    client._io_loop.add_callback(client._iopub_stream.on_recv, count_messages, copy=False)
    try:
        cells.run("x = 1")
        cells.run("print(rank)", show_ranks=[])
        assert message_types == []
        cells.run("print(rank)")
        assert message_types == ["stream", "status"]
    finally:
        client._io_loop.add_callback(client._iopub_stream.on_recv, original_handler, copy=False)


def test_flushed_output_is_sent_before_the_flush_returns(cells: ddip.Group) -> None:
    """A flush returns after the text is sent, because the rank may end then; ipykernel's returned earlier."""
    cells.run("""
        import sys
        thread, sent = sys.stdout.pub_thread, []
        class Socket:
            def send_multipart(self, *args, **options):
                sent.append(args)
                return socket.send_multipart(*args, **options)
            def __getattr__(self, name):
                return getattr(socket, name)
        socket, thread.socket = thread.socket, Socket()
        late = 0
        for i in range(100):
            print(i, flush=True)
            late += len(sent) < i + 1
        thread.socket = socket
    """)
    assert cells.pull(["late"]) == {"late": 0}


@pytest.mark.grid
def test_a_flush_waits_only_for_visible_output(cells: ddip.Group) -> None:
    """Only a rank whose output is shown waits in a flush.

    Otherwise a training loop that flushes each line would wait for the output thread at each step.
    """
    cells.run("""
        import sys, threading, time
        held, began = threading.Event(), time.monotonic()
        sys.stdout.pub_thread.schedule(lambda: held.wait(3))
        print("a line", flush=True)
        waited = time.monotonic() - began > 2
        held.set()
    """)
    assert [values["waited"] for values in cells.pull_all(["waited"], [0, 1])[0]] == [True, False]
