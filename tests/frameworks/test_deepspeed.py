"""DeepSpeed in a long-lived session: engines of a former group report it, and a new group size works."""

from __future__ import annotations

import pytest

import ddip
from ddip.errors import CellError
from ddip.group.members.placement import Request

pytest.importorskip("deepspeed")

TRAIN = """
import deepspeed, torch, torch.distributed as dist
def made():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
def step(engine):
    loss = engine(torch.ones(4, 4) * (rank + 1)).pow(2).mean()
    engine.backward(loss); engine.step()
    return engine.module.weight.detach().clone()
"""


@pytest.mark.long
@pytest.mark.timeout(600)  # an op is compiled unless make has already done so
def test_engines_of_a_former_group_refuse_but_new_ones_work(warmed_up: None) -> None:
    with ddip.Group(2, app="deepspeed") as group:
        group.run(
            f"{TRAIN}\nbefore = dist.group.WORLD\ndeepspeed.init_distributed()\nassert dist.group.WORLD is before"
        )
        group.run("engine = made(); first = step(engine)")
        assert len({str(found["first"]) for found in group.pull_all(["first"], range(2))[0]}) == 1
        with pytest.raises(CellError, match="mine"):
            group.run("if rank == 0: raise ValueError('mine')\nstep(engine)")
        with pytest.raises(CellError, match="DeepSpeed engine .*destroyed"):
            group.run("step(engine)")
        group.run("assert torch.equal(step(made()), first)")
        group.change(Request(n=3))
        group.run(f"{TRAIN}\nengine = made(); assert engine.world_size == 3; told = step(engine)")
        assert len({str(found["told"]) for found in group.pull_all(["told"], range(3))[0]}) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_backward_leaves_no_gradients_for_later_steps(warmed_up: None, stage: int) -> None:
    """Without ZeRO the engine continues training; with ZeRO it says that it must be recreated."""
    with ddip.Group(2, app="deepspeed") as group:
        group.run(f"{TRAIN.replace(': 1}', f': {stage}}}')}\nengine, twin = made(), made(); step(engine), step(twin)")
        group.run("def fails(gradient): raise MemoryError('planted')\nhandle = engine.module.bias.register_hook(fails)")
        with pytest.raises(CellError, match="planted"):
            group.run("step(engine)")
        group.run("handle.remove()")
        if stage:
            with pytest.raises(CellError, match="failed cell.*DeepSpeed"):
                group.run("step(engine)")
        else:
            group.run("for _ in range(10): assert torch.equal(step(engine), step(twin))")
