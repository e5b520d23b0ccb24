"""Groups that change their size or device, restart, or fail to start."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ddip
from ddip.cluster.ipyparallel.own_cluster import OwnCluster
from ddip.errors import BadInput, GroupError, RequestFailed
from ddip.group.members.placement import Request

from .apps import installed_app
from .environment import environment
from .leftovers import (
    assert_nothing_left,
    controllers_of,
    files_and_processes_of,
    files_of,
    processes_of,
    shared_memory_files,
    wait_until,
)
from .meanwhile import meanwhile, press_stop
from .rank_errors import raises_on_ranks


@pytest.fixture
def own_group() -> Iterator[ddip.Group]:
    """Start a group that the test may change in any way."""
    other_pids = {p.pid for p in processes_of(os.getpid())}
    group = ddip.Group(2)
    yield group
    folder = group.cluster.run_folder
    group.shutdown()
    assert not folder.exists()
    assert {
        p.pid for p in processes_of(os.getpid())
    } <= other_pids  # a process of an earlier test may only now have ended


@contextlib.contextmanager
def slow_torch(folder: Path) -> Iterator[None]:
    """Keep engines from starting: their import of torch sleeps."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("import time; time.sleep(1000)\n")
    with environment(folder):
        yield


PROOF = "import torch, torch.distributed as dist\nx = torch.tensor(rank + 1)\ndist.all_reduce(x)\nproof = x.item()"


def sums_of_ranks(group: ddip.Group) -> list[int]:
    """Return the sum of rank + 1 over all ranks, as each rank computes it."""
    group.run(PROOF)
    return [found["proof"] for found in group.pull_all(["proof"], range(group.world_size))[0]]


def test_remaining_ranks_keep_their_variables_when_the_group_is_resized(own_group: ddip.Group, tmp_path: Path) -> None:
    own_group.run("mine = rank + 100")
    before = [member.pid for member in own_group.members]

    assert own_group.change(Request(n=3))
    assert [member.pid for member in own_group.members][:2] == before
    assert sums_of_ranks(own_group) == [6, 6, 6]
    own_group.run("has = globals().get('mine')")
    assert [v["has"] for v in own_group.pull_all(["has"], range(3))[0]] == [100, 101, None]
    own_group.run("sizes = (world_size, __import__('os').environ['WORLD_SIZE'], dist.get_world_size())")
    assert own_group.pull(["sizes"], 2) == {"sizes": (3, "3", 3)}

    assert own_group.change(Request(n=1))
    assert [member.pid for member in own_group.members] == before[:1]
    assert sums_of_ranks(own_group) == [1]
    assert own_group.pull(["mine"]) == {"mine": 100}
    assert before[1] not in {p.pid for p in processes_of(os.getpid())}

    # the same request, or an empty one, changes nothing
    assert not own_group.change(Request(n=1))
    assert not own_group.change(Request())

    # a refused change leaves the group as it is
    with pytest.raises(BadInput, match="-b nope"):
        own_group.change(Request(n=2, backend="nope"))
    with pytest.raises(BadInput, match="-b nope"):
        own_group.restart(Request(n=2, backend="nope"))
    assert sums_of_ranks(own_group) == [1]
    assert own_group.pull(["mine"]) == {"mine": 100}

    # engines that do not start leave the group as it is
    running = {p.pid for p in processes_of(os.getpid())}
    own_group.options.timeout = 0.2
    with slow_torch(tmp_path), pytest.raises(GroupError, match="0 of 1"):
        own_group.change(Request(n=2))
    own_group.options.timeout = 60
    assert sums_of_ranks(own_group) == [1]
    assert own_group.pull(["mine"]) == {"mine": 100}
    assert {p.pid for p in processes_of(os.getpid())} == running

    # a restart gives the same group without its variables
    own_group.restart()
    assert [member.pid for member in own_group.members] != before[:1]
    own_group.run("has = 'mine' in globals()")
    assert own_group.pull(["has"]) == {"has": False}


