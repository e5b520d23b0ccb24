"""What one rank can do to itself: ``--repair`` always suffices, and the others keep their variables and processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.group import fitness

from ..cluster.self_harm import KINDS, prove_repair


@pytest.fixture(scope="module")
def three() -> Iterator[ddip.Group]:
    with pytest.MonkeyPatch.context() as patch, ddip.Group(3, failure_grace=0.1) as group:
        patch.setattr(fitness, "TRY_SECONDS", 3)
        group.timeout = 20
        yield group


@pytest.mark.parametrize("kind", KINDS)
def test_a_repair_suffices(three: ddip.Group, kind: str) -> None:
    try:
        prove_repair(three, KINDS[kind])
    finally:
        if not any(three.cluster.run_folder.glob("s:*")):  # what this kind has removed, the next one needs
            three.restart()
