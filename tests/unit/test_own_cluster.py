"""The processes of a cluster on this host, before any of them has been started."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import pytest

from ddip.cluster.ipyparallel import own_cluster
from ddip.cluster.ipyparallel.own_cluster import OwnCluster


def test_a_run_folder_that_goes_while_its_record_is_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller whose parent has died removes it, and the notebook may be about to write."""
    cluster = OwnCluster(logging.getLogger("test"), fork=False)
    look = own_cluster.processes_of

    def meanwhile(launchers: Any) -> Any:
        shutil.rmtree(cluster.run_folder)
        return look(launchers)

    monkeypatch.setattr(own_cluster, "processes_of", meanwhile)
    cluster._record()
    monkeypatch.undo()
    cluster.stop()
