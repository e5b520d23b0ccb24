"""Cells on scripted engines, from the first message to the last."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ddip.cluster.cluster_api import Message
from ddip.cluster.ipp_private import cell_reply
from ddip.errors import NONE_LEFT, REPAIR, BadInput, CellError, CellInterrupted, CellTimeout, GroupError
from ddip.group.members import ranks
from ddip.group.members.placement import Request
from ddip.output.cells.router import CellOutput
from ddip.protocol import on_rank

from .conftest import NewGroup
from .scripted import group_use, press_stop, press_stop_once, stream_message


def cell_by_rank(*lines: str) -> str:
    """Return a cell with one line per rank."""
    return "\n".join(f"{rank}: {line}" for rank, line in enumerate(lines))


def test_a_good_cell_shows_the_output_of_the_visible_ranks(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(3)
    group.run(cell_by_rank("print one", "print two", "print three"), show_ranks=[1])
    assert capsys.readouterr().out == "two\n"


def test_a_quiet_cell_shows_its_output_at_its_end(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    new_group().run("print here", quiet=True)
    assert capsys.readouterr().out == "here\n"


def test_a_cell_with_a_summary_says_where_it_ran(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    new_group().run("pass", tell=True)
    assert re.fullmatch(r"ranks 0, 1 · 0\.\d\d s\n", capsys.readouterr().out)


def test_errors_of_all_ranks_are_shown_earliest_first(new_group: NewGroup) -> None:
    with pytest.raises(CellError, match="^rank 1: .*; rank 2: ") as error:
        new_group(3).run(cell_by_rank("pass", "raise KeyError 'a'", "raise ValueError no"))
    assert {rank: found.name for rank, found in error.value.by_rank.items()} == {1: "KeyError", 2: "ValueError"}


def test_a_failed_rank_unblocks_waiting_ranks_and_causes_a_rebuild(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(3)
    with pytest.raises(CellError) as error:
        group.run(cell_by_rank("wait", "raise ValueError no", "wait"))
    by_rank = error.value.by_rank
    assert (by_rank[0].waited, by_rank[1].name, by_rank[2].waited) == ("all_reduce", "ValueError", "all_reduce")
    before = group.engine(0).calls.count(on_rank.join_group.target)
    group.run("print again")
    assert capsys.readouterr().out == "again\n"
    assert [group.engine(rank).calls.count(on_rank.join_group.target) for rank in range(3)] == [before + 1] * 3


def test_ranks_that_still_run_after_an_error_are_named(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(2)
    group.engine(1).answers[on_rank.main_thread_location.target] = press_stop_once(
        {"cell": 7, "line": 3, "source": "loop()"}
    )
    with pytest.raises(CellInterrupted):
        group.run(cell_by_rank("raise ValueError no", "sleep"))
    stderr = capsys.readouterr().err
    assert "rank 0: ValueError: no; rank 1 still runs, outside of collectives:" in stderr
    assert "rank 1: cell [7] line 3: loop()" in stderr


def test_the_stop_button_ends_sleeping_and_waiting_ranks(new_group: NewGroup) -> None:
    group = new_group(3)
    group.engine(2).answers[on_rank.main_thread_pulse.target] = press_stop_once([0, 0.0])
    with pytest.raises(CellInterrupted, match="^the cell was interrupted on ranks 0-2$") as error:
        group.run(cell_by_rank("wait", "sleep", "sleep"), show_ranks=[0, 1, 2])
    assert error.value.by_rank[0].waited == "all_reduce" and error.value.by_rank[1].name == "KeyboardInterrupt"
    group.run("pass")


def test_a_stop_at_the_end_is_not_lost(new_group: NewGroup) -> None:
    group = new_group(1)
    run = group.engine(0).run

    def press_at_the_end(*args: Any) -> None:
        run(*args)
        press_stop()

    group.engine(0).run = press_at_the_end  # type: ignore[method-assign]
    with pytest.raises(CellInterrupted):
        group.run("pass")


def test_a_cell_that_never_began_on_one_rank_fails(new_group: NewGroup, caplog: pytest.LogCaptureFixture) -> None:
    group = new_group(2)

    def reply_aborted(request: Any, *_: Any) -> None:
        request.set_result(cell_reply({"status": "aborted", "silent": True}))
        request.output.set_result(None)

    group.engine(1).run = reply_aborted  # type: ignore[method-assign]
    with pytest.raises(CellError) as error:
        group.run("pass")
    assert [(rank, found.name) for rank, found in error.value.by_rank.items()] == [(1, "KeyboardInterrupt")]
    assert caplog.text == ""


def test_a_finished_rank_is_not_reported_as_interrupted(new_group: NewGroup, impatient: None) -> None:
    group = new_group(2)
    group.engine(1).answers[on_rank.main_thread_pulse.target] = press_stop_once([0, 0.0])
    with pytest.raises(CellInterrupted, match="on rank 1\nrank 1 "):
        group.run(cell_by_rank("pass", "deaf"))


def test_a_rank_that_does_not_stop_is_named_until_repaired(new_group: NewGroup, impatient: None) -> None:
    group = new_group(2)
    text = r"(?s)longer than 0\.01 s and was stopped; the ranks were here:.*rank 1 did not stop:.*%makedip --repair"
    with pytest.raises(CellTimeout, match=text):
        group.run(cell_by_rank("pass", "deaf"), timeout=0.01)
    with pytest.raises(GroupError, match="(?s)^rank 1 .*cell:.*--repair"):
        group.run("pass")
    assert group.repair() == [1]
    group.run("pass")


def test_the_cause_of_missing_answers_replaces_the_advice(
    new_group: NewGroup, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, text = new_group(2), "the controller is stopped (SIGSTOP); kill -CONT 7 continues it"
    monkeypatch.setattr(group.cluster, "stopped", lambda: text)
    with pytest.raises(CellTimeout) as caught:
        group.run(cell_by_rank("pass", "deaf"), timeout=0.01)
    with pytest.raises(GroupError) as refused:
        group.run("pass")
    for error in (caught.value, refused.value):
        assert str(error).endswith(f"\n{text}")


def test_a_silent_host_is_not_waited_for(
    new_group: NewGroup, impatient: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group, asked = new_group(2), list[str]()
    host = group.cluster.hosts[0]
    monkeypatch.setattr(host, "name", "h2")
    monkeypatch.setattr(host, "silent", "h2 has sent nothing for 7 s")

    def never_answer(function: Callable[..., object], *args: object) -> Future[Any]:
        asked.append(function.__name__)
        return Future()

    monkeypatch.setattr(host, "begin", never_answer)
    monkeypatch.setattr(ranks, "LINK_SECONDS", 1000.0)
    with pytest.raises(CellTimeout):
        group.run(cell_by_rank("pass", "deaf"), timeout=0.01)
    with pytest.raises(GroupError):
        group.run("pass")
    assert "slow link" not in capsys.readouterr().err
    assert "stack_location" not in asked


def test_a_rank_that_stops_late_runs_the_next_cell(new_group: NewGroup, impatient: None) -> None:
    group = new_group(2)
    with pytest.raises(CellTimeout):
        group.run(cell_by_rank("pass", "deaf"), timeout=0.01)
    group.engine(1).end("KeyboardInterrupt")
    group.run("pass")


def test_a_stalled_cell_says_where_each_rank_waits(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(2, stall_timeout=0.02)
    group.engine(1).answers[on_rank.waiting_location.target] = press_stop_once(
        {"function": "all_reduce", "cell": 1, "line": 2, "collective": "in collective 7"}
    )
    with pytest.raises(CellInterrupted):
        group.run(cell_by_rank("pass", "wait"))
    stderr = capsys.readouterr().err
    assert "no rank has made progress for 0.02 s:\n  rank 0: finished\n  rank 1: all_reduce, cell [1] line 2" in stderr
    assert "\n    in collective 7\n" in stderr


def test_ranks_waiting_for_one_that_caught_its_error_are_unblocked(new_group: NewGroup) -> None:
    group = new_group(2)
    with pytest.raises(CellError) as error:
        group.run(cell_by_rank("catch ValueError caught", "wait"))
    assert error.value.by_rank[0].name == "ValueError" and error.value.by_rank[1].waited == "all_reduce"


def test_a_rank_that_cannot_be_unblocked_is_named(new_group: NewGroup, impatient: None) -> None:
    group = new_group(2)
    group.ranks.can_unblock = False
    with pytest.raises(CellError, match="^rank 0: .*\nrank 1 "):
        group.run(cell_by_rank("catch ValueError caught", "deaf"))


def test_a_dead_rank_shows_its_log_and_can_be_repaired(new_group: NewGroup) -> None:
    group = new_group(2)
    group.engine(0).names["kept"] = 1
    with pytest.raises(CellError) as error:
        group.run(cell_by_rank("wait", "die"))
    ended = error.value.by_rank[1]
    assert ended.name == "RankEnded" and "SIGKILL" in ended.message and "last words of engine 1" in ended.traceback
    with pytest.raises(GroupError, match="^rank 1: .*--repair"):
        group.run("pass")
    assert group.repair(["kept"], 0) == [1]
    assert group.pull(["kept"], 1) == {"kept": 1}


def test_if_all_ranks_die_the_error_promises_no_variables(new_group: NewGroup) -> None:
    group = new_group(3)
    left = f"; {re.escape(NONE_LEFT)}$"
    with pytest.raises(CellError, match=left):
        group.run(cell_by_rank("die", "die", "die"))
    wanted: list[Callable[[], object]] = [
        lambda: group.run("pass"),
        lambda: group.change(Request(n=2)),
        lambda: group.pull(["x"]),
    ]
    for want in wanted:
        with pytest.raises(GroupError, match=left):
            want()
    with pytest.raises(BadInput, match="^--from 0 x y: .*--repair"):
        group.repair(["x", "y"], 0)
    assert group.repair() == [0, 1, 2]


def test_after_two_deaths_the_third_rank_keeps_its_variables(new_group: NewGroup) -> None:
    group = new_group(3)
    with pytest.raises(CellError, match=f"; {re.escape(REPAIR)}$"):
        group.run(cell_by_rank("die", "pass", "die"))


def test_messages_without_an_end_do_not_hold_up_a_stop(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_group(1)
    engine = group.engine(0)
    begin, receive, shown = engine.run, CellOutput.receive, 0

    def begin_and_print(*args: Any) -> None:
        begin(*args)
        args[-1](stream_message("first"))

    def show_while_another_comes(self: CellOutput, rank: int, message: Message) -> None:
        nonlocal shown
        receive(self, rank, message)
        shown += 1
        if shown == 100:
            press_stop()
        if engine.running is not None and shown < 5000:
            engine.running[-1](message)

    monkeypatch.setattr(engine, "run", begin_and_print)
    monkeypatch.setattr(CellOutput, "receive", show_while_another_comes)
    with pytest.raises(CellInterrupted):
        group.run("sleep")
    assert 100 <= shown < 5000


def test_after_the_controller_ended_errors_do_not_suggest_a_repair(new_group: NewGroup) -> None:
    group = new_group(2)
    group.scripted.controller_ended = True
    assert group.ranks.repair_text.startswith("%makedip --repair")
    for member in group.members:
        group.scripted.end_engine(member.engine, -signal.SIGKILL)
    assert group.ranks.repair_text == "the controller process ended; %makedip -r restarts the group"


def test_a_cell_ends_when_the_controller_does(new_group: NewGroup) -> None:
    group = new_group(1)

    def end_controller() -> list[Any]:
        group.scripted.controller_ended = True
        return [0, 0.0]

    group.engine(0).answers[on_rank.main_thread_pulse.target] = end_controller
    with pytest.raises(GroupError, match="controller.*%makedip -r"):
        group.run("sleep")


def test_unequal_collectives_name_the_line_and_cause_a_rebuild(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(2)
    group.run(cell_by_rank("begin 1", "begin 2"))
    stderr = capsys.readouterr().err
    assert "the ranks have begun different numbers of collectives" in stderr and "cell [1] line 2" in stderr
    group.run(cell_by_rank("begin 1", "begin 1"))
    group.run(cell_by_rank("begin 1", "begin 2"), unmatched=True)
    group.run("pass")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("by_threads", [False, True])
def test_after_a_failure_only_threads_excuse_ranks_out_of_step(new_group: NewGroup, by_threads: bool) -> None:
    group = new_group(2)
    for rank, number in enumerate((2, 1)):
        used = group_use(number)
        used.update(by_main=False, may_begin="maybe", by_threads=by_threads)
        group.engine(rank).begun = {"default cpu": used}
    before = group.engine(0).calls.count(on_rank.join_group.target)
    with pytest.raises(CellError):
        group.run("raise ValueError")
    group.run("pass")
    assert group.engine(0).calls.count(on_rank.join_group.target) == before + (not by_threads)


def test_an_incomplete_report_of_a_rank_is_mentioned(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(1)
    run = group.engine(0).run

    def run_with_fault(request: Any, *args: Any) -> None:
        request.add_done_callback(lambda done: done.result().report.update(fault="OSError: no"))
        run(request, *args)

    group.engine(0).run = run_with_fault  # type: ignore[method-assign]
    group.run("pass")
    assert "rank 0 cannot check its process group (OSError: no" in (capsys.readouterr().err)


def test_help_requested_by_a_cell_is_shown_once(new_group: NewGroup) -> None:
    new_group(2).run("help of a model")  # no notebook shows it here


def wait_until_shown(capsys: pytest.CaptureFixture[str], text: str) -> bool:
    """Wait until exactly `text` has been shown."""
    shown = ""
    end = time.monotonic() + 60
    while len(shown) < len(text) and time.monotonic() < end:
        shown += capsys.readouterr().out
        time.sleep(0.001)
    return shown == text


def test_late_output_is_shown_only_for_recent_cells(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(1)
    for _ in range(25):
        group.run("pass")
    listeners = list(group.scripted.listeners.values())
    assert len(listeners) == 20
    listeners[-1](stream_message("late"))
    assert wait_until_shown(capsys, "late\n")


def test_a_slow_page_does_not_block_the_message_thread(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal may have paused its reader: replies of all ranks arrive on the same thread."""
    group, finish, still_blocked = new_group(1), CellOutput.finish, list[bool]()

    def finish_while_another_comes(self: CellOutput, *args: Any) -> frozenset[int]:
        listener = list(group.scripted.listeners.values())[-1]
        thread = threading.Thread(target=listener, args=(stream_message("meanwhile"),))
        thread.start()
        thread.join(60)
        still_blocked.append(thread.is_alive())
        return finish(self, *args)

    monkeypatch.setattr(CellOutput, "finish", finish_while_another_comes)
    group.run("print first")
    assert still_blocked == [False]
    assert wait_until_shown(capsys, "first\nmeanwhile\n")


