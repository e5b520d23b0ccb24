"""The decision which paths a fault has broken, without processes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from ddip.errors import CellError, RequestFailed
from ddip.group.cells import cells
from ddip.group.cells.differences import Difference, Findings, broken_paths, fault_text
from ddip.group.members import ranks
from ddip.protocol import on_rank
from ddip.protocol.reports import Compared, IterationReport, IterationReset

from .conftest import NewGroup
from .scripted import Silence

PATH, OTHER = 11, 12
WITHIN = IterationReport(forward=True, unfinished=False, in_step=False, backwards=0, steps=0, in_thread=False)


def pack_rows(rows: dict[int, tuple[int, int]]) -> bytes:
    numbers = array("Q")
    for path, (value, version) in rows.items():
        numbers.extend((path, value, version))
    return numbers.tobytes()


def compared(now: tuple[int, int] | None, good: tuple[int, int] | None, former: tuple[int, int] | None) -> Compared:
    """Return the state of one rank with one path besides `OTHER`; None if the path did not exist."""
    rows = [{OTHER: (1, 0)} | ({} if row is None else {PATH: row}) for row in (now, good, former)]
    return {
        "now": pack_rows(rows[0]),
        "good": pack_rows(rows[1]),
        "former": pack_rows(rows[2]),
        "has_history": True,
        "at_rest": [],
        "is_cut": False,
    }


def number_entry(number: int) -> tuple[int, int]:
    """Return the entry of a plain number, which has no version."""
    return number, 0


BROKEN = {
    "a counter": (
        [number_entry(3), number_entry(2)],
        [number_entry(2), number_entry(2)],
        [number_entry(1), number_entry(1)],
    ),
    "a tensor's values": ([(5, 3), (4, 3)], [(2, 2), (2, 2)], [(1, 1), (1, 1)]),
    "a tensor whose values were not known, written to once less": ([(5, 3), (4, 2)], [(0, 2), (0, 2)], None),
    "a shard, written to once less": ([(5, 3), (4, 2)], [(7, 2), (8, 2)], [(7, 1), (8, 1)]),
    "what one rank has lost": (
        [number_entry(3), None],
        [number_entry(2), number_entry(2)],
        [number_entry(2), number_entry(2)],
    ),
}
BY_DESIGN = {
    "equal": (
        [number_entry(3), number_entry(3)],
        [number_entry(2), number_entry(2)],
        [number_entry(1), number_entry(1)],
    ),
    "different after the last good cell": (
        [number_entry(3), number_entry(2)],
        [number_entry(2), number_entry(1)],
        [number_entry(1), number_entry(1)],
    ),
    "a shard, written to equally often": ([(5, 3), (4, 3)], [(7, 2), (8, 2)], [(7, 1), (8, 1)]),
    "a tensor whose values were not known": ([(5, 3), (4, 3)], [(0, 2), (0, 2)], [(0, 1), (0, 1)]),
    "one whose values are equal again": ([(5, 3), (5, 2)], [(2, 2), (2, 2)], [(1, 1), (1, 1)]),
}


@pytest.mark.parametrize("kind", [*BROKEN, *BY_DESIGN])
def test_a_new_difference_counts_as_broken(kind: str) -> None:
    now, good, former = {**BROKEN, **BY_DESIGN}[kind]
    reports = [compared(now[rank], good[rank], None if former is None else former[rank]) for rank in (0, 1)]
    broken, _, first = broken_paths(reports)
    assert (broken, first) == ([PATH] if kind in BROKEN else [], False)


def test_a_value_no_good_cell_had_counts_as_new() -> None:
    reports = [compared(number_entry(3 + rank), None, None) for rank in (0, 1)]
    assert broken_paths(reports)[:2] == ([], {PATH: "new"})


def test_values_only_equal_after_the_last_cell_are_listed_separately() -> None:
    """Equality after one good cell is evidence for a counter; a loss may be equal by chance."""
    reports = [compared(number_entry(3 + rank), number_entry(2), number_entry(rank)) for rank in (0, 1)]
    assert broken_paths(reports)[:2] == ([], {PATH: "settled"})


def test_a_new_rank_does_not_break_values_by_lacking_them() -> None:
    new = compared(None, None, None) | {"good": b"", "former": b"", "has_history": False}
    reports = [
        compared(number_entry(3), number_entry(2), number_entry(1)),
        compared(number_entry(3), number_entry(2), number_entry(1)),
        new,
    ]
    assert broken_paths(reports) == ([], {}, False)  # type: ignore[comparison-overlap]


def test_a_line_names_an_object_and_its_clearest_value() -> None:
    found = Findings(
        [
            Difference("ema.0.weight", "ema", "parameters and buffers", {0: "other values", 1: "other values"}, False),
            Difference("sched._last_lr[0]", "sched", "attributes", {0: "0.1", 1: "0.2"}, False),
            Difference("sched.last_epoch", "sched", "attributes", {0: "3", 1: "2"}, True),
            Difference(
                "<torch.random>", "<torch.random>", "state", {0: "another position", 1: "another position"}, True
            ),
        ]
    )
    assert fault_text(found, 2).splitlines() == [
        "the ranks differ after the fault:",
        "  sched.last_epoch is 3 on rank 0, 2 on rank 1, and 1 more",
        "  torch's default generator: at different positions",
        "  ema: parameters and buffers (1 differs; ema.0.weight differs)",
        "%dipsync copies rank 0's values to the others (--from RANK: another rank's)",
    ]
    assert fault_text(Findings(), 2) == ""


def test_a_rank_that_does_not_answer_hangs_no_cell(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupt a rank that does not answer, such as in a finalizer; the next cell runs, and saves by schedule wait."""
    monkeypatch.setattr(ranks, "ASK_SECONDS", 0.05)
    group = new_group(2)
    usual = group.engine(1).answers[on_rank.hash_variables.target]

    def stay_silent_once(*_: object) -> None:
        group.engine(1).answers[on_rank.hash_variables.target] = usual
        raise Silence

    group.save_every(0, "run")
    group.engine(1).answers[on_rank.hash_variables.target] = stay_silent_once
    with pytest.raises(CellError):
        group.run("raise ValueError")
    group.run("pass")
    shown = capsys.readouterr().err
    assert "the ranks could not be compared after the fault" in shown and "may differ; type --every again" in shown
    assert group.save_if_due() is None
    group.save_every(0, "run")
    assert "the save has each rank's own values" in capsys.readouterr().err
    assert not group.lifecycle.parts.differences.is_unsettled


