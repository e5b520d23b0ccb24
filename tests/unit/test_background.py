"""Background cells on scripted engines."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from ddip.errors import BadInput, CellError, CellInterrupted, CellTimeout, GroupError
from ddip.group.cells.cell import Cell
from ddip.group.cells.history import KEPT, History
from ddip.output.cells.router import CellOutput

from .conftest import NewGroup
from .scripted import group_use


def wait_for_end(cell: Cell) -> Cell:
    """Wait until a cell has ended in any way, and return it."""
    cell.done.result(timeout=10)
    return cell


def test_a_background_cell_returns_at_once_and_runs_until_stopped(new_group: NewGroup) -> None:
    group = new_group(2)
    cell = group.start("sleep")
    assert (cell.state, cell.outcome, cell.done.done()) == ("running", None, False)
    cell.stop()
    assert (cell.state, cell.outcome) == ("ended", "interrupted")
    group.run("pass")
    assert [known.outcome for known in group.cells] == ["interrupted", "ok"]


def test_each_wait_raises_the_error_of_the_cell(new_group: NewGroup) -> None:
    cell = new_group(2).start("1: raise ValueError no")
    for _ in range(2):
        with pytest.raises(CellError) as caught:
            cell.wait()
        assert caught.value.by_rank[1].name == "ValueError"
    assert cell.outcome == "user_error"
    assert cell.errors[1].name == "ValueError"


def test_a_wait_with_a_timeout_returns_whether_the_cell_ended(new_group: NewGroup) -> None:
    cell = new_group(2).start("sleep")
    assert cell.wait(0.01) is False
    cell.stop()


@pytest.mark.parametrize("what", ["run", "push", "pull", "change", "repair", "shards"])
def test_an_error_about_a_busy_rank_names_the_running_cell(new_group: NewGroup, what: str) -> None:
    group = new_group(2)
    cell = group.start("sleep", ranks=[1])
    calls: dict[str, Any] = {
        "run": lambda: group.run("pass"),
        "push": lambda: group.push({"a": 1}),
        "pull": lambda: group.pull(["a"], 1),
        "change": lambda: group.change(type(group.request)(3)),
        "repair": group.repair,
        "shards": lambda: group.shards("model"),
    }
    number = cell.number
    with pytest.raises(GroupError, match=rf"cell {number} runs on rank 1.*\(sleep\).*%dipwait {number} .*%dipstop"):
        calls[what]()
    cell.stop()


def test_free_ranks_run_other_cells_and_receive_objects(new_group: NewGroup) -> None:
    group = new_group(3)
    cell = group.start("sleep", ranks=[2])
    group.run("pass", ranks=[0, 1])
    group.push({"a": 1}, [0])
    assert group.pull(["a"], 0) == {"a": 1}
    cell.stop()


def test_a_queued_cell_is_skipped_after_a_stopped_one(new_group: NewGroup) -> None:
    group = new_group(2)
    first, second = group.start("sleep"), group.start("pass", queue=True)
    other = group.start("pass", queue=True)
    assert second.state == other.state == "queued"
    first.press_stop()
    assert [wait_for_end(cell).outcome for cell in (first, second, other)] == ["interrupted", "not_run", "not_run"]
    with pytest.raises(GroupError, match="cell 2 did not run: .* cell 1, "):
        second.wait()
    assert wait_for_end(group.start("pass", queue=True)).outcome == "ok"


def test_a_queued_cell_runs_after_a_good_one(new_group: NewGroup) -> None:
    group = new_group(2)
    first = group.start("wait")
    second = group.start("pass", queue=True)
    for rank in range(2):
        group.engine(rank).end()
    assert wait_for_end(first).outcome == wait_for_end(second).outcome == "ok"


def test_the_timeout_of_a_queued_cell_begins_with_the_cell(new_group: NewGroup) -> None:
    group = new_group(2)
    first, second = group.start("wait"), group.start("pass", queue=True, timeout=0.5)
    time.sleep(0.6)
    for rank in range(2):
        group.engine(rank).end()
    assert wait_for_end(first).outcome == wait_for_end(second).outcome == "ok"


def test_a_queued_cell_is_stopped_before_it_begins(new_group: NewGroup) -> None:
    group = new_group(2)
    first, second = group.start("sleep"), group.start("pass", queue=True)
    second.stop()
    assert (second.outcome, first.done.done()) == ("not_run", False)
    first.stop()


def test_a_failure_unblocks_only_the_ranks_of_its_cell(new_group: NewGroup) -> None:
    group = new_group(4)
    cell = group.start("wait", ranks=[2, 3])
    with pytest.raises(CellError) as caught:
        group.run("0: raise ValueError no\n1: wait", ranks=[0, 1])
    assert caught.value.by_rank[0].name == "ValueError" and caught.value.by_rank[1].waited == "all_reduce"
    assert not cell.done.done()
    with pytest.raises(GroupError, match="cell 1 .*ranks 2, 3 .*; .*rebuilt"):
        group.run("pass", ranks=[0, 1])
    for rank in (2, 3):
        group.engine(rank).end()
    assert wait_for_end(cell).outcome == "ok"
    group.run("pass")


def test_steps_are_compared_after_the_last_running_cell_ends(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(2)
    cell = group.start("sleep", ranks=[1])
    group.run("begin 1", ranks=[0])
    assert "different numbers" not in capsys.readouterr().err
    group.engine(1).begun = {"default cpu": group_use(1)}
    group.engine(1).end()
    wait_for_end(cell)
    group.run("pass")
    assert "different numbers" not in capsys.readouterr().err


def test_a_dead_rank_ends_its_cell_before_a_repair_starts(new_group: NewGroup) -> None:
    group = new_group(2)
    cell = group.start("0: wait\n1: wait")
    group.cluster.end_engine(group.members[1].engine, -9)  # type: ignore[attr-defined]
    assert group.repair() == [1]
    assert (wait_for_end(cell).outcome, cell.errors[0].waited) == ("rank_died", "all_reduce")
    group.run("pass")


def test_a_timeout_also_ends_a_background_cell(new_group: NewGroup) -> None:
    cell = new_group(2).start("sleep", timeout=0.05)
    with pytest.raises(CellTimeout):
        cell.wait()
    assert cell.outcome == "timeout"


def test_a_rank_that_does_not_stop_is_named(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddip.group.cells.cell_state.STOP_SECONDS", 0.05)
    cell = new_group(2).start("1: deaf")
    with pytest.raises(GroupError, match="\nrank 1 "):
        cell.stop()
    assert cell.outcome == "stuck"


def test_the_end_of_the_group_ends_its_cells(new_group: NewGroup) -> None:
    group = new_group(2)
    running, queued = group.start("sleep"), group.start("pass", queue=True)
    group.shutdown()
    with pytest.raises(GroupError, match="%makedip -k"):
        running.wait()
    assert (running.outcome, wait_for_end(queued).outcome) == ("rank_died", "not_run")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ddip cell")]


def test_the_end_of_the_controller_ends_a_cell(new_group: NewGroup) -> None:
    group = new_group(2)
    cell = group.start("sleep")
    group.cluster.controller_ended = True  # type: ignore[attr-defined]
    with pytest.raises(GroupError, match="controller.*%makedip -r"):
        cell.wait()
    group.cluster.controller_ended = False  # type: ignore[attr-defined]


def test_a_request_waiting_for_free_ranks_runs_once_they_are(new_group: NewGroup) -> None:
    group = new_group(2)
    cell = group.start("sleep", timeout=0.05)
    with pytest.raises(GroupError, match="cell 1, .*%dipwait 1 "):
        group.wait_until_free([0])
    assert cell.done.done() and cell.outcome == "timeout"
    group.wait_until_free()


def test_an_unknown_cell_number_is_not_found(new_group: NewGroup) -> None:
    group = new_group(2)
    with pytest.raises(BadInput, match="^3: .*none$"):
        group.cell(3)
    group.run("pass")
    assert group.cell(1) is group.cells[0]
    with pytest.raises(BadInput, match="^3: .* 1$"):
        group.cell(3)


def test_an_unwritable_log_is_refused_before_the_cell_runs(new_group: NewGroup, tmp_path: Any) -> None:
    group = new_group(2)
    for typed, why in [(f"{tmp_path}/no/train", f"{tmp_path}/no;"), (f"{tmp_path}", f"{tmp_path}/train$")]:
        with pytest.raises(BadInput, match=why):
            group.run("pass", log=typed)
    assert group.cells == []


def test_the_history_keeps_cells_of_former_groups(new_group: NewGroup) -> None:
    history = History()
    new_group(2, history=history).run("pass")
    group = new_group(2, history=history)
    with pytest.raises(CellInterrupted):
        cell = group.start("sleep")
        cell.stop()
        cell.wait()
    assert [known.outcome for known in group.cells] == ["ok", "interrupted"]


def test_a_queued_cell_is_skipped_if_the_previous_cell_failed(new_group: NewGroup) -> None:
    group = new_group(2)
    first = group.start("sleep")
    threading.settrace(lambda *_: first.done.result(timeout=10))  # the first call of each new thread
    try:
        queued = group.start("pass", queue=True)
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    first.stop()
    assert wait_for_end(queued).outcome == "not_run"


def test_a_running_cell_stays_in_the_history_despite_many_others(new_group: NewGroup) -> None:
    group = new_group(2)
    long = group.start("sleep", ranks=[1])
    for _ in range(KEPT + 5):
        group.history.add(ended_cell())
    assert group.cell(long.number) is long
    assert len(group.cells) == KEPT
    long.stop()


def ended_cell() -> Cell:
    """Return a cell of which only its end is known."""
    cell = Cell(-1, (0,), "pass", CellOutput([0]))
    cell.end(None)
    cell.done.set_result(None)
    return cell


def test_a_stop_ends_a_cell_immediately_after_its_registration(new_group: NewGroup) -> None:
    """Press stop after the ranks are busy with the cell and before anyone waits for it."""
    group = new_group(2)

    class PressesStop(History):
        def add(self, cell: Cell) -> None:
            super().add(cell)
            signal.raise_signal(signal.SIGINT)

    group.history = group.lifecycle.parts.cells.history = PressesStop()
    with pytest.raises(CellInterrupted):
        group.run("sleep")
    wait_for_end(group.start("sleep"))
    group.lifecycle.parts.cells.history = History()
    group.run("pass")


def test_a_cell_number_used_twice_finds_the_running_cell(new_group: NewGroup) -> None:
    group = new_group(2)
    cell = group.start("sleep", ranks=[0])
    other = wait_for_end(group.start("pass", ranks=[1]))
    other.number = cell.number  # as if one cell of the notebook had started both
    assert group.cell(cell.number) is cell
    cell.stop()
    assert group.cell(cell.number) is other
