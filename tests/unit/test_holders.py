"""The variables that a load names because they still hold a replaced object."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch

from ddip.rank.saves.holders import find_holders


def test_every_holder_of_a_replaced_optimizer_is_named() -> None:
    former = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    variables = {
        "all_opts": [former],
        "sched": torch.optim.lr_scheduler.StepLR(former, 1),
        "same_list": [[former]],
        "opt": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
        "other": {},
    }
    variables["alias"] = variables["all_opts"]
    assert find_holders([former], variables, {"opt"}) == ["alias", "all_opts", "same_list", "sched"]


def _functions_with(model: torch.nn.Module) -> dict[str, Any]:
    def positional(x: Any, m: Any = model) -> Any:
        return m(x)

    def by_keyword(x: Any, *, m: Any = model) -> Any:
        return m(x)

    def closed(x: Any) -> Any:
        return model(x)

    return {
        "positional": positional,
        "by_keyword": by_keyword,
        "unnamed": lambda x, m=model: m(x),
        "closed": closed,
        "bound": model.forward,
        "partly": functools.partial(positional, 1),
        "view": model.weight.data,  # type: ignore[union-attr]
        "part": model.weight.detach()[1:],  # type: ignore[index,operator]
        "parameters": list(model.parameters()),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


KINDS = ["positional", "by_keyword", "unnamed", "closed", "bound", "partly", "view", "part", "parameters", "optimizer"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_holder_of_a_replaced_model_is_named_alone(kind: str) -> None:
    former, new = torch.nn.Linear(2, 3), torch.nn.Linear(2, 2)
    variables = {"model": new, "other": torch.ones(2), kind: _functions_with(former)[kind]}
    assert find_holders([former], variables, {"model"}) == [kind]


def test_all_holders_of_a_replaced_model_are_named() -> None:
    former = torch.nn.Linear(2, 3)
    assert find_holders([former], {"model": None, **_functions_with(former)}, {"model"}) == sorted(KINDS)


def test_memory_that_a_loaded_variable_uses_is_not_replaced() -> None:
    model = torch.nn.Linear(2, 2)
    variables = {"model": model, "view": model.weight.data, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert find_holders([model.weight.data], variables, {"model", "view"}) == []


def test_tensors_without_readable_memory_are_passed_over() -> None:
    former = torch.nn.Linear(2, 3)
    variables = {
        "lazy": torch.nn.LazyLinear(2),
        "meta": torch.ones(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "module": types.ModuleType("module"),
        "weight": former.weight,
    }
    assert find_holders([former, torch.eye(2).to_sparse()], variables, ()) == ["weight"]
