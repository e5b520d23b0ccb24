"""What errors say."""

from __future__ import annotations

from IPython.core.error import UsageError

from ddip import errors
from ddip.errors import BadInput, CellError, RankError, ranks_text


def test_ranks_are_told_in_spans() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1]) == "ranks 0, 1"
    assert ranks_text([5, 2, 1, 0]) == "ranks 0-2, 5"


def test_equal_errors_are_told_once_with_their_ranks() -> None:
    zero = RankError("ZeroDivisionError", "division by zero", "trace")
    error = CellError({2: zero, 0: RankError("ValueError", "0", "other"), 1: zero})
    assert str(error) == "rank 0: ValueError: 0; ranks 1, 2: ZeroDivisionError: division by zero"
    assert error._render_traceback_() == ["[rank 0]", "other", "[ranks 1, 2]", "trace", f"CellError: {error}"]


def test_an_error_without_a_message_is_its_name() -> None:
    assert str(CellError({0: RankError("AssertionError", "", "")})) == "rank 0: AssertionError"


def test_all_that_users_cause_is_a_usage_error_of_one_line() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        if name not in ("CellError", "CellInterrupted", "LocalCellFailed", "RankError"):
            assert issubclass(kind, UsageError)
    assert BadInput("-n 0: type more")._render_traceback_() == ["UsageError: -n 0: type more"]
