"""The fuzzer's own decisions."""

from __future__ import annotations

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.fuzz import kinds, steps
from tests.fuzz.model import Broken, Model

NOTHING = {"seen": None, "done": None, "v0": None, "v1": None, "v2": None}


def found(rank: int, size: int, number: float, **values: object) -> tuple[object, ...]:
    return 10 + rank, rank, size, [number] * 3, {**NOTHING, **values}, (50, 10)


def test_a_seed_gives_the_same_steps_again() -> None:
    assert steps.draw("7 0", 50) == steps.draw("7 0", 50) != steps.draw("7 1", 50)


def test_what_is_known_is_a_kind_and_is_not_drawn() -> None:
    every = {name for names in steps.families(known=True).values() for name in names}
    drawn = {name for names in steps.families().values() for name in names}
    assert drawn == every - kinds.KNOWN.keys()
    assert {*kinds.KNOWN} - every <= {"a stop within an import"}


@pytest.mark.parametrize("table", ["WORK", "ALONE", "BUSINESS"])
def test_cells_are_python(table: str) -> None:
    for name, code in getattr(kinds, table).items():
        flags = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(TransformerManager().transform_cell(code), name, "exec", flags)


def test_the_model_finds_a_wrong_number() -> None:
    with pytest.raises(Broken, match="wrong number: all_reduce gave .* on rank 0, not 21"):
        Model([10, 11]).check(7, [found(0, 2, 14.0), found(1, 2, 21.0)])


def test_the_model_finds_a_lost_counter_and_a_lost_rank() -> None:
    model = Model([10, 11])
    model.count("seen", [0, 1], surely=False)
    model.check(1, [found(0, 2, 3.0, seen=1), found(1, 2, 3.0)])
    model.count("seen", [0, 1])
    with pytest.raises(Broken, match="seen is 1 on rank 0, not 2"):
        model.check(1, [found(0, 2, 3.0, seen=1), found(1, 2, 3.0, seen=1)])
    with pytest.raises(Broken, match="rank 1 was healthy"):
        model.members([10, 12], kept=[0, 1])
