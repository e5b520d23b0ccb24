"""Which cells %autodip takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddip.autodip import Autodip


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """An IPython of its own, without history."""
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    yield shell
    shell.atexit_operations()


MINE = [
    "x = 1",
    "# a comment\nx = 1",
    "\n\n# after empty lines\nx = 1",
    "@property\ndef f(): pass",
    "s = '''\n%%dip\n'''",
    "!ls",
    "x?",
    "    indented = 1",
]
NOT_MINE = ["", "\n", "   \n\n", "%time x", "%%dip -S all\nx", "%%time\nx", "\n\n%%time\nx"]


@pytest.mark.parametrize("cell", MINE)
def test_the_users_cells_become_dip_cells(shell: InteractiveShell, cell: str) -> None:
    autodip = Autodip(shell)
    autodip.on("-S all")
    made = shell.transform_cell(cell)
    assert made.startswith("get_ipython().run_cell_magic('dip', '-S all', ")
    autodip.off()
    assert "'dip'" not in shell.transform_cell(cell)


@pytest.mark.parametrize("cell", NOT_MINE)
def test_other_cells_stay_as_they_are(shell: InteractiveShell, cell: str) -> None:
    before = shell.transform_cell(cell)
    Autodip(shell).on("")
    assert shell.transform_cell(cell) == before


def test_the_whole_cell_reaches_the_ranks_unchanged(shell: InteractiveShell) -> None:
    Autodip(shell).on("")
    cell = "s = '{x} $y \\\\n'\nprint(s)  # %%dip\n"
    assert repr(cell) in shell.transform_cell(cell)


def test_on_twice_is_on_once_and_pause_pauses(shell: InteractiveShell) -> None:
    autodip = Autodip(shell)
    autodip.on("")
    autodip.on("-q")
    assert shell.transform_cell("x").count("'dip'") == 1
    assert autodip.state == "on, cells run as %%dip -q"
    with autodip.paused():
        assert "'dip'" not in shell.transform_cell("x")
    assert "'dip'" in shell.transform_cell("x")
    autodip.off()
    assert autodip.state == "off"
    assert autodip not in shell.input_transformers_cleanup


def test_asking_whether_a_line_is_complete_is_not_touched(shell: InteractiveShell) -> None:
    Autodip(shell).on("")
    assert shell.check_complete("x = 1")[0] == "complete"
    assert shell.check_complete("def f():")[0] == "incomplete"
