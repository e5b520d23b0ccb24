"""Third-party apps are notified of a rebuilt group, and of cells, if they ask for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip
from ddip.errors import CellError, CellInterrupted

from .apps import installed_app
from .leftovers import wait_until
from .meanwhile import meanwhile, press_stop

APP = """
import torch.distributed as dist
calls = []
def prepare(): calls.append("prepare")
def release(): calls.append("release")
def rejoined():
    global pair
    calls.append("rejoined")
    pair = dist.new_group(list(range(dist.get_world_size())))
"""
FAIL = "import torch.distributed as dist\nif rank == 0: raise ValueError('mine')\ndist.barrier()"
USE = "import torch, torch.distributed as dist, toy_app\nx = torch.ones(1)\ndist.all_reduce(x, group=toy_app.pair)"


CELLS = """
import os, time
def begin_cell():
    print("begins")
    waits = os.environ["TOY_APP"] + "/waits"
    if os.path.exists(waits):
        open(waits + os.environ["RANK"], "w").close()
        while True: time.sleep(0.01)
def end_cell(error): print("ended", repr(error))
"""


@pytest.fixture(scope="module")
def app_group_and_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ddip.Group, Path]]:
    """Start two ranks with an app that asks for all notifications; yield the group and the app's folder."""
    folder = tmp_path_factory.mktemp("app")
    with installed_app(folder, APP + CELLS), ddip.Group(2, app="toy", failure_grace=0.1) as group:
        yield group, folder


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ddip.Group]:
    with installed_app(tmp_path, APP), ddip.Group(2, app="toy", failure_grace=0.1) as group:
        yield group


def app_calls(group: ddip.Group) -> list[list[str]]:
    """Return the calls that the app received, by rank."""
    group.run("import toy_app; _calls = toy_app.calls")
    return [found["_calls"] for found in group.pull_all(["_calls"], range(group.world_size))[0]]


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
def test_an_app_is_notified_after_an_aborted_collective(app_group_and_folder: tuple[ddip.Group, Path]) -> None:
    group, _ = app_group_and_folder
    assert app_calls(group) == [["prepare"]] * 2
    for count in (1, 2):
        with pytest.raises(CellError, match="mine"):
            group.run(FAIL)
        assert app_calls(group) == [["prepare", *["rejoined"] * count]] * 2
        group.run(f"{USE}\nassert x.item() == 2")
    assert app_calls(group) == [["prepare", "rejoined", "rejoined"]] * 2  # and not before each cell


@pytest.mark.grid
def test_a_new_rank_prepares_the_app_before_ranks_are_notified(group: ddip.Group) -> None:
    os.kill(group.members[1].pid, signal.SIGKILL)
    wait_until(lambda: group.ranks.ended)
    assert group.repair() == [1]
    assert app_calls(group) == [["prepare", "rejoined"]] * 2
    group.run(f"{USE}\nassert x.item() == 2")


@pytest.mark.grid
def test_an_app_is_notified_of_a_group_formed_by_cells(group: ddip.Group) -> None:
    group.run("import torch.distributed as dist\ndist.destroy_process_group()\ndist.init_process_group('gloo')")
    assert app_calls(group) == [["prepare", "rejoined"]] * 2
    group.run(f"{USE}\nassert x.item() == 2")


@pytest.mark.grid
def test_a_change_of_the_group_releases_and_prepares_the_app(group: ddip.Group) -> None:
    group.change(ddip.Request(n=3))
    assert app_calls(group) == [["prepare", "release", "prepare"]] * 2 + [["prepare"]]


FAILS = """
def rejoined():
    calls.append("rejoined")
    if dist.get_rank() == 1: raise OSError("no way")
    dist.barrier()
"""


