"""A group without the native mechanisms: nothing hangs, and a rank that waits in vain is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.errors import CellInterrupted, GroupError

from .meanwhile import meanwhile, press_stop
from .ten_steps import TEN_STEPS

TRAIN = f"{TEN_STEPS}\nundisturbed = train()"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ddip.Group]:
    monkeypatch.setenv("DDIP_NATIVE", "0")
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run(TRAIN)
        yield group


@pytest.mark.grid(in_ci=True)
def test_a_rank_waiting_for_a_failed_one_is_replaced(ranks: ddip.Group) -> None:
    with pytest.raises(ddip.CellError, match="(?s)^rank 1: ValueError.*\nrank 0 .*--repair"):
        ranks.run("kept = rank\nif rank == 1: raise ValueError\ndist.barrier()", timeout=60)
    with pytest.raises(GroupError, match="(?s)^rank 0 .*--repair"):
        ranks.run("pass")
    assert ranks.repair(["undisturbed"], 1) == [0]
    ranks.run(f"{TEN_STEPS}\nassert train() == undisturbed", timeout=60)
    ranks.run("assert rank == 0 or kept == 1")


@pytest.mark.grid
def test_a_rank_still_waiting_after_a_stop_is_named(ranks: ddip.Group) -> None:
    stopped = meanwhile(lambda: "barrier" in str(ranks.stacks()[0].place), press_stop)  # type: ignore[union-attr]
    with pytest.raises(CellInterrupted, match="(?s)\nrank 0 .*--repair"):
        ranks.run("import time\nif rank == 0: dist.barrier()\ntime.sleep(1e6)")
    stopped.join()
    assert ranks.repair() == [0]
    ranks.run("import torch.distributed as dist\ndist.barrier()", timeout=60)
