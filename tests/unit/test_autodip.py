"""The cells that %autodip takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddip.notebook.autodip import LOCAL_MAGICS, Autodip
from ddip.notebook.both_sides import BOTH_SIDES
from ddip.notebook.first_lines import TRANSFORMERS
from ddip.notebook.once_per_rank import find_effects

MINE = [
    "x = 1",
    "# a comment\nx = 1",
    "\n\n# after empty lines\nx = 1",
    "@property\ndef f(): pass",
    "s = '''\n%%dip\n'''",
    "!ls",
    "x?",
    "    indented = 1",
    "%time x",
    "%%time\nx",
    "\n\n%%time\nx",
    "%%capture out\nx",
    "%timeit x",
    "%matplotlib inline\nimport matplotlib.pyplot as plt",
    "%run train.py",
    "%who",
    "%cd data\nx = 1",
    "%unknown",
]
NOT_MINE = [
    "",
    "\n",
    "   \n\n",
    "%%dip -S all\nx",
    "\n%%dip\nx",
    "%makedip -i",
    "%dipull x",
    "%load_ext autoreload\nimport x",
    "%load_ext ddip",
    "%load_ext autoreload\n%load_ext ddip",
    "%load_ext autoreload\n%makedip -n 2",
    "%reload_ext ddip\n%autoreload 2",
    "%unload_ext autoreload",
    "%pip install x",
    "%config DipMagics.style",
    "%%bash\nls",
    "%%html\n<b>",
    "%%javascript\nx",
    "%%writefile x.py\nx",
    "%mkdir x",
    "%added x",
    "# install\n%pip install x",
    "# start\n\n  %makedip -n 2",
    "%%added\nx",
]
BOTH = [
    "%cd ..",
    "%env A=1",
    "\n%cd ..\n\n%env A=1\n",
    "%load_ext autoreload\n%autoreload 2",
    "# edited modules are loaded again\n%load_ext autoreload\n%autoreload 2\n",
    "%reload_ext autoreload\n%autoreload 2\n%matplotlib inline",
    "%autoreload",
    "%aimport utils",
    "%pushd ..",
    "%config InteractiveShell.ast_node_interactivity = 'all'",
]


@pytest.fixture(autouse=True)
def added(shell: InteractiveShell) -> None:
    """Register magics, as an extension would."""
    shell.register_magic_function(lambda line: None, "line", "added")
    shell.register_magic_function(lambda line, cell: None, "cell", "added")


@pytest.mark.parametrize("cell", MINE)
def test_the_users_cells_become_dip_cells(shell: InteractiveShell, cell: str) -> None:
    autodip = Autodip(shell)
    autodip.on("-S all")
    made = shell.transform_cell(cell)
    assert made.startswith("get_ipython().run_cell_magic('dip', '-S all', ")
    autodip.off()
    assert "'dip'" not in shell.transform_cell(cell)


@pytest.mark.parametrize("cell", NOT_MINE)
def test_other_cells_stay_unchanged(shell: InteractiveShell, cell: str) -> None:
    before = shell.transform_cell(cell)
    Autodip(shell).on("")
    assert shell.transform_cell(cell) == before


@pytest.mark.parametrize("cell", BOTH)
def test_folder_and_environment_change_on_both_sides(shell: InteractiveShell, cell: str) -> None:
    Autodip(shell).on("--bg", "-r 0")
    assert shell.transform_cell(cell).startswith("get_ipython().run_cell_magic('dip', 'everywhere -r 0', ")


def test_the_user_can_change_which_magics_stay_in_the_notebook(shell: InteractiveShell) -> None:
    local = ["time"]
    autodip = Autodip(shell, lambda: local)
    autodip.on("")
    assert not autodip.takes("%time x") and autodip.takes("%%bash\nls")
    local[:] = ["bash"]
    assert autodip.takes("%time x") and not autodip.takes("%%bash\nls")


def test_the_user_can_keep_magics_for_both_sides_local(shell: InteractiveShell) -> None:
    autodip = Autodip(shell, lambda: ["cd"])
    autodip.on("")
    assert not autodip.takes("%cd ..") and not autodip.takes("%cd ..\n%env A=1") and autodip.takes("%env A=1")


def test_the_whole_cell_reaches_the_ranks_unchanged(shell: InteractiveShell) -> None:
    Autodip(shell).on("")
    cell = "s = '{x} $y \\\\n'\nprint(s)  # %%dip\n"
    assert repr(cell) in shell.transform_cell(cell)


def test_the_page_names_magics_that_the_code_knows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "magics.md").read_text()
    rows = [line for line in page.partition("## Where a cell runs")[2].splitlines() if line.startswith("| ")]
    (both,) = [set(re.findall(r"`%(\w+)", row)) for row in rows if row.startswith("| only")]
    assert both == {*BOTH_SIDES, "load_ext", "config"}
    local = [
        re.findall(r"`%+(\w+)", row) for row in rows if row.startswith(("| begins with `%pip`", "| begins with `%%"))
    ]
    assert len(local) == 2 and {name for names in local for name in names} < {*LOCAL_MAGICS}


@pytest.mark.parametrize(
    "cell",
    ["get_ipython().system(command)", "get_ipython().showtraceback()", "get_ipython().run_cell('1', True)", r"'\d'"],
)
def test_other_calls_of_ipython_have_no_note(cell: str, recwarn: pytest.WarningsRecorder) -> None:
    assert not [*find_effects(cell)] and not recwarn.list


def test_a_note_about_a_file_shows_the_call_unchanged() -> None:
    assert [*find_effects("path.open(mode='w')")] == [("file", "path.open(mode='w')")]


def test_autodip_on_twice_equals_autodip_on_once(shell: InteractiveShell) -> None:
    autodip = Autodip(shell)
    autodip.on("")
    autodip.on("-q")
    assert shell.transform_cell("x").count("'dip'") == 1
    assert autodip.state == "on, cells run as %%dip -q"
    autodip.off()
    assert autodip.state == "off"
    assert autodip not in shell.input_transformers_cleanup


def test_autodip_leaves_completeness_checks_unchanged(shell: InteractiveShell) -> None:
    Autodip(shell).on("")
    assert shell.check_complete("x = 1")[0] == "complete"
    assert shell.check_complete("def f():")[0] == "incomplete"


NESTED = [
    "%time x = 1",
    "%%time\nx = 1",
    "%%timeit -n 1 -r 1\nx = 1",
    "%%capture\nx = 1",
    "x = 1",
]


@pytest.mark.parametrize("cell", NESTED)
def test_code_of_a_magic_runs_where_the_magic_runs(shell: InteractiveShell, cell: str) -> None:
    ran: list[str] = []
    shell.register_magic_function(lambda line, cell: ran.append(cell), "cell", "dip")
    shell.register_magic_function(lambda line, cell: shell.run_cell(cell), "cell", "here")
    autodip = Autodip(shell)
    autodip.on("")
    assert shell.run_cell(f"%%here\n{cell}").success
    assert ran == []
    shell.run_cell("y = 1")
    assert ran == ["y = 1\n"]
    autodip.close()
    shell.run_cell("z = 1")
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("cell", "line", "body"),
    [
        ("# train\n%%dip -q\nx = 1\n", "-q", "x = 1\n"),
        ("\n# one\n  # two\n%%dip local\nx\n", "local", "x\n"),
        (" %%dip\nx = 1\n", "", "x = 1\n"),
        ("%%dip -a patches", "-a patches", "\n"),
    ],
)
def test_a_comment_may_stand_above_dip(shell: InteractiveShell, cell: str, line: str, body: str) -> None:
    transformers = shell.input_transformers_cleanup
    transformers += TRANSFORMERS
    Autodip(shell).on("-S all")
    try:
        assert shell.transform_cell(cell) == f"get_ipython().run_cell_magic('dip', {line!r}, {body!r})\n"
        assert "'dip'" not in shell.transform_cell("# a comment\n%dipper g\nx")
        assert shell.check_complete("%%dip -q")[0] == "incomplete"  # a terminal waits for the code
    finally:
        transformers[:] = [one for one in transformers if one not in TRANSFORMERS]