@pytest.mark.grid
def test_an_error_in_an_app_notification_leaves_the_group_usable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with installed_app(tmp_path, APP + FAILS), ddip.Group(2, app="toy", failure_grace=0.1) as group:
        with pytest.raises(CellError, match="mine"):
            group.run(FAIL)
        capsys.readouterr()
        assert app_calls(group) == [["prepare", "rejoined"]] * 2
        stderr = capsys.readouterr().err
        assert "notifying the app of the rebuilt group failed: rank 1: OSError: no way" in stderr
        group.run("import torch\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2")
        assert app_calls(group) == [["prepare", "rejoined"]] * 2
        assert capsys.readouterr().err == ""


def test_an_app_is_called_around_cells(
    app_group_and_folder: tuple[ddip.Group, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    group, folder = app_group_and_folder
    group.run("print('runs')", show_ranks=[0])
    assert capsys.readouterr().out == "begins\nruns\nended None\n"
    with pytest.raises(CellError, match="mine"):
        group.run("raise ValueError('mine')", show_ranks=[0])
    assert capsys.readouterr().out == "begins\nended ValueError('mine')\n"
    (folder / "waits").touch()
    thread = meanwhile(lambda: len(list(folder.glob("waits?"))) == 2, press_stop)
    with pytest.raises(CellInterrupted):
        group.run("print('runs')", show_ranks=[0])
    thread.join()
    assert capsys.readouterr().out == "begins\n"
    (folder / "waits").unlink()
    group.change(ddip.Request(n=1))
    group.run("print('runs')")
    assert capsys.readouterr().out == "begins\nruns\nended None\n"


@pytest.mark.grid
def test_an_error_of_an_app_around_cells_fails_no_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "def begin_cell(): raise OSError('no way')\ndef end_cell(error): 1 / 0\n"
    with installed_app(tmp_path, code), ddip.Group(2, app="toy") as group:
        group.run("print('runs')", show_ranks=[0])
        shown = capsys.readouterr()
        assert shown.out == "runs\n"
        for text in ("begin_cell() of the app toy_app failed:", "OSError: no way", "end_cell()", "ZeroDivisionError"):
            assert text in shown.err


@pytest.mark.grid
def test_apps_without_hooks_cost_no_calls(group: ddip.Group) -> None:
    group.run("from ddip.rank.kernel import app_hooks as apps\nassert apps.before is apps.after is None")


@pytest.mark.grid
def test_an_app_can_request_a_rebuild_after_a_cell(tmp_path: Path) -> None:
    app = (
        APP
        + """
def end_cell(error):
    from ddip.rank.process_group import membership as process_group
    if error is not None and dist.get_rank() == 1: process_group.give_up()
"""
    )
    with installed_app(tmp_path, app), ddip.Group(2, app="toy", failure_grace=0.1) as group:
        group.run("x = 1")
        with pytest.raises(CellError, match="mine"):
            group.run("raise ValueError('mine')")
        assert app_calls(group) == [["prepare", "rejoined"]] * 2
        assert app_calls(group) == [["prepare", "rejoined"]] * 2  # once


@pytest.mark.grid(in_ci=True)
def test_states_of_ranks_with_other_memory_formats_become_equal(group: ddip.Group) -> None:
    """Names of entries may contain dots."""
    group.run("""
        import torch
        from ddip.apps.hf import living
        formats = [torch.channels_last, torch.contiguous_format]
        first = torch.arange(24.0).view(2, 3, 2, 2)
        class Stateful:
            mine = (first * (1 - rank)).contiguous(memory_format=formats[rank])
            def state_dict(self): return {"a": {"b": self.mine, "c": 1 - rank}, "a.b": self.mine + 1, "d": lambda: rank}
            def load_state_dict(self, state): self.state = state
        stateful = Stateful()
        living._share_state(stateful, living._take_apart(stateful.state_dict()))
        if rank == 1:
            state = stateful.state
            assert torch.equal(state["a"]["b"], first) and torch.equal(state["a.b"], first + 1)
            assert state["a"]["c"] == 1 and state["d"]() == 1
    """)
