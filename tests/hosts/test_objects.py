"""Pushes cross the network once per host, and the notebook's modules can be imported on other hosts."""

from __future__ import annotations

import getpass
import gzip
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ddip
from ddip.cluster.processes import on_host
from ddip.cluster.reach import Reach
from ddip.errors import GroupError, RequestFailed, RequestInterrupted, TransferError
from ddip.group.objects import part_size

from ..cluster.leftovers import wait_until
from ..cluster.notebook import Notebook
from .network import Network

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def used_before(network: Network) -> Iterator[None]:
    """Create the user folders that the first ranks of a host leave permanently.

    These are IPython's profile, and torch's folder for compiled code.
    """
    hosts = [network["h1"], network["h2"]]
    with ddip.Group(1, hosts="h1,h2"):
        pass
    for host in hosts:
        host.path(f"/tmp/torchinductor_{getpass.getuser()}").mkdir(exist_ok=True)
    yield
    for host in hosts:
        shutil.rmtree(host.path(f"/tmp/torchinductor_{getpass.getuser()}"))
        shutil.rmtree(host.path("~/.ipython"), ignore_errors=True)


@pytest.fixture
def group(hosts: Network) -> Iterator[ddip.Group]:
    """Start two ranks on each of two hosts."""
    with ddip.Group(2, hosts="h1,h2") as group:
        yield group


