"""A rank that damages itself: ``--repair`` always suffices, and the others keep variables and processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.group.process_group import fitness

from ..cluster.self_harm import KINDS, prove_repair


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[ddip.Group]:
    with pytest.MonkeyPatch.context() as patch, ddip.Group(3, failure_grace=0.1) as group:
        patch.setattr(fitness, "TRY_SECONDS", 3)
        group.options.timeout = 20
        yield group


SLOW = (
    "the loop's handler",
    "all modules removed",
    "time.time fail",
    "destroy_process_group hangs",
    "switch interval",
    "builtins.__import__ None",
)
"""Kinds that take 20 to 90 s each."""
LATER = {*SLOW, *list(KINDS)[1::3], *list(KINDS)[2::3]}
"""Kinds that ``make test-long`` runs."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind, marks=[pytest.mark.long] * (kind in LATER)) for kind in KINDS]
)
def test_a_repair_suffices(three_ranks: ddip.Group, kind: str) -> None:
    try:
        prove_repair(three_ranks, KINDS[kind])
    finally:
        if not any(three_ranks.cluster.run_folder.glob("s:*")):  # this kind has removed what the next one needs
            three_ranks.restart()
