"""The state that ``ddip.dist_state`` keeps and restores, on one rank in this process.

Each test of numbers compares ten steps after a restore with an undisturbed run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, RandomSampler, Sampler

import ddip
import ddip.sharded.state
from ddip.rank.process_group import meshes
from ddip.sharded.copies import CopyStore, Pair


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    meshes.disable_meshes()  # torch's caches would use them for equal meshes of the next group
    for name in list(ddip.sharded.state._kept):
        ddip.sharded.state.DistState(nn.Module(), None, (), name, False).forget()


Train = Callable[[int, int], list[float]]
"""Trains from one step to another, and returns the losses."""


def assert_continues_undisturbed(make_training: Callable[[], tuple[tuple[Any, ...], Train]], saved: int = 5) -> None:
    """Restore a save into new objects, and compare the next ten steps with an undisturbed run.

    `make_training` returns new objects for `dist_state`, and a function that trains them.
    """
    _, train = make_training()
    train(0, saved)
    expected = train(saved, saved + 10)
    objects, train = make_training()
    train(0, saved)
    ddip.dist_state(*objects, name="tested").save(saved)
    train(saved, saved + 1)  # a step that is lost
    objects, train = make_training()
    assert ddip.dist_state(*objects, name="tested").restore() == saved
    assert train(saved, saved + 10) == expected


def draw_batch(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_fused_optimizers_continue_in_any_memory_format(memory_format: torch.memory_format) -> None:
    def make_training() -> tuple[tuple[Any, ...], Train]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 3)).to(memory_format=memory_format)
        optimizer = torch.optim.Adam(model.parameters(), 0.05, fused=True)

        def train(first: int, last: int) -> list[float]:
            losses = []
            for step in range(first, last):
                optimizer.zero_grad()
                loss = model(draw_batch(step, 2, 3, 7, 7).to(memory_format=memory_format)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        return (model, optimizer), train

    assert_continues_undisturbed(make_training)


class Shuffled(Sampler[int]):
    """A sampler without ``state_dict`` that draws in all ways that hold a position."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.legacy, self.plain = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.torch: torch.Generator | None = None  # created when it is needed
        self.epoch, self.listed = np.int64(0), list(range(4))
        self.order, self.tensor = np.arange(4), torch.arange(4)
        self.shared = self.order
        self.kept_elsewhere = iter(())

    def __iter__(self) -> Iterator[int]:
        self.torch = self.torch or torch.Generator().manual_seed(0)
        self.epoch += np.int64(1)
        self.rng.shuffle(self.order)
        self.plain.shuffle(self.listed)
        self.tensor = self.tensor[torch.randperm(4, generator=self.torch)]
        drawn = [*self.shared, *self.listed, *self.tensor, *self.legacy.permutation(4), self.epoch]
        yield from map(int, drawn)


