"""The preload process: when it exists, who is forked from it, what it reacts to, and when it ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import ddip
from ddip.cluster.processes import preload_client
from ddip.errors import GroupError
from ddip.group.members.placement import Request

from .apps import installed_app
from .environment import environment
from .leftovers import assert_nothing_left, family_of, wait_until, with_title
from .notebook import Notebook

pytestmark = [
    pytest.mark.skipif("config.getoption('--spawn')", reason="there is no preload process"),
    pytest.mark.skipif(not preload_client.can_fork(), reason="processes cannot be forked here"),
]
NewNotebook = Callable[[], Notebook]


def preload_pid(notebook: Notebook) -> int:
    """Return the PID of the notebook's preload process."""
    return int(
        notebook.ok(
            "from ddip.cluster.processes import preload_client\nprint(preload_client.ensure_process().pid)"
        ).stdout
    )


def rank_parents(notebook: Notebook) -> set[int]:
    """Return the parents of the ranks of `notebook`."""
    notebook.ok("%dipper g\nparents = [psutil.Process(m.pid).ppid() for m in g.members]")
    return {int(pid) for pid in notebook.ok("print(*parents)").stdout.split()}


@pytest.mark.grid(in_ci=True)
def test_loading_starts_the_preload_process_for_every_start(new_notebook: NewNotebook) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\nimport psutil, sys")
    wait_until(lambda: len(with_title(family_of(notebook.pid), "ddip preload process (pid ")) == 1)
    (warm,) = family_of(notebook.pid)
    assert warm.pid == preload_pid(notebook)
    for line in ("%makedip -n 1", "%makedip -r", "%makedip -n 2"):
        notebook.ok(line)
        assert rank_parents(notebook) == {warm.pid}
    notebook.ok("assert 'torch' not in sys.modules")
    notebook.ok("%%dip\nimport sys\nassert 'torch._dynamo' not in sys.modules")  # DDIP_WARM=engine leaves it out
    notebook.ok("%unload_ext ddip")
    assert family_of(notebook.pid) == []


@pytest.mark.grid
def test_a_trait_turns_the_preload_process_off(new_notebook: NewNotebook) -> None:
    notebook = new_notebook()
    notebook.ok("""
        get_ipython().config.DipMagics.warm = False
        %load_ext ddip
        import psutil
    """)
    assert family_of(notebook.pid) == []
    notebook.ok("%makedip -n 1")
    assert rank_parents(notebook) == {preload_pid(notebook)}


@pytest.mark.grid
def test_a_trait_has_apps_imported_beforehand(new_notebook: NewNotebook) -> None:
    notebook = new_notebook()
    with installed_app(notebook.folder, "import os, pathlib\npathlib.Path('imported_in').write_text(str(os.getpid()))"):
        notebook.ok("get_ipython().config.DipMagics.warm_apps = ['toy']\n%load_ext ddip")
        imported_in = notebook.folder / "imported_in"
        wait_until(lambda: imported_in.exists() and imported_in.read_text())
        assert int(imported_in.read_text()) == preload_pid(notebook)


@pytest.mark.grid
def test_a_trait_has_engines_spawned(new_notebook: NewNotebook) -> None:
    notebook = new_notebook()
    notebook.ok("""
        get_ipython().config.DipMagics.spawn = True
        %load_ext ddip
        import psutil
    """)
    assert family_of(notebook.pid) == []
    notebook.ok("%makedip -n 2")
    assert rank_parents(notebook) == {notebook.pid}
    notebook.ok("%%dip\nimport torch.distributed as dist; dist.barrier()")
    notebook.kill()
    assert_nothing_left(notebook.pid, 5)


@pytest.mark.grid
def test_an_unused_preload_process_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP", "here")  # a separate process, which the end of other ranks does not wake up
    warm = preload_client.ensure_process()
    assert warm.asleep.wait(60)
    process = psutil.Process(warm.pid)

    def count_switches() -> int:
        return int(process.num_ctx_switches().voluntary)

    wait_until(lambda: process.status() == psutil.STATUS_SLEEPING)
    before = process.cpu_times(), count_switches()
    with pytest.raises(psutil.TimeoutExpired):
        process.wait(1)
    assert (process.cpu_times(), count_switches()) == before


