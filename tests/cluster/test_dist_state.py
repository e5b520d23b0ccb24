"""``ddip.dist_state``: training of a sharded model continues at its last complete step."""

from __future__ import annotations

import os
import signal

import pytest

import ddip
from ddip.sharded import copies

from .leftovers import wait_until
from .meanwhile import meanwhile, press_stop
from .variants import few

CODE = """
import ddip, torch, torch.distributed as dist, torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return model

def plain(): return network()

def fully_shard(module, **options): return torch.distributed.fsdp.fully_shard(module, **options)

def fsdp():
    model = network()
    for part in (model[0], model[2]): fully_shard(part)
    return fully_shard(model)

def tensor_parallel():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(network(), init_device_mesh("cpu", (world_size,)), plan)

def both():
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model[2]): fully_shard(part, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])

def make(kind):
    global model, opt, scheduler, state
    model = kind()
    opt = torch.optim.AdamW(model.parameters(), 0.05, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.9)
    state = ddip.dist_state(model, opt, scheduler)

def step(number, raises=lambda: None):
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))  # the same for any number of ranks
    opt.zero_grad()
    loss = model(batch).square().mean()
    raises()
    loss.backward()
    opt.step()
    scheduler.step()
    return loss.item()

def train(first, last, raises=lambda number: None):
    losses = []
    for number in range(first, last):
        losses.append(step(number, lambda: raises(number)))
        state.save(number + 1)
    return losses
"""
KINDS = ("fsdp", "plain", "tensor_parallel")


@pytest.fixture
def ranks(cells: ddip.Group, nothing_kept: None) -> ddip.Group:
    cells.options.failure_grace = 0.1
    cells.run(CODE)
    return cells


def train_four_steps(group: ddip.Group, kind: str) -> None:
    """Compute the `expected` losses of 8 steps without a fault; then train 4 of them again."""
    group.run(f"""
        make({kind})
        assert state.step is None and "nothing kept" in repr(state) and state.restore(default=0) == 0
        expected = train(0, 8)
        state.forget()
        make({kind})
        losses = train(state.restore(default=0), 4)
        assert losses == expected[:4] and state.step == 4
    """)


def continue_training(group: ddip.Group, kind: str, exactly: bool = True) -> None:
    """Recreate the model, as its cell does, and train to the end."""
    is_same = (
        "losses == expected[first:]" if exactly else "torch.tensor(losses).allclose(torch.tensor(expected[first:]))"
    )
    group.run(f"""
        make({kind})
        first = state.restore()
        losses = train(first, 8)
        assert first == 4 and {is_same}, (first, losses, expected)
    """)


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("kind", ["fsdp", *(pytest.param(kind, marks=pytest.mark.grid) for kind in KINDS[1:])])
@pytest.mark.native("sockets")
def test_a_fault_costs_one_step(ranks: ddip.Group, kind: str) -> None:
    train_four_steps(ranks, kind)
    with pytest.raises(ddip.CellError, match="planted"):
        ranks.run("""
            def planted(number):
                if rank == 1: raise ValueError("planted")
            train(4, 8, planted)
        """)
    continue_training(ranks, kind)


@pytest.mark.grid(in_ci=True)
def test_a_restore_drops_gradients_that_are_not_reduced_yet(ranks: ddip.Group) -> None:
    train_four_steps(ranks, "fsdp")
    ranks.run("""
        model.set_requires_gradient_sync(False)
        model(torch.ones(8, 5)).sum().backward()
        model.set_requires_gradient_sync(True)
        state.restore()
        losses = train(4, 8)
        assert losses == expected[4:], (losses, expected)
    """)


REFUSED = {
    "fsdp": "FSDPSequential was made .*dist_state",
    "tensor_parallel": "device mesh",
}


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("kind", few(REFUSED, "fsdp"))
@pytest.mark.native("sockets")
def test_the_former_model_says_that_it_must_be_recreated(ranks: ddip.Group, kind: str) -> None:
    train_four_steps(ranks, kind)
    with pytest.raises(ddip.CellError, match="planted"):
        ranks.run("if rank == 1: raise ValueError('planted')\nstep(4)")
    with pytest.raises(ddip.CellError, match=f"ranks 0, 1: RuntimeError: .*{REFUSED[kind]}"):
        ranks.run("step(4)")


@pytest.mark.grid(in_ci=True)
def test_a_model_after_an_unequal_step_refuses_further_use(ranks: ddip.Group) -> None:
    """Without the restore, the shards would be of different steps, and training would continue with them."""
    train_four_steps(ranks, "fsdp")
    with pytest.raises(ddip.CellError, match="rank 1: ValueError"):
        ranks.run("def fails(): raise ValueError\nif rank == 1: opt.step = fails\nstep(4)")
    with pytest.raises(ddip.CellError, match="made .*dist_state"):
        ranks.run("step(4)")
    continue_training(ranks, "fsdp")


