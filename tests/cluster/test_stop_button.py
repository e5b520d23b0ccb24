"""The stop button while ddip itself waits for ranks: ranks are freed, or named with what they do."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import ddip
from ddip.errors import CellInterrupted, GroupError, RequestInterrupted
from ddip.group.members.placement import Request
from ddip.protocol import on_rank

from .apps import installed_app
from .changes import prove_stopped_changes
from .leftovers import wait_until
from .meanwhile import meanwhile, press_stop, suspended

PROOF = "import torch, torch.distributed as dist\ny = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"
SLOW = """
def wait(folder, deaf):
    import os, pathlib, time
    folder = pathlib.Path(folder)
    while True:
        try:
            (folder / os.environ.get("RANK", "here")).touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
            return
        except KeyboardInterrupt:
            if os.environ.get("RANK") not in deaf:
                raise
class Slow:
    def __init__(self, folder, deaf=()):
        self.args = (folder, deaf)
    def __reduce__(self):
        return wait, self.args
"""
SLOW_THERE = SLOW.replace("return wait, self.args", "return wait(*self.args)")


def slow_object(folder: Path, deaf: tuple[str, ...] = ()) -> Any:
    """Return an object whose unpickling takes until `folder` contains the file "go".

    It cannot be interrupted on the ranks in `deaf`.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SLOW, namespace)
    return namespace["Slow"](str(folder), deaf)


def has_begun(folder: Path, *ranks: int) -> Callable[[], bool]:
    return lambda: all((folder / str(rank)).exists() for rank in ranks)