@pytest.mark.grid
def test_every_later_cell_names_an_ended_rank(own_group: ddip.Group) -> None:
    with raises_on_ranks({1: "RankEnded"}):
        own_group.run("import os, signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(GroupError, match="^rank 1: .*--repair"):
        own_group.run("pass")
    assert [info.state for info in own_group.info()] == ["idle", "ended"]
    own_group.restart()
    assert sums_of_ranks(own_group) == [3, 3]


@pytest.mark.grid
def test_engines_that_miss_the_timeout_leave_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = files_and_processes_of(os.getpid())
    with slow_torch(tmp_path), pytest.raises(GroupError, match="0 of 2"):
        ddip.Group(2, timeout=3)
    gc.collect()
    assert caplog.text == ""  # asyncio logs exceptions that were never retrieved
    assert files_and_processes_of(os.getpid()) == before


def test_an_engine_that_cannot_start_explains_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('this torch is broken')\n")
    before = files_and_processes_of(os.getpid())
    fails_to_start = pytest.raises(GroupError, match="this torch is broken")
    with environment(tmp_path), fails_to_start:
        ddip.Group(2)
    assert files_and_processes_of(os.getpid()) == before


def test_a_backend_that_this_torch_lacks_is_named() -> None:
    with pytest.raises(BadInput, match="-b mpi: .*gloo"):
        ddip.Group(1, backend="mpi")


@pytest.mark.grid
def test_the_number_of_threads_set_by_the_user_stays() -> None:
    with environment(OMP_NUM_THREADS="1"), ddip.Group(1) as group:
        group.run("import os, torch; found = (os.environ['OMP_NUM_THREADS'], torch.get_num_threads())")
        assert group.pull(["found"]) == {"found": ("1", 1)}


def test_this_process_keeps_nothing_after_its_last_group() -> None:
    before = files_and_processes_of(os.getpid())  # a shared group may run
    group = ddip.Group(1)
    assert set(files_of(os.getpid())) > before[0] and files_and_processes_of(os.getpid())[1].keys() > before[1].keys()
    group.shutdown()
    group.shutdown()
    assert files_and_processes_of(os.getpid()) == before


APP = """
import os
import signal
import subprocess
import sys
import threading
import time
state = "not prepared"
def prepare():
    global state
    import torch.distributed as dist
    state = f"prepared rank {dist.get_rank()} of {dist.get_world_size()}"
def release():
    global state
    state = "released"
def command(text):
    global state
    state = text
"""


@pytest.fixture
def toy_app(tmp_path: Path) -> Iterator[None]:
    """Install an app that remembers its calls."""
    with installed_app(tmp_path, APP):
        yield


@pytest.mark.grid
@pytest.mark.usefixtures("toy_app")
def test_an_app_is_prepared_commanded_and_released_on_every_rank() -> None:
    def app_states(group: ddip.Group) -> list[str]:
        group.run("import toy_app; state = toy_app.state")
        return [found["state"] for found in group.pull_all(["state"], range(group.world_size))[0]]

    with pytest.raises(BadInput, match="-a toys: .*type -a toy$"):
        ddip.Group(1, app="toys")
    with ddip.Group(1) as group:
        group.run("kept = 1")
        assert app_states(group) == ["not prepared"]
        assert group.change(Request(app="toy"))
        assert app_states(group) == ["prepared rank 0 of 1"]
        group.command("save")
        assert app_states(group) == ["save"]
        assert group.change(Request(n=2))
        assert app_states(group) == ["prepared rank 0 of 2", "prepared rank 1 of 2"]
        assert group.pull(["kept"]) == {"kept": 1}
        assert group.change(Request(n=1))
        assert app_states(group) == ["prepared rank 0 of 1"]


@pytest.mark.grid
def test_the_app_of_the_documentation_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "apps.md").read_text()
    module, code = re.search(r"```python\n(# (\w+).py: .*?)```", page, re.DOTALL).group(2, 1)  # type: ignore[union-attr]
    assert f'\nseeded = "{module}"\n' in page
    with installed_app(tmp_path, code, module, "seeded"), ddip.Group(2, app="seeded") as group:
        drawn = []
        for seed in ("0", "7", "7"):
            group.command(seed)
            group.run("import torch; drawn = float(torch.rand(()))")
            drawn.append(group.pull_all(["drawn"], [0, 1])[0])
    assert drawn[1] == drawn[2] != drawn[0] and drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("pass", 0, id="ends", marks=pytest.mark.grid),
        pytest.param("raise SystemExit(3)", 3, id="exits", marks=pytest.mark.grid),
        pytest.param("1 / 0", 1, id="fails", marks=pytest.mark.grid),
        pytest.param("os._exit(4)", 4, id="is cut off", marks=pytest.mark.grid),
    ],
)
def test_nothing_is_left_of_a_script_that(tmp_path: Path, end: str, code: int) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os, ddip\ngroup = ddip.Group(1)\ngroup.run('print(rank + 40)')\n"
        f"print(os.getpid(), flush=True)\n{end}\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    answer, pid = done.stdout.splitlines()
    assert answer == "40"
    assert done.stderr.count("Traceback") == (end == "1 / 0")
    assert_nothing_left(int(pid), 10 if end == "os._exit(4)" else 0)