@pytest.mark.grid
def test_a_preload_process_that_hangs_is_abandoned(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "torch").mkdir()
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(1000)"
    (tmp_path / "torch" / "__init__.py").write_text(code)
    with environment(tmp_path):
        hanging = preload_client.ensure_process()
        wait_until(begun.exists)
        with pytest.raises(GroupError, match="controller .*-t SECONDS"):
            ddip.Group(1, timeout=1)
        wait_until(lambda: hanging.ended)


@pytest.fixture
def own_warm_process() -> Iterator[None]:
    """Use a new preload process; that of the other tests is out of reach."""
    with environment():
        yield


@pytest.mark.grid
def test_if_the_preload_process_dies_early_engines_are_spawned(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(1000)"
    (tmp_path / "takes_its_time.py").write_text(code)
    with environment(tmp_path):
        warm = preload_client.ensure_process(["takes_its_time"])
        wait_until(begun.exists)

        def kill_preload_process() -> None:
            wait_until(lambda: warm._children)  # a fork has been requested
            os.kill(warm.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill_preload_process)
        thread.start()
        with ddip.Group(1) as group:
            thread.join()
            group.run("assert world_size == 1")
            (controller,) = with_title(psutil.Process().children(), "ddip controller")
            assert controller.ppid() == os.getpid()


@pytest.mark.grid
def test_libraries_read_changed_variables_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["OMP_NUM_THREADS", "TORCH_SHOW_CPP_STACKTRACES", "NCCL_DEBUG", "MADE_UP"]

    def settings_on_rank(group: ddip.Group) -> list[str | None]:
        group.run(f"import os, torch; found = [*map(os.environ.get, {names}), torch.get_num_threads()]")
        return list(group.pull(["found"])["found"])

    first = preload_client.ensure_process()
    for name in names[:3]:
        monkeypatch.setenv(name, "1")
    with ddip.Group(1) as group:
        second = preload_client.ensure_process()
        assert second.pid != first.pid
        assert psutil.Process(group.members[0].pid).ppid() == second.pid
        assert settings_on_rank(group) == ["1", "1", "1", None, 1]
        monkeypatch.setenv("NCCL_DEBUG", "INFO")  # not read at import, so no new preload process is needed
        group.restart()
        assert preload_client.ensure_process().pid == second.pid
        assert settings_on_rank(group) == ["1", "1", "INFO", None, 1]
        monkeypatch.setenv("MADE_UP", "here")
        group.restart()
        assert preload_client.ensure_process().pid != second.pid
        assert settings_on_rank(group) == ["1", "1", "INFO", "here", 1]
    wait_until(lambda: second.ended)


LIBRARIES = ["torch._dynamo", "torchvision", "sklearn", "lightning", "fastai.vision.all", "deepspeed"]
"""Modules that set environment variables when they are imported."""


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_the_notebook_imports_needs_no_new_preload_process(library: str) -> None:
    if importlib.util.find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed")
    code = f"""if True:
        from ddip.cluster.processes import preload_client
        preload = preload_client.ensure_process()
        import {library}
        assert preload.fits()
        preload_client.end_process()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.grid
def test_a_replaced_preload_process_lives_until_its_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP", "")  # a long-lived rank of the shared group may have the former one as its parent
    with ddip.Group(1) as group:
        former = psutil.Process(group.members[0].pid).ppid()
        group.run("kept = 1")
        monkeypatch.setenv("MADE_UP", "here")
        assert preload_client.ensure_process().pid != former
        group.change(Request(n=2))
        assert [psutil.Process(m.pid).ppid() for m in group.members] == [former, preload_client.ensure_process().pid]
        assert group.pull(["kept"]) == {"kept": 1}
    wait_until(lambda: not psutil.pid_exists(former))


@pytest.mark.grid
def test_imports_of_an_app_happen_once_for_all_ranks(tmp_path: Path) -> None:
    # the app is only on the notebook's import path
    with installed_app(tmp_path, "import os\nimported_in = os.getpid()\n"), ddip.Group(2, app="toy") as group:
        group.run("import toy_app; found = toy_app.imported_in")
        found = [values["found"] for values in group.pull_all(["found"], [0, 1])[0]]
        assert found == [preload_client.ensure_process().pid] * 2


@pytest.mark.grid
def test_an_app_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    fails_to_start = pytest.raises(GroupError, match="nowhere_to_be_found")
    with installed_app(tmp_path, "import nowhere_to_be_found\n"), fails_to_start:
        ddip.Group(1, app="toy")


@pytest.mark.grid
def test_engines_are_spawned_if_cuda_is_in_use(tmp_path: Path) -> None:
    """Simulate CUDA's initialization; tests/cluster/test_gpus.py uses a real GPU."""
    code = "import sys, torch\nif sys.argv[0].endswith('preload_server.py'): torch.cuda._initialized = True\n"
    with installed_app(tmp_path, code), ddip.Group(1, app="toy") as group:
        assert group.cluster.spawned == "CUDA is initialised in the preload process"
        assert psutil.Process(group.members[0].pid).ppid() == os.getpid()
        group.restart()
        assert psutil.Process(group.members[0].pid).ppid() == os.getpid()
        group.run("import torch.distributed as dist\ndist.barrier()")


@pytest.mark.grid
@pytest.mark.usefixtures("own_warm_process")
def test_a_thread_may_start_the_preload_process_and_end() -> None:
    """Linux sends the parent-death signal when the thread that started the child ends."""
    pids = []
    thread = threading.Thread(target=lambda: pids.append(preload_client.ensure_process().pid))
    thread.start()
    thread.join()
    with ddip.Group(1) as group:
        assert [psutil.Process(member.pid).ppid() for member in group.members] == pids


@pytest.mark.grid
def test_the_preload_process_ends_with_its_kernel_despite_forks(new_notebook: NewNotebook) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 1")
    fork = int(notebook.ok("import os, time\nchild = os.fork()\nif not child: time.sleep(1000)\nprint(child)").stdout)
    try:
        notebook.kill()
        assert_nothing_left(notebook.pid, 5)
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


@pytest.mark.grid
def test_the_preload_process_ends_with_its_script() -> None:
    code = (
        "import os\nfrom ddip.cluster.processes import preload_client\n"
        "print(os.getpid(), preload_client.ensure_process().pid, flush=True)\n"
    )
    for end in ("", "os._exit(0)", "os.kill(os.getpid(), 9)"):
        done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True)
        assert done.stderr == ""
        owner, warm = map(int, done.stdout.split())
        wait_until(lambda: not psutil.pid_exists(warm), 5)  # noqa: B023
        assert_nothing_left(owner, 0)


def test_a_fork_after_an_abandoned_start_creates_no_file(tmp_path: Path, group: ddip.Group) -> None:
    warm = preload_client.ensure_process()
    log = tmp_path / "log"
    child = warm.fork("ddip.rank.kernel.engine", imports=[], argv=[], env={"DDIP_OWNER": str(warm.pid)}, log=str(log))
    assert child.exit.result(30) == 0
    assert not log.exists()


def test_ranks_do_not_finalize_objects_of_the_preload_process(group: ddip.Group) -> None:
    group.run("import weakref\nassert not next(iter(weakref.finalize._registry)).atexit")


@pytest.mark.grid
def test_every_rank_of_many_runs_its_exit_functions(tmp_path: Path) -> None:
    with ddip.Group(32) as group:
        group.run(f"import atexit, pathlib\n_ = atexit.register(pathlib.Path({str(tmp_path)!r}, str(rank)).touch)")
    assert len([*tmp_path.iterdir()]) == 32
