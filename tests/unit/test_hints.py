"""Hints about a name that the ranks do not know."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddip.errors import CellError, RankError
from ddip.notebook.autodip import Autodip
from ddip.notebook.hints import Hints
from ddip.protocol.start_methods import NOT_FORKED

from .scripted import ScriptedGroup


@pytest.fixture
def group() -> Iterator[ScriptedGroup]:
    with ScriptedGroup(3) as group:
        yield group


def hint_for(
    shell: InteractiveShell, group: ScriptedGroup, ranks: list[int], name: str = "NameError", of: str = "x"
) -> str:
    """Return the text that is added to the error of `ranks` which do not know `of`."""
    message = f"name '{of}' is not defined" if name == "NameError" else ""
    error = CellError({rank: RankError(name, message, "") for rank in ranks})
    before = str(error)
    hints = Hints(shell, lambda: group, Autodip(shell))
    try:
        hints.explain(error)
    finally:
        hints.close()
    return str(error).removeprefix(before)


def test_a_variable_of_the_notebook_is_pushed(shell: InteractiveShell, group: ScriptedGroup) -> None:
    shell.user_ns["x"] = 1
    assert hint_for(shell, group, [0, 1, 2]) == "; x is a variable of the notebook; %dipush x copies it to every rank"


def test_a_module_is_imported_and_not_pushed(shell: InteractiveShell, group: ScriptedGroup) -> None:
    shell.user_ns.update(math=math, m=math)
    assert hint_for(shell, group, [0, 1, 2], of="math") == "; type import math in a %%dip cell"
    assert hint_for(shell, group, [0, 1, 2], of="m") == "; type import math as m in a %%dip cell"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (RankError("NameError", "name 'ls' is not defined", ""), "; type %ls, with the %: "),
        (
            RankError("SyntaxError", "invalid syntax", "Cell In[1], line 1\n    pip install x\n        ^"),
            "; type %pip, ",
        ),
        (RankError("SyntaxError", "invalid syntax", "Cell In[1], line 1\n    for x\n        ^"), ""),
    ],
)
def test_a_magic_without_its_percent_sign_gets_a_hint(
    shell: InteractiveShell, group: ScriptedGroup, error: RankError, hint: str
) -> None:
    found = CellError({0: error})
    before = str(found)
    hints = Hints(shell, lambda: group, Autodip(shell))
    hints.explain(found)
    hints.close()
    assert str(found).removeprefix(before).startswith(hint) and (hint or str(found) == before)


def test_an_unknown_name_gets_no_hint(shell: InteractiveShell, group: ScriptedGroup) -> None:
    assert hint_for(shell, group, [0, 1, 2]) == ""


def test_the_hint_mentions_that_later_ranks_are_new(shell: InteractiveShell, group: ScriptedGroup) -> None:
    group.scripted.end_engine(group.members[1].engine, -9)
    assert group.repair() == [1] == group.new_ranks
    assert hint_for(shell, group, [1]) == "; rank 1 is new and lacks what earlier cells have defined: run those again"
    assert hint_for(shell, group, [0, 1, 2]) == ""
    group.change(type(group.request)(n=4))
    assert group.new_ranks == [1, 3]
    assert "ranks 1, 3 are new and lack what earlier cells have defined" in hint_for(shell, group, [1, 3])
    group.restart()
    assert group.new_ranks == []


def test_an_exit_ends_no_rank(shell: InteractiveShell, group: ScriptedGroup) -> None:
    assert (
        hint_for(shell, group, [0], "SystemExit")
        == "; exit() and sys.exit() end the cell, not the ranks; %makedip -k ends the ranks"
    )


def test_a_killed_worker_gets_no_hint_about_missing_classes(shell: InteractiveShell, group: ScriptedGroup) -> None:
    def explanation_of(traceback: str) -> str:
        error = CellError({0: RankError("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly", traceback)})
        hints = Hints(shell, lambda: group, Autodip(shell))
        try:
            hints.explain(error)
        finally:
            hints.close()
        return str(error)

    assert NOT_FORKED in explanation_of("exited with exit code 1")
    assert NOT_FORKED not in explanation_of("DataLoader worker (pid 7) is killed by signal: Killed.")


@pytest.mark.parametrize(
    ("method", "has_hint"), [("popen_forkserver", True), ("popen_spawn_posix", True), ("x", False)]
)
def test_a_worker_whose_work_cannot_be_pickled_gets_a_hint(
    shell: InteractiveShell, group: ScriptedGroup, method: str, has_hint: bool
) -> None:
    message = "Can't pickle <function <lambda> at 0x7f>: it's not found as __main__.<lambda>"
    traceback = f"File /usr/lib/python3.14/multiprocessing/{method}.py:32, in Popen.__init__(self, process_obj)"
    error = CellError({0: RankError("PicklingError", message, traceback)})
    hints = Hints(shell, lambda: group, Autodip(shell))
    try:
        hints.explain(error)
    finally:
        hints.close()
    assert (NOT_FORKED in str(error)) is has_hint
