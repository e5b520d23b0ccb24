"""The GPU cases over gloo on the CPU, which proves that the cases themselves are right."""

from __future__ import annotations

import pytest

import ddip

from .gpu_cases import CASES

RUNS = [
    pytest.param(name, size, id=f"{name}, {size} rank{'s' if size > 1 else ''}")
    for name, case in CASES.items()
    for size in case.ranks
    if case.on_cpu
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "size"), RUNS)
def test_case(name: str, size: int, warmed_up: None) -> None:
    case = CASES[name]
    case.skip_without_app()
    with ddip.Group(size, **dict(case.options)) as group:  # type: ignore[arg-type]
        case.run(group, 1)