@pytest.mark.grid
def test_a_stop_in_backward_asks_to_recreate_the_model(ranks: ddip.Group) -> None:
    train_four_steps(ranks, "fsdp")
    ranks.run("""
        import threading
        in_backward = threading.Event()
        class Waits(torch.autograd.Function):
            forward = staticmethod(lambda context, x: x.clone())
            @staticmethod
            def backward(context, grad):
                in_backward.set()
                if rank == 0: dist.barrier()
                while True: threading.Event().wait(0.01)
    """)

    def all_ranks_wait() -> bool:
        places = ranks.ranks.stack_locations([0, 1], 5)
        return all(place is not None and place.function == "backward" for place in places.values()) or all(
            place is not None and place.function in ("backward", "barrier", "wait") for place in places.values()
        )

    thread = meanwhile(all_ranks_wait, press_stop)
    with pytest.raises(ddip.CellInterrupted):
        ranks.run("Waits.apply(model(torch.ones(8, 5))).sum().backward()")
    thread.join()
    continue_training(ranks, "fsdp")


@pytest.mark.grid
def test_a_fault_within_save_keeps_the_previous_save(ranks: ddip.Group) -> None:
    """Fail when the copy is complete on one rank only."""
    train_four_steps(ranks, "fsdp")
    with pytest.raises(ddip.CellError, match="planted"):
        ranks.run("""
            from ddip.sharded import state as ours
            exchange = ours.mirror_copy
            def planted(*copies):
                if rank == 1: raise ValueError("planted")
                return exchange(*copies)
            ours.mirror_copy = planted
            step(4)
            state.save()
        """)
    ranks.run("ours.mirror_copy = exchange")
    ranks.run("""
        make(fsdp)
        first = state.restore()
        losses = train(first, 8)
        assert first in (4, 5) and losses == expected[first:], (first, losses, expected)
    """)


@pytest.mark.grid
def test_training_after_a_restore_changes_no_copy(ranks: ddip.Group) -> None:
    train_four_steps(ranks, "fsdp")
    ranks.run("""
        make(fsdp)
        state.restore()
        values = [part.values for one in state._copies.copies for part in one.parts.values()]
        before, rest = [value.clone() for value in values], [one.pickled for one in state._copies.copies]
        step(4)
        assert len(values) > 40 and all(map(torch.equal, values, before))
        assert [one.pickled for one in state._copies.copies] == rest
    """)


def test_saves_without_a_step_count_the_same_on_a_new_rank(ranks: ddip.Group) -> None:
    ranks.run("""
        import ddip.sharded.state
        state = ddip.dist_state(nn.Linear(2, 2), name="counted")
        for _ in range(3): state.save()
        if rank == 1: ddip.sharded.state._kept.clear()
        state.save()
        assert (state.step, state.restore()) == (4, 4)
    """)


@pytest.mark.grid
def test_values_missing_in_an_optimizer_stay_missing(ranks: ddip.Group) -> None:
    """SGD has a momentum buffer that is None; a parameter may be shared, or frozen."""
    ranks.run("""
        def make_tied():
            global model, opt, state
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(1, 1))
            model[1].weight = model[0].weight
            model[3].requires_grad_(False)
            fully_shard(model)
            opt = torch.optim.SGD(model.parameters(), 0.1)
            state = ddip.dist_state(model, opt, name="tied")
        def steps(first, last):
            for number in range(first, last):
                opt.zero_grad()
                loss = model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))).square().mean()
                loss.backward()
                opt.step()
                state.save(number + 1)
            return loss.item()
        make_tied()
        expected = steps(0, 4)
        state.forget()
        make_tied()
        steps(0, 2)
        make_tied()
        assert steps(state.restore(), 4) == expected
    """)


def kill_rank(group: ddip.Group, rank: int) -> None:
    os.kill(group.members[rank].pid, signal.SIGKILL)
    wait_until(lambda: group.ranks.ended)


@pytest.mark.parametrize("order", [[1], pytest.param([1, 0], marks=pytest.mark.grid)])
def test_a_killed_rank_gets_its_shard_from_another_rank(ranks: ddip.Group, order: list[int]) -> None:
    train_four_steps(ranks, "fsdp")
    for rank in order:
        kill_rank(ranks, rank)
        assert ranks.repair(["expected"], 1 - rank) == [rank]
        ranks.run(f"if rank == {rank}:\n    exec({CODE!r})")
        # In bytes, so that most parts are sent separately
        ranks.run("from ddip.sharded import copies; copies.SMALL = 100")
        continue_training(ranks, "fsdp")
        ranks.run(f"copies.SMALL = {copies.SMALL}; state.forget(); make(fsdp); train(0, 4)")


