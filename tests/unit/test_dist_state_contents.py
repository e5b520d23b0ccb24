"""The state that ``ddip.dist_state`` keeps and restores, on one rank in this process.

Each test of numbers compares ten steps after a restore with an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddip
import ddip.sharded.state


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    ddip.sharded.state._kept.clear()


Train = Callable[[int, int], list[float]]
"""Trains from one step to another, and returns the losses."""


def assert_continues_undisturbed(make: Callable[[], tuple[tuple[Any, ...], Train]], saved: int = 5) -> None:
    """Restore the state after `saved` steps into new objects, and compare the next ten steps with an undisturbed run.

    `make` returns new objects for `dist_state`, and a function that trains them.
    """
    _, train = make()
    expected = train(0, saved + 10)[saved:]
    objects, train = make()
    train(0, saved)
    ddip.dist_state(*objects, name="tested").save(saved)
    train(saved, saved + 1)  # a step that is lost
    objects, train = make()
    assert ddip.dist_state(*objects, name="tested").restore() == saved
    assert train(saved, saved + 10) == expected


def batch(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_fused_optimizers_continue_in_any_memory_format(memory_format: torch.memory_format) -> None:
    def make() -> tuple[tuple[Any, ...], Train]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 3)).to(memory_format=memory_format)
        optimizer = torch.optim.Adam(model.parameters(), 0.05, fused=True)

        def train(first: int, last: int) -> list[float]:
            losses = []
            for step in range(first, last):
                optimizer.zero_grad()
                loss = model(batch(step, 2, 3, 7, 7).to(memory_format=memory_format)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        return (model, optimizer), train

    assert_continues_undisturbed(make)
