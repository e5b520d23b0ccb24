"""Real engines, shared by the tests: a group of this process, and kernels of notebooks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ddip
from ddip.cluster.processes import preload_client

from .leftovers import assert_nothing_left, family_of, no_shared_memory_left, run_folders
from .notebook import Notebook

FORGET = "%reset_selective -f ^(?!rank$|world_size$|device$).*"


@pytest.fixture(scope="session", autouse=True)
def own_ipython_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Give this process its own IPython profile and run folders; prove at the end that nothing is left."""
    folder = tmp_path_factory.mktemp("ipython")
    os.environ["IPYTHONDIR"] = str(folder)
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ.update([preload_client.ONLY_ENGINES])  # few of the many notebooks and scripts use more
    tempfile.tempdir = None
    if pytestconfig.getoption("--spawn"):
        (folder / "profile_default").mkdir()
        (folder / "profile_default" / "ipython_config.py").write_text("c = get_config()\nc.DipMagics.spawn = True\n")
        assert ddip.Group.__init__.__kwdefaults__
        ddip.Group.__init__.__kwdefaults__["spawn"] = True
    with no_shared_memory_left():
        yield
        assert_nothing_left(os.getpid(), 0)
        preload_client.end_process()
        assert family_of(os.getpid()) == []
        assert run_folders() == []


@contextlib.contextmanager
def whole_preload() -> Iterator[None]:
    """Let preload processes that start here import everything, as those of users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(preload_client.ONLY_ENGINES[0], raising=False)
        yield


@pytest.fixture(scope="session")
def warmed_up(pytestconfig: pytest.Config) -> None:
    """Import everything once in the preload process, so that no rank of this process has to."""
    if preload_client.can_fork() and not pytestconfig.getoption("--spawn"):
        with whole_preload():
            preload = preload_client.ensure_process()
        assert preload.asleep.wait(60)


@pytest.fixture(scope="session")
def group(warmed_up: None) -> Iterator[ddip.Group]:
    """Start two CPU ranks that this process owns."""
    with ddip.Group(2) as group:
        yield group


@pytest.fixture
def cells(group: ddip.Group, request: pytest.FixtureRequest) -> Iterator[ddip.Group]:
    """Return the two ranks with their default limits, without the variables of earlier tests."""
    begin_test(group, request.session, FORGET)
    limits = replace(group.options)
    yield group
    group.options.__dict__.update(limits.__dict__)


@pytest.fixture
def nothing_kept(cells: ddip.Group) -> Iterator[None]:
    """Delete what `dist_state` has saved in a test."""
    yield
    cells.run("import ddip.sharded.state; ddip.sharded.state._kept.clear(); ddip.sharded.state._order.__init__()")


def begin_test(group: ddip.Group, session: pytest.Session, code: str) -> None:
    """Run `code` on a group that tests share; repair the group first if an earlier test has damaged it."""
    if session.testsfailed:  # a failed test may leave anything
        group.repair()
    try:
        group.run(code, quiet=True, show_ranks=[], timeout=10)
    except (ddip.CellError, ddip.GroupError):  # for example ranks that have ended
        group.repair()
        group.run(code, quiet=True, show_ranks=[])


@pytest.fixture
def new_notebook(tmp_path: Path) -> Iterator[Callable[[], Notebook]]:
    """Yield a function that opens notebooks; each is closed at the end and must leave nothing."""
    opened: list[Notebook] = []

    def open_notebook() -> Notebook:
        opened.append(Notebook(tmp_path))
        return opened[-1]

    yield open_notebook
    for notebook in opened:
        notebook.shut_down()
        assert_nothing_left(notebook.pid)


@contextlib.contextmanager
def loaded_notebook(folder: Path) -> Iterator[Notebook]:
    """Start a notebook with ddip loaded; it must leave nothing at its end."""
    notebook = Notebook(folder)
    notebook.ok("%load_ext ddip\n%config DipMagics.report_after = 10")  # most tests compare the whole output
    yield notebook
    notebook.shut_down()
    assert_nothing_left(notebook.pid)


@pytest.fixture(scope="session")
def shared_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Start a notebook with ddip loaded and a group of three ranks."""
    with whole_preload(), loaded_notebook(tmp_path_factory.mktemp("notebook")) as notebook:
        notebook.ok("%makedip -n 3")
        yield notebook


@pytest.fixture
def notebook(shared_notebook: Notebook, pytestconfig: pytest.Config) -> Iterator[Notebook]:
    """Return the shared notebook; restore three ranks without %autodip after each test."""
    yield shared_notebook
    if pytestconfig.getoption("--no-native"):  # ranks may still be blocked
        shared_notebook.run("%makedip --repair")
    shared_notebook.ok("%autodip off\n%makedip -n 3")


@pytest.fixture(scope="session")
def shared_bare_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Start a notebook with ddip loaded and no group."""
    with loaded_notebook(tmp_path_factory.mktemp("bare")) as notebook:
        # while it imports torch, the preload process has children of its own for a moment
        notebook.ok("import ddip.cluster.processes.preload_client as _client\n_client.ensure_process().asleep.wait()")
        yield notebook


@pytest.fixture
def bare_notebook(shared_bare_notebook: Notebook) -> Iterator[Notebook]:
    """Return the shared notebook without a group, and end any group after each test."""
    yield shared_bare_notebook
    shared_bare_notebook.ok("%makedip -k")
    assert_nothing_left(shared_bare_notebook.pid, 0)