def test_a_stopped_push_frees_the_ranks_and_leaves_nothing(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("kept = rank")
    thread = meanwhile(has_begun(tmp_path, 0, 1), press_stop)
    with pytest.raises(RequestInterrupted, match="ranks 0, 1$") as caught:
        cells.push({"fine": 1, "slow": slow_object(tmp_path)})
    thread.join()
    assert caught.value._render_traceback_() == [f"KeyboardInterrupt: {caught.value}"]
    wait_until(lambda: [info.state_text for info in cells.info()] == ["idle", "idle"])
    cells.run(f"{PROOF}\nassert kept == rank and 'fine' not in globals() and 'slow' not in globals()")


@pytest.mark.grid
def test_a_rank_that_does_not_stop_unpickling_is_named(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("import torch.distributed as dist\nkept, former = rank, dist.group.WORLD")
    thread = meanwhile(has_begun(tmp_path, 0, 1), press_stop)
    with pytest.raises(RequestInterrupted, match=r"(?s)ranks 0, 1\nrank 1 .*--repair"):
        cells.push({"slow": slow_object(tmp_path, deaf=("1",))})
    thread.join()
    infos = cells.info()
    assert [(info.state, info.doing) for info in infos] == [("idle", ""), ("busy", "pushing")]
    assert infos[1].state_text.startswith("busy, pushing for ")
    assert cells.stacks()[1].place.state == "busy"  # type: ignore[union-attr]
    wait_until(lambda: "wait" in str(cells.stacks()[1].place))  # type: ignore[union-attr]  # or the rank checks for the file
    with pytest.raises(GroupError, match="^rank 1 .*pushing"):
        cells.run("pass")
    (tmp_path / "go").touch()
    wait_until(lambda: cells.info()[1].state == "idle")
    cells.run(f"assert dist.group.WORLD is former\n{PROOF}\nassert kept == rank and 'slow' not in globals()")


@pytest.mark.grid
def test_a_rank_that_does_not_stop_pulling_is_replaced(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run(f"{SLOW_THERE}\nkept, slow = rank, Slow({str(tmp_path)!r}, {('0',)!r})")
    thread = meanwhile(has_begun(tmp_path, 0, 1), press_stop)
    with pytest.raises(RequestInterrupted, match="\nrank 0 "):
        cells.pull_all(["slow"], [0, 1])
    thread.join()
    assert cells.repair() == [0]
    cells.run(f"{PROOF}\nassert rank == 0 or kept == 1")


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_a_push_does_not_wait_to_free_replaced_objects(cells: ddip.Group, tmp_path: Path) -> None:
    """The former object is freed once all ranks have the new one, which may take forever."""
    cells.run(
        f"{SLOW_THERE}\nSlow.__del__ = lambda self: wait(*self.args)\n"
        f"kept, thing = rank, Slow({str(tmp_path)!r}) if rank else 0"
    )
    cells.push({"thing": "new"})
    wait_until(has_begun(tmp_path, 1))
    waits = lambda: "releasing objects" in str(cells.stacks()[1].place)  # type: ignore[union-attr] # noqa: E731
    thread = meanwhile(waits, press_stop)
    with pytest.raises(CellInterrupted):
        cells.run("import torch.distributed as dist; dist.barrier()")
    thread.join()
    cells.run(f"{PROOF}\nassert kept == rank and thing == 'new'")


def test_a_tab_request_does_not_delay_the_next_cell(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run(f"{SLOW}\nclass Odd:\n    def __dir__(self): return wait({str(tmp_path)!r}, ())\nodd = Odd()")
    assert cells.try_call(on_rank.complete_code("odd.", 4), 0.1) is None
    wait_until(has_begun(tmp_path, 0))
    cells.run(PROOF, timeout=60)


@pytest.mark.parametrize("ask", ["stacks", "info"])
def test_a_stop_ends_questions_to_the_ranks(cells: ddip.Group, ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"stacks": "group.STACK_SECONDS", "info": "status.ANSWER_SECONDS"}[ask]
    monkeypatch.setattr(f"ddip.group.{seconds}", 1000)
    with suspended([cells.members[1].pid]):  # the rank will not answer
        thread = meanwhile(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler, press_stop)
        with pytest.raises(RequestInterrupted):
            getattr(cells, ask)()
    thread.join()
    cells.run(PROOF)


APP = f"""
import os
state = "new"
def prepare():
    global state
    wait(os.environ["APP_FOLDER"] + "/prepare", ())
    state = "prepared"
def command(text):
    wait(os.environ["APP_FOLDER"] + "/command", ())
{SLOW}
"""


@pytest.mark.grid
def test_a_stopped_app_action_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prepare", "command"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("APP_FOLDER", str(tmp_path))
    (tmp_path / "app").mkdir()
    with installed_app(tmp_path / "app", APP), ddip.Group(2) as group:
        group.run("kept = rank")
        thread = meanwhile(has_begun(tmp_path / "prepare", 0, 1), press_stop)
        with pytest.raises(RequestInterrupted, match="preparing .*ranks 0, 1"):
            group.change(Request(app="toy"))
        thread.join()
        (tmp_path / "prepare" / "go").touch()
        group.run(f"{PROOF}\nimport toy_app\nassert toy_app.state == 'prepared' and kept == rank")
        thread = meanwhile(has_begun(tmp_path / "command", 0, 1), press_stop)
        with pytest.raises(RequestInterrupted, match="command .*ranks 0, 1$"):
            group.command("go")
        thread.join()
        group.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.grid)])
# A stop may come while a generator is finalized
@pytest.mark.grid(in_ci=True)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stopped_change_ends_unchanged_or_complete(size: int) -> None:
    prove_stopped_changes(2, size, (0.05, 0.5, 0.75, 0.9, 0.99))


TAKEN_APART_SLOWLY = """
import time, torch.distributed as dist
class Loader:
    def __del__(self):
        open(f"{folder}/{{rank}}", "w").close()
        time.sleep(3)
"""


LEAVES_A_FILE = """
from ddip.rank.process_group import membership as process_group
leave = process_group.leave_group
def leave_and_tell():
    going = leave()
    if rank == 0: open(f"{folder}/left", "w").close()
    return going
process_group.leave_group = leave_and_tell
"""


@pytest.mark.grid
def test_the_next_cell_waits_for_a_slow_cleanup(cells: ddip.Group, tmp_path: Path) -> None:
    """Free a data loader: torch waits 5 s for each of its workers."""
    cells.run(TAKEN_APART_SLOWLY.format(folder=tmp_path))
    cells.run(LEAVES_A_FILE.format(folder=tmp_path))
    with pytest.raises(ddip.CellError):
        cells.run("""
            import gc
            gc.disable()  # otherwise Python may free it within the cell
            if rank == 0: raise ValueError
            loader = Loader(); loader.me = loader; del loader
            dist.barrier()
        """)
    wait_until(has_begun(tmp_path, 1))  # the collection may start late
    first = psutil.Process(cells.members[0].pid)
    rest = (tmp_path / "left").exists, lambda: first.status() == psutil.STATUS_SLEEPING
    thread = meanwhile(lambda: all(is_so() for is_so in rest), press_stop)
    with pytest.raises(RequestInterrupted, match="\nrank 1 "):
        cells.run("pass")
    thread.join()
    cells.run(f"gc.enable(); process_group.leave_group = leave\n{PROOF}")
