"""Where an interrupt may end the code of a cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from ddip.rank import kernel, shell, stacks


def run_code(inner: Callable[[], bool]) -> bool:
    """What IPython runs a cell in, by its name."""
    return inner()


def of_ddip(name: str, module: str) -> Callable[[], bool]:
    """A function of that name in that module, which tells whether it may be interrupted."""
    names: dict[str, Any] = {"__name__": module, "sys": sys, "stacks": stacks}
    exec(f"def {name}(): return stacks.is_users(sys._getframe())", names)
    return names[name]  # type: ignore[no-any-return]


def test_the_code_of_a_cell_may_be_interrupted() -> None:
    assert run_code(lambda: stacks.is_users(sys._getframe()))
    assert not stacks.is_users(sys._getframe())


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("showtraceback", shell.__name__),
        ("_interrupt_again", kernel.__name__),  # Python's hook swallows it: the cell went on for ever
        ("__del__", "a_users"),
    ],
)
def test_what_lets_no_exception_through_is_left_alone(name: str, module: str) -> None:
    assert not run_code(of_ddip(name, module))
    assert run_code(of_ddip("other", module))


def test_the_functions_that_are_left_alone_are_there() -> None:
    assert callable(kernel.RankKernel._interrupt_again) and callable(shell.RankShell.showtraceback)