def test_a_cell_whose_thread_cannot_start_has_ended(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_group(2)

    def refuse_thread(self: threading.Thread) -> None:
        raise RuntimeError("no more threads")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no more threads"):
        patch.setattr(threading.Thread, "start", refuse_thread)
        group.start("print x")
    assert [one.state for one in group.history] == ["ended"]
    group.run("pass")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": [0, 9]}, "rank 9"),
        ({"ranks": []}, r"ranks=\[\]"),
        ({"show_ranks": [2]}, "rank 2"),
    ],
)
def test_unknown_ranks_are_refused_before_any_code_runs(
    new_group: NewGroup, options: dict[str, Any], text: str
) -> None:
    group = new_group(2)
    with pytest.raises(BadInput, match=text):
        group.run("die", **options)
    assert group.ranks.live == [0, 1]


def test_a_cell_runs_on_the_requested_ranks(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(3)
    group.run("print x", ranks=[1, 2], show_ranks=[0, 1, 2])
    assert capsys.readouterr().out.count("x") == 2


def test_an_interrupt_without_a_cell_reaches_the_chosen_ranks(new_group: NewGroup) -> None:
    group = new_group(2)
    group.interrupt()
    group.interrupt([1])
    assert group.scripted.interrupted == [0, 1, 1]
