"""Places where an interrupt may end the code of a cell."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from ddip.protocol import remote
from ddip.rank.kernel import cell_report, kernel, shell
from ddip.rank.profiling import profiling
from ddip.rank.runtime import current, stacks


def run_code(inner: Callable[[], bool]) -> bool:
    """Call `inner` from a function named like the one in which IPython runs a cell."""
    return inner()


def function_named(name: str) -> Callable[[], bool]:
    """Return a function with this name, which reports whether it may be interrupted."""
    names: dict[str, Any] = {"sys": sys, "stacks": stacks}
    exec(f"def {name}(): return stacks.may_interrupt(sys._getframe())", names)
    return names[name]  # type: ignore[no-any-return]


def test_the_code_of_a_cell_may_be_interrupted() -> None:
    assert run_code(lambda: stacks.may_interrupt(sys._getframe()))
    assert not stacks.may_interrupt(sys._getframe())


def test_code_that_swallows_exceptions_is_not_interrupted() -> None:
    assert run_code(function_named("other"))
    assert not run_code(function_named("__del__"))
    assert not run_code(stacks.never_interrupted(function_named("other")))


def test_a_warning_is_shown_without_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """``os.fork`` drops an interrupt that comes while its warning of threads is shown."""
    seen: list[bool] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: seen.append(stacks.may_interrupt(sys._getframe())))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run_code(lambda: warnings.warn("threads", stacklevel=1) is None)
    assert seen == [False]


def test_an_app_is_interrupted_like_a_cell() -> None:
    assert stacks.calls_users_code(function_named("hook"))()


def test_code_of_ddip_around_a_cell_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "begin_cell", lambda: stacks.may_interrupt(sys._getframe()))
    assert cell_report._call_checked("runtime.current.begin_cell") is False
    assert remote.call_target("runtime.current.begin_cell")["ok"] is True  # a request of the notebook


@pytest.mark.parametrize(
    "function",
    [
        shell.RankShell.showtraceback,
        kernel.RankKernel._retry_swallowed_interrupt,  # Python's hook swallows it: the cell continued forever
        profiling._on_main_thread,
        profiling._Recording.finish,
    ],
)
def test_functions_of_ddip_that_no_interrupt_may_end_are_marked(function: Callable[..., Any]) -> None:
    assert function.__code__ in stacks._uninterruptible
