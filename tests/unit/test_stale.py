"""Objects of a former group, which must not be used after a change of its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from ddip.rank.inspection import stale, state_history


class Shard:
    """A user's object that knows its rank and the number of ranks."""

    def __init__(self, process_index: int, world_size: int) -> None:
        self.process_index, self.world_size = process_index, world_size


def test_only_objects_that_name_a_rank_are_stale_after_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any object may have an attribute of 0, and another of 1, such as a scheduler."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    variables: dict[str, Any] = {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "sampler": DistributedSampler(range(4), 1, 0),
        "shard": Shard(0, 1),
    }
    monkeypatch.setattr(state_history, "user_namespace", lambda: variables)
    assert stale.refuse_stale(stale.rank_marks(0), 1) == ["sampler", "shard"]
    optimizer.step()
    variables["scheduler"].step()
    assert variables["scheduler"].last_epoch == 1
    with pytest.raises(RuntimeError, match="group of 1 ranks"):
        list(variables["sampler"])


def test_a_copied_rank_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that says that it is on rank 1 would read that rank's part of the data a second time."""
    variables: dict[str, Any] = {"shard": Shard(1, 2), "own": Shard(0, 2), "other": Shard(1, 2), "numbers": {"rank": 1}}
    monkeypatch.setattr(state_history, "user_namespace", lambda: variables)
    assert stale.find_copied_ranks(["shard", "own", "numbers"], 1, 2) == ["shard.process_index"]
