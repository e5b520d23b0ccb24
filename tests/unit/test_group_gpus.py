"""Messages and actions of a group about GPUs that are cut off or lost, on scripted engines."""

from __future__ import annotations

import re

import pytest

from ddip.cluster import devices
from ddip.errors import CellError, GroupError
from ddip.output.tables.tables import cut_off_text
from ddip.protocol import on_rank

from .conftest import NewGroup

ASSERT = "CUDA error: device-side assert triggered"


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a notebook that sees three GPUs."""
    monkeypatch.setattr(devices, "gpu_names", lambda: ["0", "1", "2"])


def test_ranks_with_cut_off_work_and_good_ranks_are_named(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(None, gpus="all", failure_grace=0.0)
    with pytest.raises(CellError) as caught:
        group.run("0: compute\n1: raise ValueError\n2: compute")
    by_rank = caught.value.by_rank
    assert by_rank[1].name == "ValueError" and all("GPU" in by_rank[rank].waited for rank in (0, 2))
    expected = "ranks 0, 2: GPU work was cut off, and its results may be wrong"
    assert re.search(
        f"{expected}.*; copy them from rank 1, or from a checkpoint, before you continue", capsys.readouterr().err
    )
    group.run("pass")
    assert "cut off" not in capsys.readouterr().err


def test_without_a_good_rank_the_advice_is_a_checkpoint() -> None:
    assert cut_off_text({0: True, 1: True}).endswith("copy them from a checkpoint, before you continue")


def test_an_ended_rank_is_not_recommended_as_a_source(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(None, gpus="all", failure_grace=0.0)
    with pytest.raises(CellError) as caught:
        group.run("0: die\n1: compute\n2: wait")
    assert caught.value.by_rank[0].name == "RankEnded"
    assert "rank 1: GPU work was cut off" in (stderr := capsys.readouterr().err) and "copy them from rank 2" in stderr


def test_a_gpu_that_an_abort_has_broken_is_named_before_the_group_forms(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(None, gpus="all", failure_grace=0.0)
    pids = [member.pid for member in group.members]
    with pytest.raises(CellError):
        group.run("0: raise ValueError\n1: compute\n2: compute")
    broken = {"wrappers": 0, "meshes": 0, "subgroups": 0, "rpc": False, "gpu_lost": "CUDA error: an illegal access"}
    engine = group.engine(1)
    engine.answers[on_rank.leave_group.target] = lambda: broken
    with pytest.raises(GroupError, match="^rank 1 has lost its GPU .*illegal access.*--repair"):
        group.run("pass")
    assert group.repair() == [1]
    assert [now == then for now, then in zip([m.pid for m in group.members], pids, strict=True)] == [True, False, True]
    group.run("pass")


def test_only_the_rank_with_a_lost_gpu_is_replaced(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(None, gpus="all", failure_grace=0.0)
    pids = [member.pid for member in group.members]
    group.push({"kept": 1})
    with pytest.raises(CellError) as caught:
        group.run(f"1: lose {ASSERT}")
    assert [(rank, str(error)) for rank, error in caught.value.by_rank.items()] == [(1, f"AcceleratorError: {ASSERT}")]
    lost = f"rank 1 .*{ASSERT}.*%dipull .*--repair"
    assert re.search(lost, capsys.readouterr().err)
    with pytest.raises(GroupError, match=f"^{lost}"):
        group.run("pass")
    with pytest.raises(GroupError, match=f"^{lost}"):
        group.push({"y": 2})
    assert [info.state for info in group.info()] == ["idle", "GPU lost", "idle"]
    assert group.pull(["kept"], rank=1) == {"kept": 1}
    assert group.repair() == [1]
    assert [now.pid == before for now, before in zip(group.members, pids, strict=True)] == [True, False, True]
    group.run("pass")
    assert {info.state for info in group.info()} == {"idle"}
