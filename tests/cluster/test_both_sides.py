"""Magics that take effect in the notebook and on the ranks: %cd, %env, and autoreload."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .notebook import Notebook

ONLY_HERE = (
    "ddip: autoreload is on in the notebook only; to enable it on the ranks, run %%dip, %load_ext autoreload, "
    "%autoreload 2 in a cell\n"
)
ON = "%load_ext autoreload\n%autoreload 2"


@pytest.fixture
def autodip(notebook: Notebook) -> Iterator[Notebook]:
    """Return the shared notebook under %autodip; restore its folder and environment afterwards."""
    notebook.ok("%autodip on")
    yield notebook
    notebook.ok(f"%cd -q {notebook.folder}")
    notebook.ok("import os\nfor name in ('SIDE', 'ONLY_HERE'): os.environ.pop(name, None)")
    notebook.ok("%autodip off")


# -- where a cell runs

PROOF = "open('where', 'a').write(f'{os.getpid()}\\n')"
SHELL = "echo $$PPID >> where"
"""Text for a line magic of IPython, which makes one ``$`` of ``$$``."""
EACH, HERE, BOTH = "on each rank", "in the notebook", "in the notebook, then on each rank"
CELLS = {
    "Python code": (EACH, [PROOF]),
    "`!`": (EACH, [f"!{SHELL}", f"!!{SHELL}", f"%sx {SHELL}", f"%system {SHELL}"]),
    "`%time`": (
        EACH,
        [f"%time {PROOF}", f"%%time\n{PROOF}", f"%%capture\n{PROOF}", "%run prove.py", f"%matplotlib inline\n{PROOF}"],
    ),
    "any magic": (EACH, [f"1\n%pip --version > pip.txt; {SHELL}"]),
    "only `%cd`": (BOTH, ["%env WHERE=1"]),
    "begins with `%pip`": (HERE, [f"%pip --version > pip.txt; {SHELL}"]),
    "begins with `%%bash`": (HERE, ["%%bash\necho $PPID >> where", "%%script bash\necho $PPID >> where"]),
    "begins with `%mkdir`": (HERE, [f"%ls > ls.txt; {SHELL}"]),
    "begins with a magic of": (HERE, ["%proven"]),
    "`%%dip local`": (HERE, [f"%%dip local\n{PROOF}"]),
    "`%%dip everywhere`": (BOTH, [f"%%dip everywhere\n{PROOF}"]),
}
"""Where a cell runs, and cells of this kind that prove it, by the beginning of the row in the documentation."""


def rows_of_the_page() -> list[tuple[str, str]]:
    page = (Path(__file__).parents[2] / "docs" / "magics.md").read_text()
    section = page.partition("## Where a cell runs")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [(cell, where) for cell, where in rows[2:]]


@pytest.mark.grid(in_ci=True)
def test_each_cell_runs_where_the_page_says(autodip: Notebook) -> None:
    def prove(cell: str) -> list[int]:
        autodip.ok(cell)
        if cell.startswith("%env"):
            autodip.ok(f"%%dip everywhere\nif os.environ.pop('WHERE', ''): {PROOF}")
        pids = sorted(map(int, (autodip.folder / "where").read_text().split()))
        (autodip.folder / "where").unlink()
        return pids

    for (row, documented), (beginning, (where, _)) in zip(rows_of_the_page(), CELLS.items(), strict=True):
        assert row.startswith(beginning) and documented == where
    (autodip.folder / "prove.py").write_text(f"import os; {PROOF}")
    autodip.ok("%%dip everywhere\nimport os")
    autodip.ok(f"%%dip local\ndef proven(line): {PROOF}\nget_ipython().register_magic_function(proven)")
    ranks = prove(f"%%dip\n{PROOF}")
    assert len(ranks) == 3 and autodip.pid not in ranks
    sides = {EACH: ranks, HERE: [autodip.pid], BOTH: sorted([autodip.pid, *ranks])}
    for where, cells in CELLS.values():
        assert [prove(cell) for cell in cells] == [sides[where]] * len(cells), cells


def test_effects_on_every_rank_are_reported_once(autodip: Notebook) -> None:
    autodip.ok("%%dip local\nget_ipython().magics_manager.registry['DipMagics']._once_per_rank._reported.clear()")
    shell = "ddip: ran once per rank: !echo; %%dip local runs a cell once, in the notebook\n"
    assert [autodip.ok("!echo >> f").stdout for _ in range(2)] == [shell, ""]
    assert [autodip.ok(f"open('f', '{mode}').close()").stdout for mode in "raa"] == [
        *("", shell.replace("!echo", "open('f', 'a')"), "")
    ]


# -- %cd and %env


@pytest.mark.grid
def test_output_of_both_sides_is_shown_once(autodip: Notebook) -> None:
    there = autodip.folder / "there"
    there.mkdir(exist_ok=True)
    assert autodip.ok("%cd there").stdout == f"{there}\n"
    autodip.ok(f"import os; assert os.getcwd() == {str(there)!r}")
    autodip.ok(f"%%dip local\nimport os; assert os.getcwd() == {str(there)!r}")
    missing = autodip.ok("%cd nosuch").stdout
    assert missing.count("No such file") == 1 and missing.count(str(there)) == 1
    assert autodip.ok("%env FOO=bar").stdout == "env: FOO=bar\n"
    autodip.ok("assert os.environ['FOO'] == 'bar'")
    shown = autodip.ok("%env FOO")
    assert shown.text.count("'bar'") == 1 and "rank" not in shown.stdout
    assert autodip.ok("%%dip everywhere\n%cd ..").stdout == f"{autodip.folder}\n"


def test_different_output_of_a_rank_is_labelled(autodip: Notebook) -> None:
    for name in ("up", "up/here"):
        (autodip.folder / name).mkdir(exist_ok=True)
    autodip.ok("%%dip -r 1\n%cd -q up/here")
    shown = autodip.ok("%cd ..")
    assert shown.stdout == f"{autodip.folder.parent}\n[rank 1] {autodip.folder / 'up'}\n"
    autodip.ok("import os; os.environ['SIDE'] = f'rank {rank}'")
    autodip.ok("%%dip local\nimport os; os.environ['SIDE'] = 'notebook'")
    shown = autodip.ok("%env SIDE")
    assert "'notebook'" in shown.text and "── rank 2 ──" in shown.text and "'rank 2'" in shown.text


def test_an_error_of_a_rank_fails_the_cell(autodip: Notebook) -> None:
    autodip.ok("%%dip local\n%env ONLY_HERE=1")
    autodip.ok("%%dip -r 0,2\n%env ONLY_HERE=1")
    shown = autodip.fails("%env ONLY_HERE")
    assert shown.error == "CellError"
    assert "rank 1: UsageError: Environment does not have key: ONLY_HERE" in shown.message


def test_an_error_in_the_notebook_keeps_the_ranks_from_running(autodip: Notebook) -> None:
    autodip.ok("import os; os.environ['SIDE'] = 'ranks'")
    autodip.ok("%%dip local\nimport os; os.environ.pop('SIDE', None)")
    shown = autodip.fails("%env SIDE")
    assert shown.error == "LocalCellFailed" and "ranks" not in shown.text


def test_options_of_autodip_that_such_a_cell_lacks_are_left_out(autodip: Notebook) -> None:
    for options in ("--bg", "--profile", "remote -S all", "everywhere --log x=1", "-r 1,2 --timeout 60"):
        autodip.ok(f"%autodip on -a {options!r}")
        autodip.ok("%cd .")
    autodip.ok("%autodip on")


def test_a_line_that_only_the_ranks_could_expand_is_refused(autodip: Notebook) -> None:
    autodip.ok("there = '/'")
    for line in ("%cd $there", "%cd {there}", "%env SIDE=$there", "%diprun train.py --out {there} $there"):
        assert "there, which is one of the ranks; type %dipull there first" in autodip.fails(line).message
    autodip.ok("%cd .")
    autodip.ok("%env SIDE=$HOME")


def test_rerun_repeats_a_cell_on_the_ranks(autodip: Notebook) -> None:
    autodip.ok("count = rank")
    autodip.ok("count += 10")
    autodip.ok("%rerun")
    autodip.ok("assert count == 20 + rank")
    autodip.ok("%%dip local\nassert 'count' not in globals()")


# -- autoreload


def write_module(module: Path, value: int) -> None:
    """Write a module that returns `value`, with a later mtime than before."""
    before = module.stat().st_mtime if module.exists() else 0.0
    module.write_text(f"def value():\n    return {value}\n")
    later = max(before + 5, module.stat().st_mtime)
    os.utime(module, (later, later))


@pytest.mark.grid
def test_autoreload_under_autodip_works_on_both_sides(new_notebook: Callable[[], Notebook], tmp_path: Path) -> None:
    notebook = new_notebook()
    write_module(tmp_path / "utils.py", 1)
    notebook.ok("%load_ext ddip\n%makedip -n 2")
    notebook.ok("%autodip on")
    assert notebook.ok(ON).stdout == ""
    notebook.ok("import utils")
    notebook.ok("%%dip local\nimport utils")
    write_module(tmp_path / "utils.py", 2)
    assert notebook.ok("%%dip -S all\nprint(utils.value())").text.count("2\n") >= 1
    notebook.ok("assert utils.value() == 2")
    notebook.ok("%%dip local\nassert utils.value() == 2")
    assert notebook.ok(ON).stdout.count("already loaded") == 1
    assert notebook.ok("%autoreload 0").text.count("ddip: autoreload") == 0
    write_module(tmp_path / "utils.py", 3)
    notebook.ok("assert utils.value() == 2")
    notebook.ok("%autoreload 2")
    write_module(tmp_path / "utils.py", 4)
    notebook.ok("assert utils.value() == 4")
    notebook.ok("%%dip local\nassert utils.value() == 4")
    shown = notebook.ok("%makedip -n 3")
    assert "autoreload is on in the notebook, and not on rank 2; to enable it on the ranks, run %%dip" in shown.stderr
    assert notebook.ok("1").stderr == ""
    notebook.ok(ON)
    notebook.ok("%load_ext ddip")  # runs in the notebook only
    notebook.ok("assert 'makedip' in get_ipython().magics_manager.magics['line']")


@pytest.mark.grid
def test_autoreload_of_the_notebook_alone_is_named_once(bare_notebook: Notebook) -> None:
    notebook = bare_notebook
    write_module(notebook.folder / "reloaded.py", 1)
    try:
        assert notebook.ok("%load_ext autoreload\n%autoreload 0").stderr == ""
        assert "autoreload" not in notebook.ok("%makedip -n 1").text
        assert notebook.ok("%autoreload 2").stderr == ONLY_HERE
        assert notebook.ok("%autodip on").stderr == notebook.ok("1").stderr == ""
        notebook.ok("%aimport reloaded")  # also on the ranks, which had not imported it
        notebook.ok("assert reloaded.value() == 1")
        notebook.ok(f"%%dip\n{ON}")
        notebook.ok("%autodip off")
        assert notebook.ok("1").stderr == ""
        assert notebook.ok("%makedip -r").stderr == ONLY_HERE
    finally:
        notebook.ok("%autodip off\n%autoreload 0")
        notebook.ok("%unload_ext autoreload")


@pytest.mark.grid
def test_autoreload_loaded_before_the_group_is_mentioned_at_its_start(
    new_notebook: Callable[[], Notebook],
) -> None:
    notebook = new_notebook()
    assert notebook.ok(f"{ON}\n%load_ext ddip").stderr == ""
    assert ONLY_HERE in notebook.ok("%makedip -n 1").stderr
    assert notebook.ok("%autodip on").stderr == ""
