"""The processes of a cluster on this host, before any of them has started."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddip.cluster.ipyparallel import own_cluster
from ddip.cluster.ipyparallel.own_cluster import OwnCluster
from ddip.cluster.processes import ownership
from ddip.errors import GroupError


def test_hosts_that_cannot_be_reached_leave_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Path] = []
    make = ownership.make_run_folder
    monkeypatch.setattr(ownership, "make_run_folder", lambda: made.append(make()) or made[-1])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GroupError, match="h1: ssh "):
        OwnCluster(logging.getLogger("test"), fork=False, hosts=["h1"])
    assert len(made) == 1 and not made[0].exists()


def test_the_end_of_the_preload_process_is_known_before_that_of_its_controller() -> None:
    cluster: Any = OwnCluster.__new__(OwnCluster)
    cluster._controller_exit, cluster._warm = [], SimpleNamespace(died=False)
    cluster.ensure_controller()
    cluster._warm.died = True
    with pytest.raises(GroupError, match=r"the preload process, from which the ranks were forked, ended; %makedip -r"):
        cluster.ensure_controller()


def test_a_run_folder_removed_during_recording_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller whose parent has died removes the folder while the notebook is about to write."""
    cluster = OwnCluster(logging.getLogger("test"), fork=False)
    processes_of = own_cluster.processes_of

    def remove_folder_meanwhile(launchers: Any) -> Any:
        shutil.rmtree(cluster.run_folder)
        return processes_of(launchers)

    monkeypatch.setattr(own_cluster, "processes_of", remove_folder_meanwhile)
    cluster._record()
    monkeypatch.undo()
    cluster.stop()


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("", ""),
        ("  ValueError: 3", ""),
        (
            "  ImportError: x\n\n  ModuleNotFoundError: No module named 'zmq'\n",
            ": ModuleNotFoundError: No module named 'z",
        ),
        (
            "end:\n    ImportError: libcudart.so.13: cannot open",
            ": ImportError: libcudart.so.13: cannot open; install ",
        ),
    ],
)
def test_a_package_that_a_host_lacks_is_named(log: str, advice: str) -> None:
    found = own_cluster._advise_on_packages(log)
    assert found.startswith(advice) and bool(found) == bool(advice)