@pytest.fixture
def notebook_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder that no other host has, and put it on the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def sent_bytes() -> int:
    """Return how many bytes this host has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def pull_from_all(group: ddip.Group, name: str) -> list[object]:
    return [values[name] for values in group.pull_all([name], range(group.world_size))[0]]


def test_a_large_push_crosses_the_network_once_per_host(group: ddip.Group) -> None:
    large = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)
    total = int(large.sum())
    for ranks, all_totals in (None, [total] * 4), ([1, 2, 3], [0, total, total, total]):
        group.run("import numpy\nlarge = numpy.zeros(1)")
        before = sent_bytes()
        group.push({"large": large, "small": 1}, ranks)
        assert 2 * 64 * MIB < sent_bytes() - before < 2 * 68 * MIB
        group.run("total = int(large.sum())")
        assert pull_from_all(group, "total") == all_totals


def test_a_rank_dying_during_a_push_leaves_nothing_behind(group: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_size, "FIRST", MIB)
    monkeypatch.setattr(part_size, "MOST", MIB)
    group.push({"large": 1})
    host, pid, parts = group.ranks.host(2), group.members[2].pid, []

    def kill_in_the_middle(text: str, share: float | None = None) -> None:
        parts.append(text)
        if len(parts) == 3:
            host.ask(on_host.send_signal, pid, int(signal.SIGKILL))

    with pytest.raises(RequestFailed, match="SIGKILL") as caught:
        group.push({"large": bytes(8 * MIB)}, progress=kill_in_the_middle)
    assert caught.value.by_rank[2].name == "RankEnded"
    assert group.repair(["large"], 0) == [2]
    assert pull_from_all(group, "large") == [1] * 4


def test_a_stop_in_the_middle_changes_nothing(group: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_size, "FIRST", MIB)
    monkeypatch.setattr(part_size, "MOST", MIB)
    group.push({"large": 1})
    parts = []

    def stop_in_the_middle(text: str, share: float | None = None) -> None:
        parts.append(text)
        if len(parts) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(RequestInterrupted):
        group.push({"large": bytes(8 * MIB)}, progress=stop_in_the_middle)
    assert len(parts) == 3
    assert pull_from_all(group, "large") == [1] * 4
    group.run(
        "from pathlib import Path\n"
        "held = [str(path.readlink()) for path in Path('/proc/self/fd').iterdir() if path.is_symlink()]\n"
        "held = [name for name in [*held, *Path('/proc/self/maps').open()] if 'ddip-push' in name]"
    )
    assert pull_from_all(group, "held") == [[]] * 4


def test_pushed_modules_can_be_imported_without_their_folder(group: ddip.Group, notebook_folder: Path) -> None:
    module, package = notebook_folder / "mine.py", notebook_folder / "pack"
    module.write_text("x = 1\n\ndef f():\n    return x\n")
    package.mkdir()
    (package / "__init__.py").write_text("from .deep import y\n")
    (package / "deep.py").write_text("y = 'deep'\n")
    import mine  # type: ignore[import-not-found]

    with pytest.raises(TransferError, match="f .*; %dipush --modules mine "):
        group.push({"f": mine.f})
    pushed = group.push_modules("mine, pack")
    assert (pushed.hosts, pushed.sent, pushed.notices) == (("h1", "h2"), ("h1", "h2"), [])
    group.run("import mine, pack\nfound = mine.f(), pack.y, mine.__file__")
    assert all((x, y) == (1, "deep") for x, y, _ in pull_from_all(group, "found"))  # type: ignore[misc]
    assert len({file for *_, file in pull_from_all(group, "found")}) == 2  # type: ignore[misc]
    group.push({"g": mine.f})  # pickled by name
    group.run("assert g is mine.f")

    assert str(group.push_modules("mine,pack")) == "h1, h2 had mine, pack already, unchanged"
    module.write_text("x = 2\n\ndef f():\n    return x\n")
    pushed = group.push_modules("mine,pack")
    (notice,) = pushed.notices
    assert notice.startswith("mine is imported already on ranks 0-3, which keeps the old version: run import importlib")
    group.run("assert mine.f() == 1")
    module.write_text("x = 3\n\ndef f():\n    return x\n")
    assert group.push_modules("mine", reload=True).notices == []
    group.run("assert mine.f() == g() == 3")


def test_new_ranks_and_restarted_groups_have_the_modules(group: ddip.Group, notebook_folder: Path) -> None:
    (notebook_folder / "mine_too.py").write_text("x = 1\n")
    group.push_modules("mine_too")
    with pytest.raises(ddip.CellError):
        group.run("import os, signal\nif rank == 3: os.kill(os.getpid(), signal.SIGKILL)")
    assert group.repair() == [3]
    group.run("import mine_too")
    group.cluster.hosts[1].kill()  # type: ignore[attr-defined]
    wait_until(lambda: len(group.ranks.ended) == 2)
    assert group.repair() == [2, 3]
    group.run("import mine_too")
    group.restart()
    group.run("import mine_too")


def test_a_host_without_the_notebooks_folder_is_reported(notebook_folder: Path) -> None:
    with ddip.Group(1, hosts="h1,h2") as group:
        assert group.notices == [
            f"h1, h2: {notebook_folder} does not exist, ranks start in {os.path.expanduser('~')}; "
            "--cd FOLDER names another"
        ]
    with ddip.Group(1, hosts="h1,h2", reach=Reach(directory="/usr")) as group:
        assert group.notices == []
        group.run("import os; assert os.getcwd() == '/usr'")


def test_a_missing_folder_that_was_requested_is_an_error(hosts: Network) -> None:
    with pytest.raises(GroupError, match="^h1: /no/such .*--cd\nh2: /no/such .*--cd$"):
        ddip.Group(1, hosts="h1,h2", reach=Reach(directory="/no/such"))


def test_a_notebook_pushes_its_modules_and_reloads_them(hosts: Network, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    try:
        started = notebook.ok("%load_ext ddip\n%makedip --hosts h1:1,h2:1").text
        home = os.path.expanduser("~")
        assert f"ddip: h1, h2: {tmp_path} does not exist, ranks start in {home}; --cd FOLDER names another\n" in started
        notebook.ok("%%writefile mine.py\nx = 1")
        failed = notebook.fails("%%dip\nimport mine").message
        assert "; %dipush --modules mine " in failed
        assert notebook.ok("%dipush --modules mine").text == "ddip: pushed mine: 6 B to h1, h2\n"
        assert notebook.ok("%dipush --modules mine").text == "ddip: h1, h2 had mine already, unchanged\n"
        notebook.ok("%%dip\nimport mine\nassert mine.x == 1")
        notebook.ok("%%writefile mine.py\nx = 22")
        assert "mine is imported already on ranks 0, 1, which keeps" in notebook.ok("%dipush --modules mine").text
        notebook.ok("%load_ext autoreload\n%autoreload 2")
        notebook.ok("%%writefile mine.py\nx = 333")
        assert notebook.ok("%dipush --modules mine").text == "ddip: pushed mine: 8 B to h1, h2\n"
        notebook.ok("%%dip\nassert mine.x == 333")
        error = notebook.fails("%makedip -r --hosts h1:1,h2:1 --cd /no/such").message
        assert re.search("h1: /no/such .*--cd", error)
    finally:
        notebook.shut_down()


def test_traces_of_remote_ranks_reach_the_notebook(group: ddip.Group, notebook_folder: Path) -> None:
    group.run("import time, torch, torch.distributed as dist\nx = torch.ones(4)\ndist.all_reduce(x)")
    group.run("if rank == 2: time.sleep(0.5)\ndist.all_reduce(x)", profile="out")
    profile = group.last_profile
    assert profile is not None and list(profile.ranks) == [0, 1, 2, 3] and profile.slowest_rank == 2
    assert all(profile.ranks[rank].waiting > 0.3 for rank in (0, 1, 3))
    names = {f"rank_{rank}.pt.trace.json.gz" for rank in range(4)} | {"all_ranks.perfetto-trace"}
    assert {path.name for path in (notebook_folder / "out").iterdir()} == names
    events = json.loads(gzip.decompress((notebook_folder / "out" / "all_ranks.perfetto-trace").read_bytes()))
    ends = {
        event["pid"]: event["ts"] + event["dur"]
        for event in events["traceEvents"]
        if event["name"] == "gloo:all_reduce"
    }
    assert len(ends) == 4 and max(ends.values()) - min(ends.values()) < 100_000  # microseconds
