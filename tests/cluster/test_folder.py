"""ddip starts in any folder: files in the notebook's folder never shadow modules that ddip needs."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ddip
from ddip.cluster import folder
from ddip.cluster.processes import preload_client
from ddip.errors import GroupError
from ddip.group.members.placement import Request

from .environment import environment
from .foreign import Foreign, importable_modules
from .leftovers import wait_until
from .notebook import Notebook

NewNotebook = Callable[[], Notebook]
BEFORE = ("random", "queue", "socket", "select", "logging", "tokenize", "signal", "zmq", "psutil", "IPython", "torch")
"""Modules whose shadowing does not keep a kernel from starting."""
NOBODYS = ("sitecustomize", "usercustomize", "gmpy2", "rank", "data/", "tests/")
STEPS = (
    "%makedip -n 2",
    "%%dip -S all\nprint(rank)",
    "kept = [1]\n%dipush kept\n%dipull kept",
    "%%dip\nimport torch.distributed as dist\ndist.barrier()",
    "%makedip -i",
    "%dipstack",
    "%autodip on\n%autodip off",
    "%makedip -n 3",
    "%makedip --repair",
    "%makedip -r",
    "%%dip -S all\nfrom IPython.display import HTML\nHTML('rich')",
)


@pytest.mark.grid
def test_no_file_in_the_notebooks_folder_replaces_another_module(
    new_notebook: NewNotebook, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Check the kernel, apart from its own imports, and all ddip processes."""
    foreign = Foreign(tmp_path)
    foreign.add(*BEFORE)
    (tmp_path / "evil.pth").write_text(f"import os; os.mkdir({str(tmp_path / 'ran' / 'pth')!r})\n")
    (tmp_path / "__main__.py").write_text("raise SystemExit('this is not the program')\n")
    (tmp_path / "mine.py").write_text("value = 'of the folder'\n")
    notebook = new_notebook()
    foreign.add(*importable_modules().difference(BEFORE, ["ddip"]), *NOBODYS)
    notebook.ok("%load_ext ddip")
    foreign.add("ddip")
    if not pytestconfig.getoption("--spawn"):
        notebook.ok(
            "from ddip.cluster.processes import preload_client\nassert preload_client.ensure_process().asleep.wait(60)"
        )
    for step in STEPS:
        notebook.ok(step)
    assert notebook.fails("%%dip\n1 / 0").message == "ranks 0-2: ZeroDivisionError: division by zero"
    wait_until(lambda: notebook.ask("complete", "%%dip\nworld_si")["matches"] == ["world_size"])
    assert foreign.import_stacks() == []
    notebook.ok("""
        %%dip
        import mine, sys
        assert mine.value == 'of the folder' and '' in sys.path
    """)
    notebook.ok("%makedip -k")


@pytest.mark.grid
def test_a_file_that_shadows_the_standard_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not that queue')\n")
    with environment(tmp_path), pytest.raises(GroupError) as failed:
        ddip.Group(1, timeout=30)
    *_, cause, advice = str(failed.value).splitlines()
    assert "not that queue" in cause and f"{tmp_path}/queue.py" in advice and "rename" in advice


@pytest.mark.grid
def test_an_empty_entry_of_pythonpath_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python reads an empty entry of PYTHONPATH as the working directory."""
    foreign = Foreign(tmp_path)
    foreign.add(*importable_modules())
    monkeypatch.chdir(tmp_path)
    with environment(PYTHONPATH=f"{os.pathsep}/kept{os.pathsep}"):
        assert preload_client.python_path() == {
            "PYTHONPATH": "/kept",
            "DDIP_PYTHONPATH": f"{os.pathsep}/kept{os.pathsep}",
        }
        with ddip.Group(1) as group:
            group.run("import os, sys; found = os.environ['PYTHONPATH'], sys.path")
            assert group.pull(["found"])["found"] == (os.environ["PYTHONPATH"], sys.path)
            wait_until(preload_client.ensure_process().asleep.is_set, 60)
    assert foreign.import_stacks() == []


@pytest.mark.parametrize("options", [["-P"], []])
def test_a_process_starts_without_its_directory_on_the_path(options: list[str], tmp_path: Path) -> None:
    """Start the program of the right folder, even if something else is also named ddip."""
    package = tmp_path / "package"
    boot = package / "cluster" / "processes" / "boot.py"
    boot.parent.mkdir(parents=True)
    boot.write_bytes(Path(preload_client.START[-1]).read_bytes())
    (package / "__init__.py").touch()
    for place in (package, boot.parent):
        (place / "random.py").write_text("raise ImportError\n")
    code = "import random, sys\ndef main(): print(sys.argv[1:], [p for p in sys.path if p in ('', sys.argv[-1])])\n"
    (package / "program.py").write_text(code)
    work = tmp_path / "work"
    work.mkdir()
    foreign = Foreign(work)
    foreign.add(*importable_modules())
    command = [sys.executable, *options, str(boot), "ddip.program", "one", str(package)]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert (done.stdout, done.stderr, foreign.import_stacks()) == (f"['one', {str(package)!r}] []\n", "", [])


def test_path_entries_added_by_an_import_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/first", "", "/last"])
    with folder.left_out():
        assert sys.path == ["/first", "/last"]
        sys.path.append("/added")
    assert sys.path == ["/first", "", "/last", "/added"]


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_off_during_an_import(collects: bool) -> None:
    try:
        if not collects:
            gc.disable()
        with folder.left_out():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.fixture
def in_a_removed_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Change to a folder, and remove it."""
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()


def test_a_removed_folder_is_named_before_a_start(in_a_removed_folder: None) -> None:
    for begin in (lambda: ddip.Group(1), lambda: ddip.load_ipython_extension(None)):  # type: ignore[arg-type]
        with pytest.raises(GroupError, match="%cd"):
            begin()


def test_removing_the_folder_leaves_the_group_unchanged(
    group: ddip.Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removed = tmp_path / "gone"
    removed.mkdir()
    former = [member.pid for member in group.members]
    with monkeypatch.context() as patch:
        patch.chdir(removed)
        removed.rmdir()
        for change in (group.restart, lambda: group.change(Request(5))):
            with pytest.raises(GroupError, match="%cd"):
                change()
        group.run("there = True")
    assert [member.pid for member in group.members] == former


@pytest.mark.grid(in_ci=True)
def test_a_profile_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile_default").touch()  # not a folder
    code = "import ddip\ntry: ddip.Group(1)\nexcept ddip.GroupError as error: print(error)"
    variables = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert re.search("IPython cannot use its profile: .*profile_default.* IPYTHONDIR", found.stdout)
