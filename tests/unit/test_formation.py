"""What becomes of a group after a cell: pure decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddip.formation import Formation, _break, _in_step, _shared


class _Ranks:
    """What `Formation.judge` asks of ranks."""

    members = [None, None]

    def __init__(self) -> None:
        self.adopted = False

    def ask_beside(self, ranks: Any, target: str, seconds: float) -> dict[int, bool]:
        assert target == "process_group.adopt"
        self.adopted = True
        return dict.fromkeys(ranks, True)


def report(state: str = "ours", released: bool = False, **more: Any) -> dict[str, Any]:
    return {"state": state, "released": released, "counts": {}, **more}


OTHER = [report("other", rank=0, size=2), report("other", rank=1, size=2)]


@pytest.mark.parametrize(
    ("reports", "failed", "sound", "adopted"),
    [
        ([report(), report()], False, True, False),
        ([report(), report()], True, True, False),
        ([report(counts={"0 cpu": (1, 2)}), report(counts={"0 cpu": (2, 2)})], True, False, False),
        ([report(counts={"0 cpu": (1, 2)}), report(counts={"0 cpu": (2, 2)})], False, True, False),
        ([report(), report(released=True)], True, False, False),
        ([report(), None], True, False, False),
        ([report("none"), report("none")], False, False, False),
        ([report("none"), report()], False, False, False),
        (OTHER, False, True, True),
        (OTHER[::-1], False, False, False),
        ([OTHER[0], report()], False, False, False),
        ([report("other", rank=0, size=1)], False, False, False),
    ],
)
def test_the_group_is_kept_adopted_or_formed_again(
    reports: list[dict[str, Any] | None], failed: bool, sound: bool, adopted: bool
) -> None:
    ranks = _Ranks()
    formation = Formation(ranks)  # type: ignore[arg-type]
    formation.sound = True
    formation.judge(dict(enumerate(reports)), failed)
    assert (formation.sound, ranks.adopted) == (sound, adopted)


def test_a_group_that_was_released_is_not_good_again_after_a_good_cell() -> None:
    formation = Formation(_Ranks())  # type: ignore[arg-type]
    formation.judge({0: report(), 1: report()}, False)
    assert not formation.sound


def test_ranks_are_in_step_if_they_began_as_many_collectives_in_each_of_their_groups() -> None:
    assert _in_step([report(counts={"0 cpu": (2, 2), "1 cpu": (1, 1)}), report(counts={"0 cpu": (2, 2)})])
    assert not _in_step(
        [report(counts={"0 cpu": (2, 2), "1 cpu": (1, 2)}), report(counts={"0 cpu": (2, 2), "1 cpu": (0, 2)})]
    )


def test_ranks_are_out_of_step_with_those_that_did_not_run_the_cell() -> None:
    assert _in_step([report(counts={"0 cpu": (0, 2)})])
    assert not _in_step([report(counts={"0 cpu": (1, 2)})])


def test_the_connections_between_ranks_are_those_with_a_rank_at_both_ends() -> None:
    here, there = ("127.0.0.1", 1, "127.0.0.1", 2), ("127.0.0.1", 2, "127.0.0.1", 1)
    others = ("127.0.0.1", 3, "127.0.0.1", 4)
    assert sorted(_shared({0: [here, others], 1: [there]})) == [here, there]


def test_a_broken_store_cannot_be_read_by_anybody(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("keys")
    for _ in range(2):
        _break(store)
        with pytest.raises(OSError, match="symbolic links"):
            store.open()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