def test_samplers_draw_the_same_data_from_any_generator(capsys: pytest.CaptureFixture[str]) -> None:
    def make_training() -> tuple[tuple[Any, ...], Train]:
        torch.manual_seed(0)
        model, sampler = nn.Linear(1, 1), Shuffled()
        optimizer = torch.optim.SGD(model.parameters(), 0.0001)

        def train(first: int, last: int) -> list[float]:
            losses = []
            for _ in range(first, last):
                optimizer.zero_grad()
                factors = torch.arange(1.0, 18.0)[:, None]
                loss = (factors * (model(torch.tensor([*sampler]).float()[:, None]) - 1)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        return (model, optimizer, BatchSampler(sampler, 4, False)), train

    assert_continues_undisturbed(make_training)
    assert capsys.readouterr().out.count("Shuffled.kept_elsewhere is an iterator") == 1


def test_a_dataset_in_a_sampler_is_not_restored() -> None:
    data = [3, 4]
    state = ddip.dist_state(nn.Linear(1, 1), None, RandomSampler(data), name="tested")
    state.save(1)
    data.append(5)
    state.restore()
    assert data == [3, 4, 5]


@pytest.mark.parametrize("second", [False, True])
def test_parameters_that_only_an_optimizer_has_are_restored(second: bool) -> None:
    """A loss weight and a head are in no module that `dist_state` gets, once in the second optimizer."""

    def make_training() -> tuple[tuple[Any, ...], Train]:
        torch.manual_seed(0)
        model, head, scale = nn.Linear(3, 3), nn.Linear(3, 1), nn.Parameter(torch.tensor(0.5))
        loose = [*head.parameters(), scale]
        optimizers = [torch.optim.Adam([*model.parameters(), *loose], 0.05)]
        if second:
            optimizers = [torch.optim.Adam(model.parameters(), 0.05), torch.optim.Adam(loose, 0.05)]

        def train(first: int, last: int) -> list[float]:
            losses = []
            for step in range(first, last):
                loss = (scale.exp() * head(model(draw_batch(step, 4, 3))).square() - scale).mean()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        return (model, *optimizers), train

    assert_continues_undisturbed(make_training)


def make_four_layers(order: list[int]) -> tuple[tuple[Any, ...], Train]:
    """Return a training with Adam whose parameters are in this order; all have equal shapes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in order])
    optimizer = torch.optim.Adam([model[number].weight for number in order], 0.05)

    def train(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            optimizer.zero_grad()
            loss = model(draw_batch(step, 4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return (model, optimizer), train


def test_an_optimizer_with_parameters_in_another_order_continues() -> None:
    orders = iter([[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 3, 1]])
    assert_continues_undisturbed(lambda: make_four_layers(next(orders)))


def test_an_optimizer_with_its_parameters_in_other_groups_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for first, second in ([0, 1], [1, 0]):
        groups = [{"params": model[first].weight, "lr": 0.1}, {"params": model[second].weight}]
        state = ddip.dist_state(model, torch.optim.Adam(groups), name="tested")
        if first == 0:
            state.save(1)
    with pytest.raises(ValueError, match=r"optimizer.param_groups.0 \(model.0.weight, model.1.weight\)"):
        state.restore()


def make_with_loose(size: int) -> tuple[nn.Module, nn.Parameter, ddip.sharded.state.DistState]:
    model, loose = nn.Linear(1, 1), nn.Parameter(torch.ones(size))
    return model, loose, ddip.dist_state(model, torch.optim.SGD([*model.parameters(), loose], 0.1), name="tested")


def test_a_loose_parameter_of_another_shape_is_refused() -> None:
    _, _, state = make_with_loose(2)
    state.save(1)
    _, _, state = make_with_loose(3)
    with pytest.raises(ValueError, match=r"differs from the saved one: parameters.optimizer.2"):
        state.restore()


def test_gradients_of_a_failed_step_are_cleared_everywhere() -> None:
    _, loose, state = make_with_loose(2)
    state.save(1)
    loose.sum().backward()
    state.restore()
    assert loose.grad is None


def make_accumulating(kind: str) -> tuple[tuple[Any, ...], Train]:
    """Return a training that takes a step after each third micro-batch, and clears gradients then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    if kind == "sharded":
        fsdp.fully_shard(model)
    scale = nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.Adam([*model.parameters(), *([scale] if kind == "plain" else [])], 0.05)

    def train(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = (model(draw_batch(step, 4, 3)) * scale).square().mean()
            loss.backward()
            losses.append(loss.item())
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=kind != "zeros")
        return losses

    return (model, optimizer), train


@pytest.mark.parametrize("kind", ["plain", "sharded", "zeros"])
@pytest.mark.parametrize("saved", [5, *(pytest.param(step, marks=pytest.mark.grid) for step in (4, 6))])
def test_a_save_between_micro_batches_keeps_their_gradients(kind: str, saved: int) -> None:
    assert_continues_undisturbed(lambda: make_accumulating(kind), saved)


def kept_gradients(state: ddip.sharded.state.DistState) -> list[str]:
    copy = max(state._copies.copies, key=lambda copy: copy.serial or 0)
    return [name for name in copy.parts if name.startswith("gradients.")]


def test_gradients_that_a_step_has_used_are_not_copied() -> None:
    for sharded in (False, True):
        model = nn.Linear(3, 1)
        if sharded:
            fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        state = ddip.dist_state(model, optimizer, name="tested")
        for step in range(3):
            optimizer.zero_grad()
            for number in range(2):
                model(draw_batch(step, 2, 3)).mean().backward()
                state.save(step)
                assert kept_gradients(state) == ["gradients.model.weight", "gradients.model.bias"], (step, number)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            state.save(step)
            assert not kept_gradients(state)
        state.forget()


def test_save_refuses_gradients_that_are_not_reduced_yet() -> None:
    model = nn.Linear(3, 1)
    fsdp.fully_shard(model)
    state = ddip.dist_state(model, name="tested")
    state.save(1)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(torch.ones(2, 3)).mean().backward()
    with pytest.raises(ValueError, match=r"fully_shard has not reduced .*optimizer.step\(\).*nothing was saved"):
        state.save(2)
    assert state.restore() == 1
    state.save(2)


def make_pair(kind: str) -> tuple[tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer], Train]:
    """Return a generator and a discriminator that are trained in turn."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    if kind == "sharded":
        fsdp.fully_shard(first)
        fsdp.fully_shard(second)
    optimizers = [torch.optim.Adam(model.parameters(), 0.05) for model in (first, second)]

    def train(begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            for sign, optimizer in zip((1, -1), optimizers, strict=True):
                optimizer.zero_grad()
                loss = sign * second(first(draw_batch(step, 4, 2))).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    return (first, optimizers[0], second, optimizers[1]), train


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_two_models_in_one_state_continue_together(kind: str) -> None:
    assert_continues_undisturbed(lambda: make_pair(kind))


def test_two_states_of_one_loop_at_different_steps_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def make_states() -> dict[str, ddip.sharded.state.DistState]:
        gen, gen_opt, disc, disc_opt = make_pair("plain")[0]
        return {"G": ddip.dist_state(gen, gen_opt, name="G"), "D": ddip.dist_state(disc, disc_opt, name="D")}

    states = make_states()
    for name, step in [("G", 1), ("D", 1), ("G", 2), ("D", 2), ("G", 3)]:
        states[name].save(step)
    states = make_states()
    assert [state.restore() for state in states.values()] == [3, 2]
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1 and "'D' is restored at step 2, but 'G' at step 3" in told[0] and "one dist_state" in told[0]
    states["D"].save(3)
    states = make_states()
    assert [state.restore() for state in states.values()] == [3, 3]
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "saves",
    [
        [("teacher", 1), ("teacher", 2), ("student", 1), ("student", 2), ("student", 3)],  # one after the other
        [("teacher", 1), ("teacher", 2), ("student", 1), ("teacher", 3), ("teacher", 4), ("student", 2)],  # other steps
    ],
)
def test_states_that_count_other_steps_are_not_named(
    saves: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    states = {name: ddip.dist_state(nn.Linear(1, 1), name=name) for name in ("teacher", "student")}
    for name, step in saves:
        states[name].save(step)
    for state in states.values():
        state.restore()
    assert not capsys.readouterr().out


class Wide(torch.optim.Optimizer):
    """An optimizer whose state is wider than its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"], state["master"] = torch.zeros((), dtype=torch.int64), parameter.float().clone()
                state["more"] = {"sums": [torch.zeros_like(parameter, dtype=torch.float64)]}
            state["count"] += 1
            state["more"]["sums"][0].mul_(0.9).add_(parameter.grad)
            state["master"].sub_(state["more"]["sums"][0] / state["count"], alpha=0.03)
            parameter.copy_(state["master"])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_optimizer_continues_with_state_of_its_own_dtypes(is_sharded: bool) -> None:
    def make_training() -> tuple[tuple[Any, ...], Train]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).bfloat16()
        if is_sharded:
            fsdp.fully_shard(model)
        optimizer = Wide(model.parameters())

        def train(first: int, last: int) -> list[float]:
            losses = []
            for step in range(first, last):
                optimizer.zero_grad()
                loss = model(draw_batch(step, 4, 8).bfloat16()).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(sum(parameter.float().sum().item() for parameter in model.parameters()))
            return losses

        return (model, optimizer), train

    assert_continues_undisturbed(make_training)


