"""Processes suspended by a signal are alive: ddip names them, keeps them, and they continue."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

import ddip
from ddip.cluster.ipyparallel import launchers
from ddip.cluster.processes import preload_client
from ddip.errors import CellInterrupted, GroupError
from ddip.group.members.placement import Request

from .leftovers import controllers_of
from .meanwhile import StderrText, meanwhile, press_stop, suspended

PROOF = "import torch, torch.distributed as dist\ny = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"


@pytest.fixture(autouse=True)
def short_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for processes that do not answer."""
    for name in ("status.ANSWER_SECONDS", "group.STACK_SECONDS"):
        monkeypatch.setattr(f"ddip.group.{name}", 0.3)


LOST_BEFORE = 30
"""Missed heartbeats after which the controller would unregister an engine, if it did so."""


@pytest.mark.grid
def test_a_rank_that_misses_many_heartbeats_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "HEARTBEAT_MS", 20)
    with ddip.Group(2) as group:
        group.run("kept = rank")
        pid = group.members[1].pid
        with suspended([pid]):
            time.sleep(3 * LOST_BEFORE * 0.02)
            assert group.ranks.ended == []
            text = f"stopped (SIGSTOP); kill -CONT {pid} continues it"
            assert [info.state_text for info in group.info()] == ["idle", text]
            assert str(group.stacks()[1].place) == text  # type: ignore[union-attr]
        group.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "which", ["one rank", *(pytest.param(which, marks=pytest.mark.grid) for which in ("all ranks", "the controller"))]
)
def test_a_cell_names_suspended_processes_and_ends_when_continued(
    cells: ddip.Group, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.options.stall_timeout = 1
    cells.run("kept = rank")
    pids = [member.pid for member in cells.members]
    controller = controllers_of(os.getpid())[0].pid if which == "the controller" else 0
    those = {"one rank": pids[1:], "all ranks": pids, "the controller": [controller]}[which]
    text = "the controller is stopped (SIGSTOP)" if controller else f"rank 1: stopped (SIGSTOP); kill -CONT {pids[1]}"
    stderr_text = StderrText(capsys)
    with contextlib.ExitStack() as stack:
        stack.enter_context(suspended(those))
        thread = meanwhile(lambda: text in stderr_text.text(), stack.close)
        cells.run(f"{PROOF}\nassert kept == rank")
        thread.join()


@pytest.mark.grid
def test_a_repair_continues_a_suspended_controller_and_replaces_nothing(cells: ddip.Group) -> None:
    cells.run("kept = rank")
    with suspended([controllers_of(os.getpid())[0].pid]):
        thread = meanwhile(lambda: cells.lifecycle.parts.cells.active_on([0]), press_stop)
        with pytest.raises(
            CellInterrupted, match=r"the controller is stopped \(SIGSTOP\); kill -CONT \d+ continues it$"
        ):
            cells.run("pass")
        thread.join()
        assert cells.repair() == []
        cells.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.grid
def test_a_repair_continues_a_suspended_rank_of_an_abandoned_cell(cells: ddip.Group) -> None:
    cells.run("kept = rank")
    pid = cells.members[1].pid
    with suspended([pid]):
        thread = meanwhile(lambda: cells.info()[0].state_text.startswith("busy for"), press_stop)
        with pytest.raises(CellInterrupted, match=f"rank 1: .*kill -CONT {pid} "):
            cells.run("import torch.distributed as dist\ndist.barrier()")
        thread.join()
        with pytest.raises(GroupError, match="(?s)^rank 1 .*SIGSTOP"):
            cells.run("pass")
        assert cells.repair() == []
    assert cells.members[1].pid == pid
    cells.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.grid
@pytest.mark.skipif(not preload_client.can_fork(), reason="nothing is forked here")
def test_a_suspended_preload_process_is_named_or_replaced(cells: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cells.cluster._fork:
        pytest.skip("nothing is forked here")
    cells.run("kept = rank")
    warm = preload_client.ensure_process()
    with ddip.Group(1) as group:
        with suspended([warm.pid]), monkeypatch.context() as patch:
            patch.setattr(
                preload_client.PreloadProcess, "fits", lambda self: True
            )  # as if it had been suspended just now
            group.options.timeout = 1
            with pytest.raises(GroupError, match="preload process .*SIGSTOP"):
                group.change(Request(n=2))
        group.options.timeout = 60
        group.run("assert world_size == 1")
        warm = preload_client.ensure_process()
        with suspended([warm.pid]):
            assert preload_client.ensure_process() is not warm
            group.change(Request(n=2))
            group.run(PROOF)
    cells.run(f"{PROOF}\nassert kept == rank")