@pytest.mark.grid
def test_a_script_needs_no_streams(tmp_path: Path) -> None:
    """Close stdin, stdout and stderr, as a service may."""
    code = (
        "import ddip\nwith ddip.Group(1) as group:\n    group.run('import sys; print(1); print(2, file=sys.stderr); 3')"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0


def test_an_interrupted_start_leaves_nothing() -> None:
    before = files_and_processes_of(os.getpid())

    def press_stop(text: str, share: float | None = None) -> None:
        if "engines are up" in text:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ddip.Group(2, progress=press_stop)
    assert files_and_processes_of(os.getpid()) == before
    with ddip.Group(1) as group:
        assert sums_of_ranks(group) == [1]


@pytest.mark.grid(in_ci=True)
def test_a_start_stopped_while_connecting_leaves_no_client() -> None:
    """The controller answers the client after the start has been stopped."""
    before = set(threading.enumerate())
    cluster = OwnCluster(logging.getLogger("ddip"), fork=False)
    try:
        cluster._start_controller(60)
        written = Path(cluster._profile).rglob  # the last file that a client waits for, completely written
        wait_until(lambda: any(f.read_text().endswith("}") for f in written(f"*{cluster._name}-engine.json")))
        controller = psutil.Process(cluster._ipp.controller.pid)
        controller.suspend()

        def waits_for_the_controller() -> bool:
            stack = traceback.extract_stack(sys._current_frames()[cluster._loop.thread.ident or 0])
            return stack[-1].name == "poll" and any("ipyparallel" in frame.filename for frame in stack)

        pressed = meanwhile(waits_for_the_controller, press_stop)
        with pytest.raises(KeyboardInterrupt):
            cluster._connect(time.monotonic() + 60)
        pressed.join()
        controller.resume()
        wait_until(lambda: not waits_for_the_controller())
    finally:
        cluster.stop()
    assert set(threading.enumerate()) <= before


@pytest.mark.grid
def test_a_controller_that_cannot_start_explains_and_leaves_nothing() -> None:
    before = files_and_processes_of(os.getpid())
    keys = environment(IPP_ENABLE_CURVE="1", IPP_CURVE_SECRETKEY="not a key", IPP_CURVE_PUBLICKEY="not a key")
    with keys, pytest.raises(GroupError, match="Controller stopped"):
        ddip.Group(1)
    assert files_and_processes_of(os.getpid()) == before


def test_a_group_that_cannot_form_explains_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_and_processes_of(os.getpid())
    monkeypatch.setattr("ddip.group.process_group.network.loopback_name", lambda: "nowhere0")
    began = time.monotonic()
    with pytest.raises(GroupError, match="nowhere0"):
        ddip.Group(2, timeout=60)
    assert time.monotonic() - began < 50
    assert files_and_processes_of(os.getpid()) == before


@pytest.mark.grid
def test_a_change_that_fails_on_one_rank_suggests_a_repair(own_group: ddip.Group) -> None:
    own_group.run("from torch.utils.data import DistributedSampler; sampler = DistributedSampler(range(12))")
    own_group.run("import torch.distributed as dist, os\nif rank == 1: dist.init_process_group = None")
    with pytest.raises(GroupError, match="rank 1: TypeError"):
        own_group.change(Request(n=3))
    with pytest.raises(GroupError, match="rank 1: TypeError.*--repair"):
        own_group.run("pass")
    assert own_group.repair() == [1]
    with raises_on_ranks({0: "RuntimeError"}):  # the sampler would still read for two ranks
        own_group.run("list(sampler)", ranks=[0])
    assert sums_of_ranks(own_group) == [6, 6, 6]


@pytest.mark.grid
def test_a_change_that_fails_during_leave_ends_new_engines(own_group: ddip.Group) -> None:
    running = {p.pid for p in processes_of(os.getpid())}
    own_group.run("from ddip.rank.process_group import membership\nif rank == 1: membership.leave_group = None")
    with pytest.raises(RequestFailed, match="rank 1: TypeError"):
        own_group.change(Request(n=3))
    assert {p.pid for p in processes_of(os.getpid())} == running
    with pytest.raises(GroupError, match="rank 1: TypeError.*--repair"):
        own_group.run("pass")
    assert own_group.repair() == [1]
    assert sums_of_ranks(own_group) == [3, 3]


def test_shared_memory_of_a_cell_disappears_with_the_group() -> None:
    with ddip.Group(1) as group:
        group.run("from multiprocessing.shared_memory import SharedMemory\nkept = SharedMemory(create=True, size=1000)")
        group.run("name = kept.name")
        name = group.pull(["name"])["name"]
        assert name in shared_memory_files()
    assert name not in shared_memory_files()


@pytest.mark.grid
def test_the_end_of_the_controller_is_reported_in_every_cell(own_group: ddip.Group) -> None:
    def kill_controller() -> None:
        wait_until(lambda: own_group.info()[0].state == "busy")
        controllers_of(os.getpid())[-1].kill()

    thread = threading.Thread(target=kill_controller)
    thread.start()
    with pytest.raises(GroupError, match="controller .*%makedip -r"):
        own_group.run("import time; time.sleep(1000)")
    thread.join()
    with pytest.raises(GroupError, match="controller .*ended"):
        own_group.run("pass")
    own_group.restart()
    assert sums_of_ranks(own_group) == [3, 3]


@pytest.mark.grid(in_ci=True)
def test_a_fork_of_the_owner_does_not_end_the_group(own_group: ddip.Group) -> None:
    child = os.fork()
    if child == 0:
        own_group.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    assert sums_of_ranks(own_group) == [3, 3]


@pytest.mark.grid
def test_a_group_without_its_folder_works_but_cannot_grow(own_group: ddip.Group) -> None:
    own_group.run(f"import shutil\nif rank: shutil.rmtree({str(own_group.cluster.run_folder)!r})")
    with pytest.raises(ddip.CellError):
        own_group.run("""
            import torch.distributed as dist
            if rank: raise ValueError
            dist.barrier()
        """)
    assert sums_of_ranks(own_group) == [3, 3]
    with pytest.raises(GroupError, match=f"{own_group.cluster.run_folder}.*%makedip -r"):
        own_group.change(Request(n=3))
    assert sums_of_ranks(own_group) == [3, 3]