def test_state_of_the_dtype_of_its_parameter_follows_the_parameter() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(2, 2).to(dtype)
        optimizer = torch.optim.Adam(model.parameters())
        state = ddip.dist_state(model, optimizer, name="tested")
        if dtype == torch.float32:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.save(1)
    state.restore()
    entry = optimizer.state[model.weight]
    assert (entry["exp_avg"].dtype, entry["step"].dtype) == (torch.bfloat16, torch.float32)


def save_as_two_ranks(make_objects: Callable[[int], tuple[Any, ...]]) -> None:
    """Keep a save of two ranks here, as if only rank 0 were left, which also has the copy of rank 1.

    `make_objects` returns the objects of a rank for `dist_state`.
    """
    copies = []
    for rank in (0, 1):
        state = ddip.dist_state(*make_objects(rank), name="tested")
        state.forget()
        state.save(1)
        copies += state._copies.copies
        copies[rank].rank, copies[rank].size = rank, 2
    ddip.sharded.state._kept["tested"] = CopyStore((Pair(*copies), Pair()))


class OfWorld(Sampler[int]):
    """A sampler that divides its data, with its own name for the number of ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.world, self.starts, self.seed, self.epoch = size, np.arange(size), 3, 0
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(12, generator=self.generator).tolist()[:: self.world])


def test_on_another_number_of_ranks_samplers_divide_by_the_present_one(capsys: pytest.CaptureFixture[str]) -> None:
    def make_objects(rank: int) -> tuple[Any, ...]:
        sampler = OfWorld(2)
        assert len([*sampler]) == 6
        torch.manual_seed(0)
        return nn.Linear(1, 1), None, BatchSampler(sampler, 12 // 2, False)

    save_as_two_ranks(make_objects)
    sampler, undisturbed = OfWorld(1), OfWorld(1)
    batches = BatchSampler(sampler, 12, False)
    ddip.dist_state(nn.Linear(1, 1), None, batches, name="tested").restore()
    assert [*undisturbed] != (second := [*undisturbed])
    assert [*batches] == [second]
    assert (sampler.epoch, sampler.world, sampler.starts.tolist()) == (2, 1, [0])
    told = capsys.readouterr().out
    assert "of the new sampler: OfWorld.world, OfWorld.starts, BatchSampler.batch_size\n" in told


def test_the_line_of_state_that_is_not_restored_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    def make_objects(rank: int) -> tuple[Any, ...]:
        model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(25)])
        model(draw_batch(rank, 8, 4))
        torch.manual_seed(rank)
        return model, torch.optim.SGD(model.parameters(), 0.1 + rank)

    save_as_two_ranks(make_objects)
    ddip.dist_state(*make_objects(2), name="tested").restore()
    told = capsys.readouterr().out
    left_out = "optimizer.param_groups.0, generators.torch, 50 of model (0.running_mean, 0.running_var, ...)"
    assert told.endswith(f"since it differed by rank: {left_out}\n")


def test_shards_of_different_models_are_not_mixed_on_another_number_of_ranks() -> None:
    def make_objects(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        return (fsdp.fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [0])),)

    save_as_two_ranks(lambda rank: make_objects(7))  # replicas
    assert ddip.dist_state(*make_objects(2), name="tested").restore() == 1
    save_as_two_ranks(make_objects)
    with pytest.raises(LookupError, match="each rank saved its own model"):
        ddip.dist_state(*make_objects(2), name="tested").restore()