def test_a_rank_that_cannot_reset_its_iteration_fails_in_time(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask the rank again before the next cell, which runs."""
    monkeypatch.setattr(ranks, "ASK_SECONDS", 0.05)
    group = new_group(2)
    for rank in range(2):
        group.engine(rank).iteration = WITHIN
    with pytest.raises(CellError):
        group.run("raise ValueError")
    for rank in range(2):
        group.engine(rank).iteration = None
    usual, asked = group.engine(1).answers[on_rank.iteration_facts.target], []

    def stay_silent_once(*_: object) -> Any:
        asked.append(1)
        if len(asked) > 1:
            return usual()
        raise Silence

    group.engine(1).answers[on_rank.iteration_facts.target] = stay_silent_once
    with pytest.raises(RequestFailed) as caught:
        group.run("pass")
    assert caught.value.late == [1] and caught.value.by_rank == {}
    group.run("pass")
    assert len(asked) == 2


def change_reports(group: Any, change: Callable[[Any], None]) -> None:
    """Change the ranks' replies to cells before the group reads them."""
    for rank in range(group.world_size):
        engine = group.engine(rank)

        def run(request: Any, *args: Any, run: Any = engine.run) -> None:
            request.add_done_callback(lambda done: change(done.result()))
            run(request, *args)

        engine.run = run


def test_live_ranks_that_cannot_report_are_reset(new_group: NewGroup) -> None:
    """A rank may lack the memory for its report."""
    group, resets = new_group(2), list[bool]()

    def record_reset(broken: bool, models: list[str], is_same_group: bool) -> IterationReset:
        resets.append(broken)
        return {"cleared": [], "hooks": []}

    for rank in range(2):
        group.engine(rank).answers[on_rank.reset_iteration.target] = record_reset
    change_reports(group, lambda reply: setattr(reply, "report", None))
    with pytest.raises(CellError):
        group.run("raise MemoryError")
    group.run("pass")
    assert resets == [True, True]


def test_a_line_that_cannot_be_printed_hides_no_fault(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_group(2)

    def raise_once(*_: object) -> None:
        monkeypatch.undo()
        raise BrokenPipeError

    monkeypatch.setattr(cells, "tell_aborted", raise_once)
    before = group.engine(0).calls.count(on_rank.join_group.target)
    group.engine(0).released = True
    with pytest.raises(CellError):
        group.run("raise ValueError")
    group.run("pass")
    assert group.engine(0).calls.count(on_rank.join_group.target) == before + 1


def test_a_training_fault_before_any_recorded_state_says_so(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(2)
    for iteration in (None, WITHIN):
        for rank in range(2):
            group.engine(rank).iteration = iteration
        with pytest.raises(CellError):
            group.run("raise ValueError")
        for rank in range(2):
            group.engine(rank).iteration = None
        group.run("pass")
        expected = "ddip had no earlier state, so it compared only counters, optimizers and generators"
        assert (expected in capsys.readouterr().err) == (iteration is not None)


def test_a_reset_that_fails_in_an_idle_notebook_is_reported(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare after the cell, as a notebook does: the reset is not repeated before the next cell."""
    group = new_group(2)

    def raise_once() -> None:
        raise ValueError("no")

    for rank in range(2):
        group.engine(rank).iteration = WITHIN
        group.engine(rank).answers[on_rank.iteration_facts.target] = raise_once
    with pytest.raises(CellError):
        group.run("raise ValueError")
    group.report_faults()
    expected = "could not reset them (looking at the training state failed: ranks 0, 1: ValueError: no): recreate them"
    assert expected in capsys.readouterr().err
    group.run("pass")
