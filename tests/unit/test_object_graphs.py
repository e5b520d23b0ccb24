"""Random object graphs, pickled and restored in one process; see `tests/object_graphs.py`."""

from __future__ import annotations

import pytest

from tests import object_graphs

pytestmark = pytest.mark.filterwarnings("ignore:Seems like:UserWarning")


def test_graphs_of_objects_arrive_unchanged() -> None:
    for seed in range(12):
        trial = object_graphs.try_graph(seed)
        assert not trial.differences, f"{object_graphs.Program(seed).text}\n{trial.names}\n{trial.differences}"