@pytest.mark.grid
def test_shards_without_a_spare_copy_are_lost_with_their_process() -> None:
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run(CODE)
        train_four_steps(group, "fsdp")
        group.run("state.forget(); state = ddip.dist_state(model, opt, spare=False); state.save(4)")
        kill_rank(group, 1)
        group.repair()
        group.run(f"if rank == 1:\n    exec({CODE!r})")
        with pytest.raises(ddip.CellError, match="LookupError: .*rank 1 of 2"):
            group.run("make(fsdp); state.restore()")


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["fsdp", "tensor_parallel"])
def test_training_continues_on_two_of_three_ranks_and_three_again(kind: str) -> None:
    with ddip.Group(3, failure_grace=0.1) as group:
        group.run(CODE)
        train_four_steps(group, kind)
        group.change(ddip.Request(n=2))
        continue_training(group, kind, exactly=False)
        group.run("state.forget(); make(fsdp); train(0, 4)")
        group.change(ddip.Request(n=3))
        group.push({"expected": group.pull(["expected"])["expected"]})
        group.run(f"if rank == 2:\n    exec({CODE!r})")
        continue_training(group, kind, exactly=False)


@pytest.mark.grid
def test_tensor_parallel_shards_on_four_ranks_continue_on_two() -> None:
    with ddip.Group(4, failure_grace=0.1) as group:
        group.run(CODE)
        train_four_steps(group, "both")
        with pytest.raises(ddip.CellError, match="planted"):
            group.run("if rank == 1: raise ValueError('planted')\nstep(4)")
        continue_training(group, "both")
        group.run("state.forget(); make(both); train(0, 4)")
        group.change(ddip.Request(n=2))
        continue_training(group, "both", exactly=False)


WHOLE = """
class Average:
    def __init__(self): self.values = {name: value.clone() for name, value in model.state_dict().items()}
    def state_dict(self): return {"values": self.values}
    def load_state_dict(self, state): self.values = state["values"]

def begin_again(kind, steps):
    global model, opt, average, state
    make(kind)
    for number in range(steps): step(number)
    average = Average()
    state = ddip.dist_state(model, opt, average, name="whole")

def whole():
    values = [*model.state_dict().values(), *average.values.values()]
    values += [value for one in opt.state_dict()["state"].values() for value in one.values()]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for value in values]

def ensure_restored(kind):
    begin_again(kind, 0)
    assert state.restore() == 3
    found = whole()
    assert len(found) == len(before) and all(map(torch.equal, found, before))
    step(3)
"""


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_a_restore_can_reshard_after_losing_two_of_four_ranks() -> None:
    """The average consists of DTensors, whose layout in the recreated model may differ."""
    with ddip.Group(4, failure_grace=0.1) as group:
        group.run(CODE + WHOLE)
        for kind in (*KINDS, "both"):
            for other in (*KINDS, "both"):
                group.run(
                    f"begin_again({kind}, 3); before = whole(); state.save(3); ensure_restored({other}); state.forget()"
                )
            group.run(f"begin_again({kind}, 3); before = whole(); state.save(3)")
            for rank in (1, 2):  # neither holds the other's copy
                os.kill(group.members[rank].pid, signal.SIGKILL)
            wait_until(lambda: len(group.ranks.ended) == 2)
            group.repair(["before"], 0)
            group.run(f"if rank in (1, 2):\n    exec({CODE + WHOLE!r})")
            group.run(f"ensure_restored({kind}); state.forget()")


@pytest.mark.grid
def test_the_extra_state_of_a_module_is_restored(ranks: ddip.Group) -> None:
    ranks.run("""
        class Counting(nn.Linear):
            count = 0
            def get_extra_state(self): return {"count": self.count}
            def set_extra_state(self, told): self.count = told["count"]

        counting = fully_shard(Counting(5, 3))
        counting.count = 7
        ddip.dist_state(counting, name="counting").save(1)
        counting.count = 8
        another = fully_shard(Counting(5, 3))
        assert ddip.dist_state(another, name="counting").restore() == 1
        assert another.count == 7
    """)


@pytest.mark.grid
def test_a_failed_restore_says_why(ranks: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.options, "failure_grace", 10.0)  # all ranks raise, but a loaded machine may delay one
    ranks.run("make(fsdp)")
    with pytest.raises(ddip.CellError, match=r"LookupError: .*save\(\)"):
        ranks.run("state.restore()")
    ranks.run("train(0, 2)")
    with pytest.raises(ddip.CellError, match="ValueError: .*: 0.bias, 0.w"):
        ranks.run("ddip.dist_state(nn.Linear(2, 2), name='state').restore()")
    with pytest.raises(ddip.CellError, match="ValueError: .*no optimizer"):
        ranks.run("ddip.dist_state(model).restore()")
    with pytest.raises(ddip.CellError, match="ValueError: .*1 object .*0 "):
        ranks.run("ddip.dist_state(model, opt).restore()")
    with pytest.raises(ddip.CellError, match="TypeError: .*consolidate_"):
        ranks.run("""
            from torch.distributed.optim import ZeroRedundancyOptimizer
            net = network()
            ddip.dist_state(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1))
        """)
    with pytest.raises(ddip.CellError, match="TypeError: .*FSDP1"):
        ranks.run("""
            from torch.distributed.fsdp import FullyShardedDataParallel
            ddip.dist_state(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))
        """)


def test_dist_state_in_the_notebook_says_to_use_ranks() -> None:
    import torch

    with pytest.raises(RuntimeError, match="%%dip"):
        ddip.dist_state(torch.nn.Linear(1, 1)).restore()
