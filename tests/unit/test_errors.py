"""Texts of errors."""

from __future__ import annotations

from IPython.core.error import UsageError

import ddip
from ddip import errors
from ddip.errors import BadInput, CellError, CellInterrupted, CellTimeout, RankError, ranks_text


def ddip_exceptions() -> list[type[BaseException]]:
    return [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.DdipError)]


def test_all_exceptions_have_one_base_and_are_public() -> None:
    made_here = [one for one in vars(errors).values() if getattr(one, "__module__", "") == errors.__name__]
    assert [one for one in made_here if isinstance(one, type) and issubclass(one, BaseException)] == ddip_exceptions()
    assert [one for one in ddip_exceptions() if getattr(ddip, one.__name__) is not one] == []
    assert {one.__name__ for one in ddip_exceptions()} | {"RankError"} < set(ddip.__all__)


def test_except_exception_does_not_catch_the_stop_button() -> None:
    stops = {one for one in ddip_exceptions() if not issubclass(one, Exception)} - {errors.DdipError}
    assert stops == {one for one in ddip_exceptions() if issubclass(one, KeyboardInterrupt)}
    assert stops == {errors.CellInterrupted, errors.RequestInterrupted}


def test_ranks_are_shown_in_spans() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1]) == "ranks 0, 1"
    assert ranks_text([5, 2, 1, 0]) == "ranks 0-2, 5"


def test_equal_errors_are_shown_once_with_their_ranks() -> None:
    zero = RankError("ZeroDivisionError", "division by zero", "trace")
    error = CellError({2: zero, 0: RankError("ValueError", "0", "other"), 1: zero})
    assert str(error) == "rank 0: ValueError: 0; ranks 1, 2: ZeroDivisionError: division by zero"
    assert error._render_traceback_() == ["[rank 0]", "other", "[ranks 1, 2]", "trace", f"CellError: {error}"]


def test_ranks_that_ended_the_same_way_share_one_line() -> None:
    ended = {rank: RankError("RankEnded", f"pid {rank} ended (exit code 3)", "", pid=rank) for rank in (4, 5)}
    error = CellError(ended | {6: RankError("RankEnded", "pid 6 ended (SIGKILL)", "", pid=6)})
    traceback_lines = "ranks 4, 5: RankEnded: pids 4, 5 ended (exit code 3); rank 6: RankEnded: pid 6 ended (SIGKILL); "
    assert str(error) == traceback_lines + errors.REPAIR


def test_pids_are_in_the_order_of_the_ranks() -> None:
    ended = {rank: RankError("RankEnded", f"pid {rank} ended", "", pid=rank, at=9.0 - rank) for rank in (4, 5)}
    assert str(CellError(ended)).startswith("ranks 4, 5: RankEnded: pids 4, 5 ended")


def test_an_error_shows_the_last_output_of_some_hidden_ranks() -> None:
    by_rank = {rank: RankError("E", "", "trace", output=f"line {max(rank, 2)}") for rank in range(1, 8)}
    by_rank[0] = RankError("E", "", "trace")
    shown = [line for rank in range(3, 6) for line in (f"[rank {rank}] last output:", f"line {rank}")]
    left_out = "[ranks 6, 7] last output left out; -S 6 shows rank 6"
    assert CellError(by_rank)._render_traceback_()[:-1] == [
        *("[ranks 1, 2] last output:", "line 2", *shown, left_out, "[ranks 0-7]", "trace")
    ]


def test_an_error_without_a_message_shows_its_name() -> None:
    assert str(CellError({0: RankError("AssertionError", "", "")})) == "rank 0: AssertionError"


def test_errors_show_the_earliest_first_and_group_waits_by_place() -> None:
    late = RankError("KeyError", "late", "late trace", at=2.0)
    early = RankError("ValueError", "early", "early trace", at=1.0)
    waited = RankError(
        "RuntimeError", "Connection closed by peer", "long trace", waited="barrier, cell [3] line 1", at=1.5
    )
    elsewhere = RankError("RuntimeError", "Connection closed", "long trace", waited="recv, cell [3] line 2", at=1.5)
    error = CellError({0: late, 1: early, 2: waited, 3: waited, 4: elsewhere})
    assert str(error) == (
        "rank 1: ValueError: early; rank 0: KeyError: late; "
        "ranks 2, 3 were blocked in barrier, cell [3] line 1, until ddip aborted it; "
        "rank 4 was blocked in recv, cell [3] line 2, until ddip aborted it"
    )
    assert error._render_traceback_()[:-1] == ["[rank 1]", "early trace", "[rank 0]", "late trace"]
    assert error.by_rank[2].message == "Connection closed by peer"


def test_a_rank_that_ended_can_be_replaced() -> None:
    text = str(CellError({1: RankError("RankEnded", "pid 7 ended (SIGKILL)", "")}))
    assert text.startswith("rank 1: RankEnded: pid 7 ended (SIGKILL); %makedip --repair replaces its process")


def test_exceptions_from_an_interrupt_are_not_shown_as_errors() -> None:
    stopped = RankError("KeyboardInterrupt", "", "trace")
    error = CellInterrupted("the cell was interrupted", {0: stopped, 1: RankError("ValueError", "own", "own trace")})
    assert error._render_traceback_() == ["[rank 1]", "own trace", "KeyboardInterrupt: the cell was interrupted"]


def test_every_user_mistake_is_a_usage_error_of_one_line() -> None:
    of_code = {CellError, CellTimeout, errors.LocalCellFailed}
    for kind in ddip_exceptions():
        if issubclass(kind, Exception) and kind not in of_code:
            assert issubclass(kind, UsageError)
    assert BadInput("-n 0: type more")._render_traceback_() == ["UsageError: -n 0: type more"]


def test_no_traceback_in_the_tabs_is_repeated() -> None:
    error = CellError({rank: RankError("E", str(rank), f"traceback {rank}", at=float(rank)) for rank in range(3)})
    traceback_lines = lambda: [line for line in error._render_traceback_() if line.startswith("traceback")]  # noqa: E731
    assert traceback_lines() == ["traceback 0", "traceback 1", "traceback 2"]
    error.in_tabs = (0, 1)
    assert traceback_lines() == ["traceback 2"]
