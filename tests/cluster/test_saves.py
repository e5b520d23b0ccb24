"""``%dipsave`` and ``%dipload``: training goes on as if it had not stopped, and errors change nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ddip
from ddip.errors import CellError, RequestInterrupted, TransferError

from ..conftest import TORCH
from .leftovers import family_of, wait_until
from .meanwhile import meanwhile, press_stop
from .notebook import Notebook
from .variants import few

TRAINING = """
import random
import numpy as np, torch, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.norm, self.drop, self.last = nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.drop(self.norm(self.tied(torch.relu(self.first(x))))))

def chain(): return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3), nn.Linear(3, 1))
def ddp(): return DDP(Net())
def plain(): return Net()
def fsdp():
    from torch.distributed.fsdp import fully_shard
    net = chain()
    for part in (net[0], net[2]): fully_shard(part)
    return fully_shard(net)
def tensor_parallel():
    mesh = init_device_mesh("cpu", (world_size,))
    return parallelize_module(chain(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
def both():
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(chain(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (net[0], net[2]): fully_shard(part, mesh=mesh["data"])
    return fully_shard(net, mesh=mesh["data"])

def seeded(seed): return torch.Generator().manual_seed(seed)

def prepare(kind):
    global model, opt, schedule, data, sampler, loader, losses, seen, step, noise
    torch.manual_seed(0 if kind is not plain else rank); random.seed(rank); np.random.seed(rank)
    model = kind()
    opt = torch.optim.AdamW(model.parameters(), 0.05, amsgrad=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.95 ** n)
    inputs, targets = torch.randn(24, 6, generator=seeded(1)), torch.randn(24, 1, generator=seeded(2))
    data = TensorDataset(inputs, targets, torch.arange(24))
    is_replica = kind in (ddp, plain)
    sampler = DistributedSampler(data, seed=3) if is_replica else None
    loader = DataLoader(data, 8, sampler=sampler, shuffle=False)
    losses, seen, step, noise = [], [], 0, np.random.default_rng(rank if is_replica else 0)

def train(steps):
    global step
    for _ in range(steps):
        if sampler is not None: sampler.set_epoch(step)
        for x, y, number in loader:
            seen.append(number.tolist())
            if sampler is not None: x = x + 0.01 * (random.random() + np.random.rand() + noise.random())
            opt.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        schedule.step()
        step += 1

def whole(value): return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
def facts():
    state = [{name: whole(value) for name, value in of.items()} for of in opt.state.values()]
    return [[whole(p) for p in model.parameters()], [b.tolist() for b in model.buffers()], state, losses, seen, step,
            opt.param_groups[0]["lr"], schedule.last_epoch, torch.rand(2).tolist(), random.random(), np.random.rand(),
            type(model).__name__]
"""
KINDS = {"ddp": 2, "plain": 2, "fsdp": 2, "tensor_parallel": 2, "both": 4}
"""How many ranks each model needs."""


def train_on(group: ddip.Group) -> list[Any]:
    """Train for ten steps or epochs, and return what must be equal, by rank."""
    group.run("train(10); out = facts()")
    return [found["out"] for found in group.pull_all(["out"], range(group.world_size))[0]]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "run1")


@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        pytest.param("fsdp", marks=pytest.mark.grid(in_ci=True)),
        *(pytest.param(kind, marks=pytest.mark.grid) for kind in ("plain", "tensor_parallel", "both")),
    ],
)
def test_training_continues_in_any_session_as_if_undisturbed(warmed_up: None, kind: str, folder: str) -> None:
    with ddip.Group(KINDS[kind]) as group:
        group.run(f"{TRAINING}\nprepare({kind}); train(3)")
        report = group.save(folder)
        undisturbed = train_on(group)
        assert not report["left_out"]
        assert group.load(folder)["in_place"] == ["model", "opt", "schedule"]
        assert train_on(group) == undisturbed
    with ddip.Group(KINDS[kind]) as group:
        loaded = group.load(folder)
        assert (loaded["in_place"], loaded["not_loaded"]) == ([], {})
        assert train_on(group) == undisturbed
    with ddip.Group(KINDS[kind]) as group:
        group.run(f"{TRAINING}\nprepare({kind}); train(1)")
        assert group.load(folder)["in_place"] == ["model", "opt", "schedule"]
        assert train_on(group) == undisturbed


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.grid)])
def test_another_number_of_ranks_loads_what_was_equal(cells: ddip.Group, folder: str, size: int) -> None:
    cells.run(f"{TRAINING}\nprepare(ddp); train(3)\nweights = [p.tolist() for p in model.parameters()]")
    cells.save(folder)
    weights = cells.pull(["weights"])["weights"]
    with ddip.Group(size) as group:
        report = group.load(folder)
        assert {"losses", "seen", "noise"} <= report["not_loaded"].keys()
        assert {"model", "opt", "schedule", "loader", "sampler", "step"} <= set(report["loaded"])
        group.run("""
            losses, seen, noise = [], [], np.random.default_rng(0)
            assert (sampler.rank, sampler.num_replicas, len(sampler)) == (rank, world_size, 24 // world_size)
            assert loader.sampler is sampler and schedule.optimizer is opt
            found = [p.tolist() for p in model.parameters()]
            train(2)
        """)
        assert group.pull_all(["found"], range(size))[0] == [{"found": weights}] * size


@pytest.mark.parametrize("kind", few(["fsdp", "tensor_parallel"], "fsdp"))
def test_shards_are_divided_among_another_number_of_ranks(cells: ddip.Group, folder: str, kind: str) -> None:
    cells.run(f"{TRAINING}\nprepare({kind}); train(3)\nout = facts()[:3]")
    cells.save(folder, ["model", "opt", "facts", "whole"])
    saved = cells.pull(["out"])["out"]
    with ddip.Group(3) as group:
        group.load(folder)
        group.run("import torch, random, numpy as np\nlosses = seen = step = schedule = None")
        group.run("""
            state = [{name: whole(value) for name, value in of.items()} for of in opt.state.values()]
            out = [[whole(p) for p in model.parameters()], [b.tolist() for b in model.buffers()], state]
        """)
        assert group.pull_all(["out"], range(3))[0] == [{"out": saved}] * 3


def test_objects_stay_connected(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch, functools
        net = torch.nn.Linear(2, 2)
        average = torch.optim.swa_utils.AveragedModel(net)
        row = net.weight[0].detach()
        opt = torch.optim.SGD(net.parameters(), 0.1)
        class Trainer: pass
        trainer = Trainer(); trainer.net, trainer.opt, net.trainer = net, opt, [trainer]
        net.register_forward_hook(lambda module, args, out: out + offset)
        offset = 1.0
        def apply(x): return net(x)
        partial = functools.partial(apply, torch.ones(2))
        expected = partial().tolist()
    """)
    cells.save(folder)
    with ddip.Group(2) as group:
        group.load(folder)
        group.run("""
            assert trainer.net is net and trainer.opt is opt and net.trainer[0] is trainer
            assert opt.param_groups[0]["params"][0] is net.weight
            assert partial().tolist() == expected
            net.register_forward_hook(lambda module, args, out: out * 2)
            assert partial().tolist() == [2 * value for value in expected]  # one hook does not replace the other
            with torch.no_grad(): net.weight += 1
            assert row.tolist() == net.weight[0].tolist()
        """)


@pytest.mark.grid(in_ci=True)
def test_views_of_an_existing_model_stay_views(cells: ddip.Group, folder: str) -> None:
    setup = """
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 2)
        a_row = net.weight[0].detach()
        held = [net.weight]
    """
    cells.run(f"{setup}\n        with torch.no_grad(): net.weight += 1\n        expected = net.weight.tolist()")
    cells.save(folder)
    with ddip.Group(2) as group:
        group.run(setup)
        group.run("outside = net.weight[1].detach()")
        assert group.load(folder)["in_place"] == ["net"]
        group.run("""
            assert net.weight.tolist() == expected and held[0] is net.weight
            with torch.no_grad(): net.weight += 1
            assert a_row.tolist() == net.weight[0].tolist() and outside.tolist() == net.weight[1].tolist()
        """)


def test_a_model_is_loaded_without_another_one_in_the_same_memory(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        memory = torch.zeros(8)
        one, two = torch.nn.Module(), torch.nn.Module()
        one.weight, two.weight = torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[4:])
    """)
    cells.save(folder)
    cells.run("one.weight.data.fill_(1); two.weight.data.fill_(2)")
    assert cells.load(folder, ["one"])["in_place"] == ["one"]
    cells.run("assert one.weight.tolist() == [0] * 4 and two.weight.tolist() == [2] * 4 and memory.sum() == 8")
    cells.load(folder)
    cells.run("assert two.weight.tolist() == [0] * 4")


def test_gradients_between_two_steps_are_saved(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        net = torch.nn.Linear(2, 1)
        net(torch.ones(3, 2) * (rank + 1)).sum().backward()
        expected = net.weight.grad.tolist()
    """)
    cells.save(folder)
    cells.run("net.weight.grad = net.bias.grad = None")
    cells.load(folder)
    cells.run("assert net.weight.grad.tolist() == expected")


OPTIONS = """
import torch, torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

def make(wrap, hook=None, **options):
    global model, optimizer
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if wrap is DDP else nn.LayerNorm(6)
    model = wrap(nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6)), **options)
    if hook is not None: model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train():
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
    return [(v.to_local() if hasattr(v, "to_local") else v).tolist() for v in model.state_dict().values()]
"""


@pytest.mark.parametrize(
    "wrap, options",
    [
        ("DDP", "broadcast_buffers=False"),
        pytest.param("DDP", "hook=fp16_compress_hook", marks=pytest.mark.grid(in_ci=True)),
        pytest.param(
            "fully_shard",
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
            marks=pytest.mark.grid(in_ci=True),
        ),
    ],
)
def test_a_wrapper_with_other_settings_is_made_anew(cells: ddip.Group, folder: str, wrap: str, options: str) -> None:
    cells.run(f"{OPTIONS}\nmake({wrap}, {options}); train()")
    assert cells.save(folder, ["model", "optimizer"])["left_out"] == {}
    cells.run("undisturbed = train()")
    cells.run(f"make({wrap})")
    assert "model" not in cells.load(folder)["in_place"]
    cells.run("assert train() == undisturbed")
    assert "model" in cells.load(folder)["in_place"]
    cells.run("assert train() == undisturbed")


GLOO_ADDS = TORCH < (2, 8)
"""True if gloo's reduce_scatter adds where it is to average: gradients of FSDP2 on the CPU depend on the size."""
SHARDED = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

def ignored():
    net = chain()
    return fully_shard(net, ignored_params={*net[2].parameters()})
def columns():
    net = chain()
    for part in (net[0], net[2]):
        fully_shard(part, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.shape[-1] % 6 == 0 else None)
    return fully_shard(net)
def methods():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
    net[2].weight = net[0].weight
    fully_shard([net[0], net[2]])
    fully_shard(net[3])
    for part in (net[0], net[3]):
        for name, value in {"force_sum_reduction_for_comms": True, "gradient_divide_factor": 1.0}.items():
            if hasattr(part, f"set_{name}"): getattr(part, f"set_{name}")(value)  # torch 2.7 lacks them
    return fully_shard(net, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
def half():
    return fully_shard(chain(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
def replicas():
    return fully_shard(chain(), mesh=init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicas", "shards")))
"""


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("kind", ["ignored", "columns", "methods"])
def test_settings_of_a_sharded_model_are_kept(warmed_up: None, folder: str, kind: str) -> None:
    with ddip.Group(2) as group:
        group.run(f"{TRAINING}\n{SHARDED}\nprepare({kind}); train(3)")
        assert not group.save(folder)["left_out"]
        undisturbed = train_on(group)
        group.load(folder)
        assert train_on(group) == undisturbed
    with ddip.Group(2) as group:
        assert group.load(folder)["not_loaded"] == {}
        assert train_on(group) == undisturbed
    if kind == "methods" or GLOO_ADDS:
        return
    with ddip.Group(3) as group:
        group.load(folder)
        for parameters, _, _, losses, *_ in train_on(group):
            assert losses == pytest.approx(undisturbed[0][3], rel=0.01)
            for parameter, expected in zip(parameters, undisturbed[0][0], strict=True):
                assert parameter == [pytest.approx(row, rel=0.01, abs=0.001) for row in expected]


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    ("kind", "micro_batch"),
    [
        ("fsdp", "requires_gradient_sync"),
        ("half", "requires_gradient_sync"),
        pytest.param(
            "replicas", "requires_all_reduce", marks=pytest.mark.skipif(GLOO_ADDS, reason="gloo has no average")
        ),
    ],
)
def test_unreduced_gradients_are_named_and_dropped(warmed_up: None, folder: str, kind: str, micro_batch: str) -> None:
    with ddip.Group(2) as group:
        group.run(f"{TRAINING}\n{SHARDED}\nprepare({kind}); train(3); opt.zero_grad()")
        assert not group.save(folder)["left_out"]
        undisturbed = train_on(group)
        group.run(f"model.set_{micro_batch}(False); model(data.tensors[0]).square().sum().backward()")
        assert group.save(f"{folder}b")["left_out"].keys() == {"gradients of model"}
        assert group.load(folder)["in_place"] == ["model", "opt", "schedule"]
        assert train_on(group) == undisturbed
        group.run("model.set_all_reduce_hook(len)")
        assert group.save(f"{folder}b")["left_out"].keys() == {"all-reduce hook of model"}


@pytest.mark.grid(in_ci=True)
def test_columns_that_the_ranks_cannot_share_change_nothing(warmed_up: None, folder: str) -> None:
    with ddip.Group(2) as group:
        group.run(
            f"{TRAINING}\n{SHARDED}\nnet = fully_shard(nn.Linear(4, 2), shard_placement_fn=lambda p: Shard(p.ndim - 1))"
        )
        group.save(folder)
    with (
        ddip.Group(3) as group,
        pytest.raises(TransferError, match=r"net cannot be loaded: .*\(2, 4\).* among 3 ranks"),
    ):
        group.load(folder)


def test_what_cannot_be_saved_is_named_and_left_out(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import socket, torch
        batches = iter(torch.utils.data.DataLoader([1, 2]))
        if rank == 1: connection = socket.socket()
        kept = [1, 2]
    """)
    report = cells.save(folder)
    assert report["left_out"].keys() == {"batches", "connection"}
    cells.run("connection = None; kept = 0")
    assert cells.load(folder)["not_loaded"].keys() == {"batches", "connection"}
    cells.run("assert kept == [1, 2]")


def test_a_definition_of_this_session_is_kept_and_named(cells: ddip.Group, folder: str) -> None:
    cells.run("def f(): return 1\nclass C: pass\nc = C()")
    cells.save(folder)
    cells.run("def f(): return 2")
    assert cells.load(folder)["kept"].keys() == {"f"}
    cells.run("assert f() == 2 and type(c) is C")


def test_an_object_that_holds_a_replaced_model_is_named(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch\nnet = torch.nn.Linear(2, 2)")
    cells.save(folder, ["net"])
    cells.run("net = torch.nn.Linear(3, 3)\nholder = {'of': net.weight}\nother = {}")
    assert cells.load(folder)["holders"] == ["holder"]


def test_every_holder_of_a_replaced_optimizer_is_named(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch\nnet = torch.nn.Linear(2, 2); held_opt = torch.optim.SGD(net.parameters(), 0.1)")
    cells.save(folder, ["net", "held_opt"])
    cells.run("held_opt = torch.optim.Adam(net.parameters(), 0.1)\nheld_list = [held_opt]")
    cells.run("held_schedule = torch.optim.lr_scheduler.StepLR(held_opt, 1)\ndef held_f(o=held_opt): return o")
    assert cells.load(folder)["holders"] == ["held_f", "held_list", "held_schedule"]
    cells.run("del held_opt, held_list, held_schedule, held_f")


# -- errors

STATE = "import torch\nnet = torch.nn.Linear(2, 2); count = 1"


@pytest.fixture
def saved(cells: ddip.Group, folder: str) -> Iterator[str]:
    """Save `net` and `count`, then change both; check afterwards that a failed load has left them as they were."""
    cells.run(STATE)
    cells.save(folder)
    cells.run("count = 2\nwith torch.no_grad(): net.weight.fill_(7)")
    yield str(next(Path(folder).iterdir()))
    cells.run("assert count == 2 and net.weight.tolist() == [[7, 7], [7, 7]], (count, net.weight)")


def test_a_save_of_another_release_loads_only_on_request(cells: ddip.Group, folder: str, saved: str) -> None:
    facts = Path(saved, "save.json")
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"releases": {"Python": "3.1", "torch": "1.0"}}))
    with pytest.raises(TransferError, match=r"torch 1\.0.*--anyway"):
        cells.load(folder)
    cells.run("assert count == 2")
    cells.load(folder, anyway=True)
    cells.run("assert count == 1\ncount = 2\nwith torch.no_grad(): net.weight.fill_(7)")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_refused(cells: ddip.Group, folder: str, saved: str) -> None:
    os.chown(next(Path(saved).glob("*.distcp")), 12345, -1)
    with pytest.raises(TransferError, match="another user"):
        cells.load(folder)


def test_a_damaged_save_changes_nothing(cells: ddip.Group, folder: str, saved: str) -> None:
    file = max(Path(saved).glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(TransferError, match="nothing was loaded"):
        cells.load(folder)


def test_a_name_that_was_not_saved_changes_nothing(cells: ddip.Group, folder: str, saved: str) -> None:
    with pytest.raises(TransferError, match="it has no variable other"):
        cells.load(folder, ["net", "other"])
    with pytest.raises(TransferError, match="there is no save"):
        cells.load(f"{folder}2")


def test_a_value_that_one_rank_cannot_load_changes_nothing(cells: ddip.Group, folder: str, saved: str) -> None:
    cells.run("""
        class Odd:
            def __getstate__(self): return {"number": 1}
            def __setstate__(self, state):
                if rank == 1: raise ValueError("odd")
        zodd = Odd()
    """)
    cells.save(folder)
    cells.run("count = 3\nwith torch.no_grad(): net.weight.fill_(8)")
    with pytest.raises(TransferError, match=r"zodd cannot be loaded.*odd.*rank 1"):
        cells.load(folder)
    cells.run("assert count == 3 and net.weight[0, 0] == 8\ncount = 2\nwith torch.no_grad(): net.weight.fill_(7)")


UNREADABLE = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
class Unreadable:
    fails = True
    def __setstate__(self, state):
        if Unreadable.fails: raise OSError("no such server")
    def __getstate__(self): return shared
torch.manual_seed(3)
shared, before_it = torch.nn.Linear(2, 1), [1, 2]
a_connection, net = Unreadable(), DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.3)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
with_a_part = [a_connection]
losses = []
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 2)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
def moments(): return [state["exp_avg"].tolist() for state in optimizer.state.values()]
"""


@pytest.mark.grid(in_ci=True)
def test_a_variable_that_cannot_be_loaded_does_not_cost_the_others(warmed_up: None, folder: str) -> None:
    with ddip.Group(2) as group:
        group.run(UNREADABLE)
        group.run("train(3)")
        group.save(folder)
        group.run("train(10)")
        told = "told = losses, [p.tolist() for p in net.parameters()], moments(), torch.rand(3).tolist()"
        group.run(told)
        undisturbed = group.pull_all(["told"], [0, 1])[0]
        group.restart()
        group.run("net = 'mine'")
        with pytest.raises(TransferError, match="a_connection cannot be loaded: OSError: no such server.*--anyway"):
            group.load(folder)
        group.run("assert net == 'mine' and 'optimizer' not in globals()")
        assert set(group.load(folder, ["losses", "before_it"])["loaded"]) == {"losses", "before_it"}
        report = group.load(folder, anyway=True)
        assert set(report["not_loaded"]) == {"a_connection", "with_a_part"}
        assert {"net", "optimizer", "shared", "train"} <= set(report["loaded"])
        group.run("train(10)")
        group.run(told)
        assert group.pull_all(["told"], [0, 1])[0] == undisturbed


STEPS = """
def train(steps):
    global step
    for _ in range(steps):
        loss = model(torch.randn(4, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
def facts():
    return step, os.name, [p.tolist() for p in (*model.parameters(), weights)], torch.rand(2).tolist()
"""


@pytest.mark.grid(in_ci=True)
def test_a_lost_module_costs_only_its_own_objects(warmed_up: None, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "lost_config.py"
    file.write_text("import torch\nclass Config:\n    def __init__(self): self.scale = torch.ones(2)\n")
    with ddip.Group(2) as group:
        group.run(f"""
            import sys
            sys.path.insert(0, {str(tmp_path)!r})
            import lost_config
            from lost_config import Config
            a_config, with_it = Config(), [Config]
            del sys, Config
            import os, torch
            torch.manual_seed(rank)
            model, weights, step = torch.nn.Linear(2, 2), torch.zeros(2), 5
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(torch.rand(2)).sum().backward()
            optimizer.step()
        """)
        group.save(folder)
        group.run(STEPS)
        undisturbed = train_on(group)
    file.rename(tmp_path / "renamed.py")
    with ddip.Group(2) as group:
        with pytest.raises(TransferError, match="lost_config cannot be loaded: .*lost_config"):
            group.load(folder)
        report = group.load(folder, anyway=True)
        assert set(report["not_loaded"]) == {"lost_config", "a_config", "with_it"}
        group.run(STEPS)
        assert train_on(group) == undisturbed


UNREADABLE_CLASS = """
import torch
class Unreadable:
    def __setstate__(self, state): raise OSError("no such server")
    def __getstate__(self): return 1
"""


def test_an_unreadable_variable_of_one_rank_stops_no_other(cells: ddip.Group, folder: str) -> None:
    cells.run(f"{UNREADABLE_CLASS}\nkept = 1\nif rank == 0: writer = Unreadable()\nelse: reader = Unreadable()")
    cells.save(folder)
    cells.run("kept = 2")
    with pytest.raises(TransferError, match="cannot be loaded: OSError: no such server"):
        cells.load(folder)
    cells.run("assert kept == 2")
    report = cells.load(folder, anyway=True)
    assert set(report["not_loaded"]) - {"Unreadable"} == {"writer", "reader"} and "kept" in report["loaded"]
    cells.run("assert kept == 1")


def test_parts_of_a_lost_model_have_saved_values_or_are_lost_too(cells: ddip.Group, folder: str) -> None:
    cells.run(f"""{UNREADABLE_CLASS}
model = torch.nn.Linear(2, 1)
model.extra = Unreadable()
a_view, adam = model.weight.detach(), torch.optim.Adam(model.parameters())
with torch.no_grad(): model.weight.fill_(5)
""")
    cells.save(folder)
    cells.run("with torch.no_grad(): model.weight.fill_(-1)")
    assert cells.load(folder, ["a_view"])["loaded"] == ["a_view"]
    cells.run("assert a_view.tolist() == [[5, 5]] and model.weight.tolist() == [[-1, -1]]\ndel a_view")
    report = cells.load(folder, anyway=True)
    assert set(report["not_loaded"]) - {"Unreadable"} == {"model", "adam"} and "a_view" in report["loaded"]
    cells.run("assert a_view.tolist() == [[5, 5]] and model.weight.tolist() == [[-1, -1]]")
    cells.run("assert adam.param_groups[0]['params'][0] is model.weight")


def test_gradients_that_are_lost_with_a_variable_are_named(cells: ddip.Group, folder: str) -> None:
    cells.run(f"""{UNREADABLE_CLASS}
net, probe = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
probe.extra = Unreadable()
(net(torch.ones(2)) + probe(torch.ones(2))).sum().backward()
""")
    cells.save(folder)
    report = cells.load(folder, anyway=True)
    assert set(report["not_loaded"]) - {"Unreadable"} == {"probe", "gradients"} and "net" in report["loaded"]


def test_objects_of_packages_are_saved_by_name_if_they_cannot_be_copied(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import os, reprlib
        from logging import lastResort
        from reprlib import aRepr
        aRepr.maxlist, holder = 3, [lastResort]
    """)
    assert set(cells.save(folder, ["lastResort", "aRepr", "holder"])["left_out"]) == {"lastResort"}
    cells.run("del lastResort, holder\naRepr.maxlist = 6")
    cells.load(folder)
    cells.run("import logging\nassert lastResort is holder[0] is logging.lastResort and aRepr.maxlist == 3")


def test_a_folder_with_other_files_is_refused(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run(STATE)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(TransferError, match=r"other files, such as notes\.txt"):
        cells.save(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_former_save(cells: ddip.Group, tmp_path: Path, background: bool) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        cells.run(STATE)
        cells.save(str(tmp_path / "run1"))
        cells.run("large = torch.rand(200_000, generator=torch.Generator().manual_seed(rank)); count = 2")
        if background:
            for _ in range(2):  # the same error again
                cells.save(str(tmp_path / "run1"), background=True)
                wait_until(lambda: not cells.saves.status()["writing"])
                assert re.search("run1: .*No space left", cells.saves.background_error())
                assert cells.saves.background_error() == ""
        else:
            with pytest.raises(TransferError, match="No space left"):
                cells.save(str(tmp_path / "run1"))
        cells.load(str(tmp_path / "run1"))
        cells.run("assert count == 1")
        assert [path.name for path in (tmp_path / "run1").iterdir()] == ["save-1"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


KILLED = """
import os, sys, threading, time
import ddip
folder = sys.argv[1]
with ddip.Group(2) as group:
    group.run("import torch\\nvalues = [torch.full((n + 1, 1000), 0.0) for n in range(20)]; step = 0")
    print(os.getpid(), *(member.pid for member in group.info()), flush=True)
    for step in range(1, 1000):
        group.run("step += 1\\nfor value in values: value.fill_(step)")
        group.save(folder, background=step % 2 == 0)
        print(step, flush=True)
"""


CHECK = """
import torch.distributed as dist
assert all((value == step).all() for value in values), step
steps = [None] * world_size
dist.all_gather_object(steps, step)
assert len(set(steps)) == 1
"""


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("moment", few([f"{who} {ms}" for who in ("script", "rank") for ms in (0, 5, 10)], "script 5"))
def test_a_kill_at_any_moment_leaves_a_complete_save(cells: ddip.Group, folder: str, moment: str) -> None:
    who, delay = moment.split()
    with subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        pids = [int(word) for word in script.stdout.readline().split()]
        saved = [int(script.stdout.readline()) for _ in range(3)]
        time.sleep(int(delay) / 1000)
        os.kill(pids[0 if who == "script" else 2], signal.SIGKILL)
        saved += [int(line) for line in script.stdout if line.strip().isdigit()]
    cells.load(folder)
    cells.run(CHECK)
    assert cells.pull(["step"])["step"] >= saved[-1] - 1, saved  # the last one may have been written in the background


# -- in the background, and at points of a loop


def test_a_background_save_has_the_values_of_its_time(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch\nlarge = torch.zeros(3_000_000); step = 1")
    cells.save(folder, background=True)
    cells.run("large += 1; step = 2")
    wait_until(lambda: not cells.saves.status()["writing"])
    cells.load(folder)
    cells.run("assert step == 1 and (large == 0).all()")


def test_ranks_save_at_a_common_point(cells: ddip.Group, folder: str) -> None:
    cells.save_every(0.5, folder)
    cells.run("""
        import ddip, time
        points = []
        for step in range(5000):
            time.sleep(0.001 + 0.001 * rank)
            if ddip.save_point():
                points.append(step)
                break
    """)
    cells.run("import ddip.rank.saves.points as _points\nassert not _points._plan.error, _points._plan")
    cells.save_every(None)
    wait_until(lambda: not cells.saves.status()["writing"])
    of_ranks = [found["points"] for found in cells.pull_all(["points"], range(2))[0]]
    assert of_ranks[0] and of_ranks[0] == of_ranks[1]
    cells.load(folder, ["step"])
    assert cells.pull(["step"])["step"] == of_ranks[0][-1]
    cells.run("assert not ddip.save_point()")


def test_points_are_found_after_modules_were_removed(cells: ddip.Group, folder: str) -> None:
    cells.run("import ddip, sys\nearlier = ddip.save_point\ndel sys.modules['ddip.sharded.save_points']")
    cells.save_every(0, folder)
    cells.run("""
        import ddip.sharded.save_points as imported_again
        assert imported_again.save_point is not earlier
        assert earlier() and imported_again.save_point()
    """)
    cells.save_every(None)


def test_a_warning_saves_at_the_next_point(cells: ddip.Group, folder: str) -> None:
    cells.save_every(1000, folder)
    cells.run("import ddip, os, signal, time\nstep = 0")
    results: list[bool] = []
    thread = meanwhile(lambda: bool(cells.peek(["step"])["step"]), lambda: results.append(cells.save_before_end(60)))
    cells.run("""
        while not ddip.save_point():
            step += 1
            time.sleep(0.01)
    """)
    thread.join()
    assert results == [True]
    cells.run("saved = step; step = -1")
    cells.load(folder, ["step"])
    cells.run("assert step == saved")
    cells.run(
        "os.kill(os.getpid(), signal.SIGUSR1) if rank == 1 else None\nwhile not ddip.save_point(): time.sleep(0.01)"
    )
    cells.save_every(None)


def test_a_save_before_the_end_needs_no_cell(cells: ddip.Group, folder: str) -> None:
    assert not cells.save_before_end(1)
    cells.save_every(1000, folder)
    cells.run("step = 3")
    assert cells.save_before_end(60)
    cells.save_every(None)
    cells.run("step = 0")
    cells.load(folder)
    cells.run("assert step == 3")


# -- faults that a trial found


def test_ranks_keep_values_that_a_sum_would_not_tell_apart(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch; torch.manual_seed(rank); order = torch.randperm(1024); expected = order.tolist()")
    assert cells.save(folder)["variables"]["order"] == "per rank"
    cells.run("order = None")
    cells.load(folder, ["order"])
    cells.run("assert order.tolist() == expected")


def test_a_part_of_another_variable_is_loaded_with_either(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 2)
        model = DDP(net)
        before = net.weight.tolist()
    """)
    cells.save(folder)
    for name in ("net", "model"):
        cells.run("with torch.no_grad(): net.weight += 1")
        cells.load(folder, [name])
        cells.run("assert net.weight.tolist() == before and model.module is net")


def test_objects_that_were_shared_otherwise_are_made_anew(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import copy, torch
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        best = copy.deepcopy(net)
        with torch.no_grad(): net[0].weight += 1
        first, other = best[0].weight.tolist(), net[0].weight.tolist()
    """)
    cells.save(folder)
    cells.run("best = net")
    assert not cells.load(folder)["in_place"]
    cells.run("assert best[0].weight.tolist() == first and net[0].weight.tolist() == other")


def test_a_wrapper_of_frozen_parameters_is_made_anew(cells: ddip.Group, folder: str) -> None:
    setup = """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        net[0].requires_grad_(False)
        model = DDP(net)
    """
    cells.run(f"{setup}\n        net[0].requires_grad_(True); model = DDP(net)")
    cells.save(folder)
    cells.run("del net, model")
    cells.run(setup)
    assert "model" not in cells.load(folder)["in_place"]
    cells.run("""
        import torch.distributed as dist
        model(torch.full((1, 2), float(rank))).sum().backward()
        gradients = [None] * world_size
        dist.all_gather_object(gradients, net[0].weight.grad.tolist())
        assert gradients[0] == gradients[1]
    """)


def test_an_optimizer_is_left_out_with_its_model(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        net = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(2, 2))
        opt = torch.optim.SGD(net.parameters(), 0.1)
        kept = 1
    """)
    report = cells.save(folder)
    assert report["left_out"].keys() == {"net", "opt"}
    assert "holds a part of net" in report["left_out"]["opt"]


def test_a_model_of_fsdp1_is_left_out(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel
        net = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
        opt = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 4)).sum().backward()
        opt.step()
        kept = 1
    """)
    assert cells.save(folder)["left_out"].keys() == {"net", "opt"}


def test_a_partial_load_changes_nothing_else(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        net = torch.nn.Linear(2, 1)
        net(torch.ones(1, 2)).sum().backward()
        count = 1
    """)
    cells.save(folder)
    cells.run("net.weight.grad = None; count = 2; torch.manual_seed(3); state = torch.get_rng_state()")
    cells.load(folder, ["count"])
    cells.run("assert net.weight.grad is None and count == 1 and torch.equal(torch.get_rng_state(), state)")


APART = """
import torch
torch.manual_seed(0)
class Trainer: pass
trainer, net = Trainer(), torch.nn.Linear(3, 1)
def make_optimizer(net):
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
opt, sched = make_optimizer(net)
def train(steps):
    for step in range(steps):
        loss = find_net()(torch.ones(4, 3)).sub(step).square().mean()
        sched.optimizer.zero_grad()
        loss.backward()
        sched.optimizer.step()
        sched.step()
def facts(): return [p.tolist() for p in find_net().parameters()], sched.optimizer.param_groups[0]["lr"]
def find_net(): return trainer.net if hasattr(trainer, "net") else net
def ignore(*event): pass
"""


@pytest.mark.parametrize(
    ("change", "names", "together"),
    [
        ("trainer.net = net; del net", "opt", "opt trainer"),
        ("trainer.net, trainer.opt = net, opt; del net", "trainer", "opt trainer"),
        pytest.param(
            "trainer.net, trainer.opt = net, opt; del net, opt",
            "sched",
            "sched trainer",
            marks=pytest.mark.grid(in_ci=True),
        ),
        pytest.param(
            "net.register_forward_hook(ignore)", "opt sched", "net opt sched", marks=pytest.mark.grid(in_ci=True)
        ),
        pytest.param("opt.register_step_post_hook(ignore)", "sched", "opt sched", marks=pytest.mark.grid(in_ci=True)),
    ],
)
def test_an_optimizer_or_scheduler_is_refused_without_its_parts(
    cells: ddip.Group, folder: str, change: str, names: str, together: str
) -> None:
    cells.run(f"{APART}\n{change}\ntrain(3)")
    cells.save(folder)
    undisturbed = train_on(cells)
    cells.run("train(1); before = facts()")
    with pytest.raises(TransferError, match=f"nothing was loaded: .*%dipload FOLDER {together}[)]"):
        cells.load(folder, names.split())
    cells.run("assert facts() == before; train(1); assert facts() != before")
    cells.load(folder, sorted({*together.split(), "sched", *([] if "trainer" in change else ["net"])}))
    assert train_on(cells) == undisturbed


def test_holders_of_an_optimizer_may_be_loaded_alone(cells: ddip.Group, folder: str) -> None:
    cells.run(f"{APART}\ntrainer.net, held = net, [opt, sched]\ndel net\ntrain(1)")
    cells.save(folder)
    cells.run("train(1); held = 1")
    cells.load(folder, ["held", "train"])
    cells.run("assert held == [opt, sched] and opt.param_groups[0]['params'][0] is trainer.net.weight")


def test_an_optimizer_of_no_saved_variable_is_refused(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch\n_net = torch.nn.Linear(2, 1); opt = torch.optim.SGD(_net.parameters(), 0.1); count = 1")
    cells.save(folder)
    cells.run("count = 2")
    with pytest.raises(TransferError, match="opt uses parameters of no variable"):
        cells.load(folder, ["opt", "count"])
    cells.run("assert count == 2 and opt.param_groups[0]['params'][0] is _net.weight")


COPIES = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
class Trainer:
    def __init__(self, net): self.net = net
    def __getstate__(self): return {"net": self.net.state_dict()}
    def __setstate__(self, state):
        self.net = Net()
        self.net.load_state_dict(state["net"])
        if fails and rank == 1: raise ValueError("odd")
class Average:
    def __init__(self, net): self.net = net
    def __getstate__(self): return {"net": self.net}
    def __setstate__(self, state): self.net, self.start = state["net"], state["net"].layer.weight.tolist()
fails, net = False, Net()
trainer, average = Trainer(net), Average(net)
with torch.no_grad(): net.layer.weight.fill_(1)
"""


@pytest.mark.parametrize("memory", ["", "net.layer.weight.data = torch.zeros(8)[4:6].view(1, 2)"])
def test_classes_that_copy_values_get_the_saved_ones(cells: ddip.Group, folder: str, memory: str) -> None:
    cells.run(COPIES)
    cells.save(folder)
    cells.run(f"{memory}\nwith torch.no_grad(): net.layer.weight.fill_(-99)\nkept, fails = trainer, True")
    with pytest.raises(TransferError, match="trainer cannot be loaded: ValueError: odd"):
        cells.load(folder, ["net", "average", "trainer"])
    cells.run("assert net.layer.weight.tolist() == [[-99, -99]] and trainer is kept; fails = False; old = net")
    assert cells.load(folder)["in_place"] == ["net"]
    cells.run("""
        assert net.layer.weight.tolist() == trainer.net.layer.weight.tolist() == average.start == [[1, 1]]
        assert net is old and average.net is net
    """)


def test_a_module_with_its_own_reduce_is_replaced(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def __reduce__(self): return Net, (), {"values": self.layer.state_dict()}
            def __setstate__(self, state): self.layer.load_state_dict(state["values"])
        net = Net()
        expected = net.layer.weight.tolist()
    """)
    cells.save(folder)
    cells.run("with torch.no_grad(): net.layer.weight.fill_(7)\nholder = [net]; former = net")
    report = cells.load(folder, ["net"])
    assert (report["in_place"], report["holders"]) == ([], ["former", "holder"])
    cells.run("assert net is not former and net.layer.weight.tolist() == expected")


@pytest.mark.grid
def test_hooks_and_own_attributes_of_an_optimizer_are_loaded(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        class Own(torch.optim.SGD):
            def __init__(self, *args): super().__init__(*args); self.calls = 0
            def step(self): self.calls += 1; super().step()
        net = torch.nn.Linear(1, 1)
        opt, memory = Own(net.parameters(), 0.1), torch.optim.LBFGS(net.parameters())
        seen = []
        opt.register_step_post_hook(lambda *event: seen.append(1))
        def step():
            net(torch.ones(1, 1)).sum().backward()
            opt.step()
            memory.step(lambda: net(torch.ones(1, 1)).sum())
        step()
    """)
    cells.save(folder)
    cells.run("step(); step()")
    cells.load(folder)
    proof = "count = len(seen); step(); assert opt.calls == 2 and len(seen) > count"
    cells.run(proof)
    with ddip.Group(2) as group:
        group.load(folder)
        group.run(proof)


def test_an_attribute_since_the_save_is_removed(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        class Net(torch.nn.Linear):
            def forward(self, x):
                if not hasattr(self, "cache"): self.cache = x.sum()
                return super().forward(x) + self.cache
        net = Net(1, 1)
        net.train(False)
    """)
    cells.save(folder)
    cells.run("net.train(); net(torch.ones(1, 1))")
    assert cells.load(folder)["in_place"] == ["net"]
    cells.run("assert not hasattr(net, 'cache') and not net.training")


OWN_STATE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.last, self.calls = nn.GRU(3, 4), nn.Linear(4, 1), 0
        self.cache = torch.ones(1)
    def __getstate__(self): return {name: value for name, value in vars(self).items() if name != "cache"}
    def __setstate__(self, state):
        super().__setstate__(state)
        self.cache = torch.ones(1)
    def forward(self, x):
        self.calls += 1
        return self.last(self.gru(x)[0]) * self.cache
torch.manual_seed(rank)
net, losses = Net(), []
opt = torch.optim.Adam(net.parameters(), lr=0.05)
def train(steps):
    for _ in range(steps):
        loss = net(torch.randn(5, 3)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
def facts(): return losses, [p.tolist() for p in net.parameters()], net.calls, torch.rand(2).tolist()
train(3)
"""


@pytest.mark.grid(in_ci=True)
def test_modules_with_their_own_state_continue_as_if_undisturbed(cells: ddip.Group, folder: str) -> None:
    cells.run(OWN_STATE)
    cells.save(folder)
    undisturbed = train_on(cells)
    cells.run("net.gru.flatten_parameters(); net.later = 1")
    assert cells.load(folder)["in_place"] == ["net", "opt"]
    assert train_on(cells) == undisturbed
    cells.run("assert not hasattr(net, 'later')")


@pytest.mark.parametrize(
    "made",
    [
        "net = torch.nn.LazyLinear(2)",
        "net = torch.nn.Linear(2, 2); net.register_buffer('mask', torch.ones(1).expand(3))",
        "net = torch.nn.Linear(2, 2); net.register_buffer('mean', net.weight.mean())",
    ],
)
def test_modules_that_cannot_be_filled_change_nothing_or_are_replaced(
    cells: ddip.Group, folder: str, made: str
) -> None:
    cells.run(f"import torch\n{made}\ncount = 1")
    saved = cells.save(folder)
    cells.run("count = 2")
    if "net" in saved["left_out"]:
        return
    assert not cells.load(folder)["in_place"]
    cells.run("assert count == 1")


ATTRIBUTES = """
import torch
from torch import nn
class Lookahead(torch.optim.SGD):
    def step(self):
        super().step()
        self.count = getattr(self, "count", 0) + 1
        if self.count == 5: self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        for slow, p in zip(getattr(self, "slow", ()), self.param_groups[0]["params"]): p.data.lerp_(slow, 0.3)
class Frozen(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        if self.last_epoch == 5: self.frozen = True
        return [group["lr"] * (1 if hasattr(self, "frozen") else 0.8) for group in self.optimizer.param_groups]
torch.manual_seed(rank)
net, losses = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), []
opt = Lookahead(net.parameters(), lr=0.05)
schedule = Frozen(opt)
def train(steps):
    for _ in range(steps):
        loss = net(torch.randn(5, 3)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
        for p in net.parameters():
            p.average = p.detach().lerp(getattr(p, "average", p.detach()), 0.5)
            p.data.lerp_(p.average, 0.1)
        if len(losses) > 4: net[1].running_mean.since = True
def facts():
    return losses, [p.average.tolist() for p in net.parameters()], opt.param_groups[0]["lr"], vars(net[1].running_mean)
train(2)
"""


def test_attributes_of_tensors_optimizers_and_schedulers_are_those_of_the_save(cells: ddip.Group, folder: str) -> None:
    cells.run(ATTRIBUTES)
    cells.save(folder)
    undisturbed = train_on(cells)
    assert cells.load(folder)["in_place"] == ["net", "opt", "schedule"]
    assert train_on(cells) == undisturbed


@pytest.mark.grid(in_ci=True)
def test_attributes_of_shards_are_loaded(warmed_up: None, folder: str) -> None:
    check = "assert all(p.scale == n and isinstance(p, nn.Parameter) for n, p in enumerate(model.parameters()))"
    with ddip.Group(2) as group:
        group.run(f"{TRAINING}\nprepare(fsdp)\nfor n, p in enumerate(model.parameters()): p.scale = n\n{check}")
        group.save(folder)
        group.run("for p in model.parameters(): p.scale = p.later = -1")
        assert "model" in group.load(folder)["in_place"]
        group.run(f"{check}\nassert not any(hasattr(p, 'later') for p in model.parameters())\ntrain(1)")
        group.run("model = opt = schedule = None")
        group.load(folder)
        group.run(f"{check}\ntrain(1)")


def test_a_state_that_an_optimizer_refuses_changes_nothing(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        a_net = torch.nn.Linear(2, 2)
        a_opt, opt = torch.optim.SGD(a_net.parameters(), 0.1), torch.optim.Adam(a_net.parameters(), 0.1)
        opt.state[a_net.weight]["mine"] = 1  # Adam expects "step" in a state
    """)
    cells.save(folder)
    cells.run("a_opt.param_groups[0]['lr'] = 0.5; a_net.calls = 1; before = a_net.weight.tolist()")
    with pytest.raises(TransferError, match="opt cannot be loaded: KeyError: 'step'"):
        cells.load(folder)
    cells.run("assert (a_opt.param_groups[0]['lr'], a_net.calls, a_net.weight.tolist()) == (0.5, 1, before)")


COUNTED = """
import os, torch
class State: step = 1
class Net(torch.nn.Linear):
    lists = []
    def forward(self, x): return 1
class Fragile:
    def __init__(self): self.number = 1
    def __setstate__(self, state):
        if rank == 1 and "FRAGILE" in os.environ: raise OSError("no such server")
net, z_fragile = Net(1, 1), Fragile()
"""


def test_attributes_of_classes_are_loaded_only_with_them(cells: ddip.Group, folder: str) -> None:
    cells.run(COUNTED)
    cells.save(folder)
    later = "State.step = 2; State.since = net.lists = 1; _net = net; os.environ['FRAGILE'] = 'yes'"
    cells.run(later)
    with pytest.raises(TransferError, match="z_fragile cannot be loaded"):
        cells.load(folder)
    cells.run("assert (State.step, State.since) == (2, 1); del os.environ['FRAGILE']")
    cells.load(folder, ["net"])
    cells.run("assert (State.step, State.since) == (2, 1)")
    cells.load(folder)
    cells.run("assert State.step == 1 and net is _net and type(net) is Net")


def test_code_of_a_class_that_has_changed_since_the_save_is_kept_and_named(cells: ddip.Group, folder: str) -> None:
    cells.run(COUNTED)
    cells.save(folder)
    cells.run("Net.forward = lambda self, x: 2\nState.step = 2")
    report = cells.load(folder)
    assert list(report["kept"]) == ["Net"] and "code has changed" in report["kept"]["Net"]
    cells.run("assert net(0) == 2 and State.step == 1")


@pytest.mark.grid(in_ci=True)
def test_a_stop_after_the_ranks_have_agreed_is_too_late(cells: ddip.Group, folder: str, tmp_path: Path) -> None:
    cells.run(f"""
        import pathlib, time, torch
        class Slow(torch.nn.Linear):
            def __setstate__(self, state):
                super().__setstate__(state)
                if globals().get("net") is self:  # no trial, and no new object
                    pathlib.Path({str(tmp_path)!r}, f"filling{{rank}}").touch()
                    time.sleep(0.7)
        a_net, net, count = torch.nn.Linear(2, 2), Slow(2, 2), 1
        parameters = [*a_net.parameters(), *net.parameters()]
        opt = torch.optim.SGD(parameters, 0.1)
        a_net.calls, saved = 1, [p.tolist() for p in parameters]
    """)
    cells.save(folder)
    cells.run("a_net.calls = count = opt.param_groups[0]['lr'] = 2\nfor p in parameters: p.data += 1")
    thread = meanwhile(lambda: len([*tmp_path.glob("filling*")]) == 2, press_stop)
    with pytest.raises(RequestInterrupted, match="everything was loaded"):
        cells.load(folder)
    thread.join()
    cells.run("""
        assert (count, a_net.calls, opt.param_groups[0]["lr"]) == (1, 1, 0.1)
        assert [p.tolist() for p in (*a_net.parameters(), *net.parameters())] == saved
    """)


def test_memory_that_is_changed_meanwhile_is_saved_as_it_was_once(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import threading, torch
        shared = torch.zeros(1_000_000).share_memory_()  # as a cache that workers of a loader fill
        is_over = False
        def fill():
            while not is_over: shared.add_(1)
        thread = threading.Thread(target=fill)
        thread.start()
    """)
    try:
        cells.save(folder, ["shared"])
    finally:
        cells.run("is_over = True; thread.join()")
    assert cells.load(folder)["loaded"] == ["shared"]


@pytest.mark.grid(in_ci=True)
def test_a_stopped_load_leaves_a_working_group(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch\nlarge = [torch.rand(4_000_000) for _ in range(8)]; count = 1")
    cells.save(folder)
    cells.run("count = 2")
    for delay in (0.02, 0.1):
        thread = meanwhile(lambda delay=delay: not time.sleep(delay), press_stop)
        with contextlib.suppress(RequestInterrupted):
            cells.load(folder)
        thread.join()
        cells.run("import torch.distributed as dist\nt = torch.ones(1); dist.all_reduce(t); assert t == 2")


@pytest.mark.grid(in_ci=True)
def test_a_load_waits_for_the_save_in_the_background(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch\nlarge = torch.rand(4_000_000); count = 1")
    for count in (2, 3, 4):
        cells.run(f"count = {count}")
        cells.save(folder, background=True)
        cells.run("count = 0")
        cells.load(folder)
        cells.run(f"assert count == {count}")


@pytest.mark.grid(in_ci=True)
def test_the_end_of_a_group_waits_for_a_background_save(warmed_up: None, folder: str) -> None:
    with ddip.Group(2) as group:
        group.run("import torch\nlarge = torch.rand(10_000_000)")
        group.save(folder, background=True)
    assert [path.name for path in Path(folder).iterdir()] == ["save-1"]


@pytest.mark.grid
def test_two_sessions_may_save_to_one_folder(cells: ddip.Group, folder: str) -> None:
    cells.run("import torch\nlarge = torch.full((4_000_000,), 1.0)")
    with ddip.Group(2) as group:
        group.run("import torch\nlarge = torch.full((4_000_000,), 2.0)")
        for _ in range(3):
            cells.save(folder, background=True)
            group.save(folder, background=True)
        wait_until(lambda: not (group.saves.status()["writing"] or cells.saves.status()["writing"]))
        assert not group.saves.background_error()
        group.load(folder)
        group.run("assert len(set(large.tolist())) == 1")


def test_a_save_that_another_session_removes_says_so(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        from ddip.rank.saves import save_folder
        if rank == 0:
            begin = save_folder.begin_version
            def begin_and_lose(folder):
                version = begin(folder)
                os.rmdir(version)
                return version
            save_folder.begin_version = begin_and_lose
        import os
    """)
    try:
        with pytest.raises(TransferError, match="another session saves to .* at the same time"):
            cells.save(folder)
    finally:
        cells.run("if rank == 0: save_folder.begin_version = begin")


@pytest.mark.parametrize("made", ["torch.zeros(100_000)", "numpy.zeros(100_000)"])
def test_a_flipped_bit_is_found(cells: ddip.Group, folder: str, made: str) -> None:
    cells.run(f"import numpy, torch\nlarge = {made}")
    cells.save(folder)
    file = max(Path(folder).rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[data.index(bytes(1000)) + 500] = 1
    file.write_bytes(data)
    with pytest.raises(TransferError, match="damaged"):
        cells.load(folder)


@pytest.mark.grid(in_ci=True)
def test_a_schedule_stops_when_ranks_are_replaced(warmed_up: None, folder: str) -> None:
    with ddip.Group(2) as group:
        group.run("weights = [1]")
        group.save_every(0, folder)
        assert group.save_if_due() is not None
        wait_until(lambda: not group.saves.status()["writing"])
        with pytest.raises(CellError):
            group.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        group.repair()
        assert group.save_if_due() is None
        group.load(folder)
        group.run("assert weights == [1]")


@pytest.mark.grid
def test_a_schedule_stops_when_ranks_are_restarted(warmed_up: None, folder: str) -> None:
    with ddip.Group(2) as group:
        group.run("weights = [1]")
        group.save_every(0, folder)
        assert group.save_if_due() is not None
        wait_until(lambda: not group.saves.status()["writing"])
        group.restart()
        group.run("weights = [0]")
        assert group.save_if_due() is None
        group.load(folder)
        group.run("assert weights == [1]")


TORN = """
import ddip
def train_torn():
    for x, y, number in loader:
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        if rank: raise ValueError("planted")
        opt.step()
"""


@pytest.mark.slow
def test_a_schedule_keeps_the_good_save_after_a_fault(
    warmed_up: None, folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with ddip.Group(2) as group:
        group.run(f"{TRAINING}\nprepare(ddp); train(3)\n{TORN}")
        group.save_every(0, folder)
        assert group.save_if_due() is not None
        wait_until(lambda: not group.saves.status()["writing"])
        group.save_every(None)
        undisturbed = train_on(group)
        group.load(folder)
        group.save_every(0, folder)
        group.save(f"{folder} weights", ["model"])
        with pytest.raises(CellError, match="planted"):
            group.run("train_torn()")
        group.load(f"{folder} weights")
        assert group.save_if_due() is None
        assert "saves to" in capfd.readouterr().err
        group.run("assert not ddip.save_point()")
        assert group.save_if_due() is None
        assert re.search(r"the ranks differ in .*\bopt\b", capfd.readouterr().err)
        group.save(f"{folder} torn")
        assert "the save has each rank's own values" in capfd.readouterr().err
        group.load(folder)
        group.run("assert ddip.save_point()")
        assert train_on(group) == undisturbed
        assert group.save_if_due() is not None
        assert "differ" not in capfd.readouterr().err
        with pytest.raises(CellError, match="planted"):
            group.run("train_torn()")
        group.sync()
        group.run("assert ddip.save_point()")
        group.save_every(None)


def test_a_save_within_no_grad_leaves_gradients_on(cells: ddip.Group, folder: str) -> None:
    cells.save_every(0, folder)
    cells.run("import ddip, torch\nwith torch.no_grad(): assert ddip.save_point()")
    cells.save_every(None)
    cells.load(folder)
    cells.run("assert torch.is_grad_enabled()")


def test_a_cell_on_some_ranks_has_no_points(cells: ddip.Group, folder: str) -> None:
    cells.save_every(0, folder)
    cells.run("import ddip")
    cells.run("assert not ddip.save_point()", ranks=[0])
    cells.run("assert ddip.save_point()")
    cells.save_every(None)


@pytest.mark.grid(in_ci=True)
def test_code_of_a_class_may_read_globals_while_it_loads(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        class Zbase:
            known = {}
            def __init_subclass__(cls): Zbase.known[cls.__name__] = 1
        class Child(Zbase): pass
        a_child = Child()
    """)
    cells.save(folder)
    with ddip.Group(2) as group:
        group.load(folder)
        group.run("assert type(a_child) is Child and Zbase.known == {'Child': 1}")


@pytest.mark.slow
def test_a_loader_with_persistent_workers_keeps_its_sampler(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        from torch.utils.data import DataLoader, DistributedSampler
        sampler = DistributedSampler(list(range(8)))
        loader = DataLoader(list(range(8)), sampler=sampler, num_workers=1, persistent_workers=True)
        list(loader)
    """)
    assert not cells.save(folder)["left_out"]
    cells.load(folder)
    cells.run("assert loader.sampler is sampler; sampler.set_epoch(1); assert len(list(loader)) == 4; del loader")


WITH_WORKERS = """
import torch
from torch.utils.data import DataLoader
torch.manual_seed(rank)
data = list(range(8))
how = dict(batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
loaders = [DataLoader(data, **how), DataLoader(data, generator=torch.Generator().manual_seed(rank), **how)]
unused, seen = DataLoader(data, **how), []
def train(epochs):
    for _ in range(epochs):
        for loader in loaders: seen.extend((batch.tolist(), torch.rand(1).item()) for batch in loader)
def facts(): return seen, [batch.tolist() for batch in unused], torch.rand(2).tolist()
"""


@pytest.mark.grid(in_ci=True)
def test_numbers_continue_with_persistent_workers(warmed_up: None, folder: str) -> None:
    with ddip.Group(2) as group:
        group.run(f"{WITH_WORKERS}\ntrain(2)")
        group.save(folder)
        undisturbed = train_on(group)
        for _ in range(2):  # also a save of workers that have not started again
            report = group.load(folder)
            assert [*report["not_loaded"]] == ["workers of loaders"]
            group.save(folder)
        assert train_on(group) == undisturbed
    with ddip.Group(2) as group:
        group.load(folder)
        assert train_on(group) == undisturbed


@pytest.mark.grid
def test_a_wrapper_that_is_not_loaded_leaves_no_hooks(cells: ddip.Group, folder: str) -> None:
    setup = """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1)
    """
    cells.run(setup)
    cells.run("model = DDP(net)\nmodel(torch.ones(1, 2)).sum().backward(); model.zero_grad()")
    cells.save(folder)
    with ddip.Group(2) as group:
        group.run(setup)
        assert group.load(folder, ["net"])["in_place"] == ["net"]
        group.run("""
            assert "model" not in globals()
            again = DDP(net)
            for _ in range(2):
                again.zero_grad()
                again(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
                assert net.weight.grad.tolist() == [[2, 2]], net.weight.grad
        """)


@pytest.mark.grid
def test_a_communication_hook_in_cpp_is_registered_again(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        model = DDP(torch.nn.Linear(2, 1))
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    """)
    cells.save(folder)
    with ddip.Group(2) as group:
        group.load(folder)
        group.run("assert 'FP16' in model._get_ddp_logging_data()['comm_hook'], model._get_ddp_logging_data()")


# -- in a notebook


def test_the_magics_confirm_and_name_what_is_left_out(notebook: Notebook) -> None:
    notebook.ok(
        "%%dip\nimport torch; torch.manual_seed(0)\n"
        "saved_net, saved_list, saved_iterator = torch.nn.Linear(2, 2), [rank], (n for n in [1])"
    )
    shown = notebook.ok("%dipsave run1 saved_net saved_list saved_iterator")
    assert "saved 2 variables of each rank" in shown.stdout
    assert "not saved: saved_iterator" in shown.stdout
    notebook.ok("%%dip\nsaved_list = 0")
    shown = notebook.ok("%dipload run1")
    assert "loaded saved_list, saved_net of run1" in shown.stdout
    assert "filled in place: saved_net" in shown.stdout
    notebook.ok("%%dip\nassert saved_list == [rank]")
    notebook.ok("%makedip -n 2")
    shown = notebook.ok("%dipload run1")
    assert "loaded saved_net of run1" in shown.stdout
    assert "not loaded: saved_list: not equal on the 3 ranks that saved, and there are 2 now; existing" in shown.stdout


@pytest.mark.grid(in_ci=True)
def test_saves_by_schedule_name_once_what_they_leave_out(notebook: Notebook) -> None:
    loop = "%%dip\nwhile not ddip.save_point(): time.sleep(0.05)"
    notebook.ok("%%dip\nimport ddip, time\nunsaved_iterator = (n for n in [1])")
    notebook.ok("%dipsave run2 --every 0.1s")
    after_cells, in_loops = [], []
    for _ in range(2):
        time.sleep(0.2)
        after_cells.append("unsaved_iterator" in notebook.ok("count = 1").stdout)
        in_loops.append(notebook.ok(loop).stdout.count("unsaved_iterator"))
    assert (after_cells, in_loops) == ([True, False], [1, 0])
    notebook.ok("%dipsave --stop")
    notebook.ok("%%dip\ndel unsaved_iterator")


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("%dipsave", "type a folder"),
        ("%dipload", "type a folder"),
        ("%dipsave run1 a-b", "%dipsave a-b"),
        ("%dipsave run1 nothing_like_it", "there is no variable nothing_like_it"),
        ("%dipsave run1 --every soon", "--every soon: type a time"),
        ("%dipsave run1 --stop", "--stop stands alone"),
    ],
)
def test_wrong_input_is_named(notebook: Notebook, typed: str, text: str) -> None:
    assert text in notebook.fails(typed).message


def test_a_forgotten_folder_is_noticed(notebook: Notebook) -> None:
    notebook.ok("%%dip\nforgotten, other = 1, 2")
    message = notebook.fails("%dipsave forgotten other --bg").message
    assert "forgotten is a variable of the ranks" in message and "%dipsave FOLDER forgotten other --bg" in message
    assert not (notebook.folder / "forgotten").exists()
    notebook.ok("%dipsave ./forgotten other\n%dipsave forgotten other")
    assert (notebook.folder / "forgotten").is_dir()


@pytest.mark.slow
def test_a_notebook_saves_before_sigterm_ends_it(new_notebook: Callable[[], Notebook], cells: ddip.Group) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 2\n%dipsave run1 --every 1h")
    notebook.ok("%%dip\nstep = 5")
    os.kill(notebook.pid, signal.SIGTERM)
    wait_until(lambda: not notebook.manager.is_alive())
    cells.load(str(notebook.folder / "run1"))
    cells.run("assert step == 5")


@pytest.mark.grid(in_ci=True)
def test_a_warning_to_all_processes_ends_none(new_notebook: Callable[[], Notebook], cells: ddip.Group) -> None:
    """A scheduler may send SIGUSR1 to all processes of a job."""
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 2")
    notebook.ok("%%dip\nstep = 5")
    notebook.ok("%dipsave run1 --every 1h")
    processes = family_of(notebook.pid)
    assert len(processes) >= 4  # the ranks, the controller and the preload process
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    notebook.ok("%%dip\nassert step == 5\nstep = 6")
    os.kill(notebook.pid, signal.SIGUSR1)
    wait_until(lambda: [*(notebook.folder / "run1").glob("save-*/save.json")], what="the save")
    assert family_of(notebook.pid) == processes
    cells.load(str(notebook.folder / "run1"))
    cells.run("assert step == 6")


def test_a_failed_cell_saves_nothing(cells: ddip.Group, folder: str) -> None:
    cells.save_every(0, folder)
    cells.run("step = 1")
    assert cells.save_if_due() is not None
    wait_until(lambda: not cells.saves.status()["writing"])
    with pytest.raises(CellError):
        cells.run("step = 2\nif rank == 0: raise ValueError")
    cells.save_every(None)
    cells.load(folder)
    cells.run("assert step == 1")


@pytest.mark.grid(in_ci=True)
def test_another_number_of_ranks_loads_nothing_that_differed(cells: ddip.Group, folder: str) -> None:
    setup = """
        import array, decimal
        import numpy as np, torch
        def make(number):
            return {
                "long": [*range(500), number, *range(500)],
                "nested": eval("[" * 40 + "number" + "]" * 40),
                "order": dict.fromkeys(sorted("ab", reverse=bool(number)), 0),
                "sparse": torch.sparse_coo_tensor([[0]], [1.0 + number], (2,)),
                "masked": np.ma.array([1.0, 2.0], mask=[not number, False]),
                "decimal": decimal.Decimal(number),
                "array": array.array("i", [number]),
                "subset": torch.utils.data.Subset(range(2000), [0] * 500 + [number] * 500 + [0] * 500),
            }
        globals().update({f"{name}_equal": value for name, value in make(1).items()})
        globals().update({f"{name}_own": value for name, value in make(rank).items()})
        shared = [long_equal]; net = torch.nn.BatchNorm1d(2); same = net
    """
    cells.run(setup)
    kinds = cells.save(folder)["variables"]
    with ddip.Group(1) as group:
        report = group.load(folder)
    names = {name for name in kinds if name.endswith("_own")}
    assert len(names) == 8 and report["not_loaded"].keys() == names
    assert {name.replace("_own", "_equal") for name in names} | {"shared", "net", "same"} <= {*report["loaded"]}


def test_an_unusual_variable_does_not_stop_a_save(cells: ddip.Group, folder: str) -> None:
    cells.run("""
        import torch
        class Unfinished(torch.nn.Module):
            def __init__(self): pass
        class Unsaved(torch.Tensor):
            def __reduce_ex__(self, protocol): raise TypeError("not this one")
            @classmethod
            def __torch_dispatch__(cls, *args, **kwargs): raise NotImplementedError
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        holder = torch.nn.Module(); holder.register_buffer("parts", nested)
        opaque, unfinished, step = torch.ones(3, 3).to_mkldnn(), Unfinished(), 1
        net = torch.nn.Linear(2, 1); net.weight.grad = torch.ones(1, 2).as_subclass(Unsaved)
        import weakref
        ended, without_values = weakref.proxy(Unfinished()), torch.nn.Linear(2, 2, device="meta")
    """)
    report = cells.save(folder)
    assert report["left_out"].keys() == {"opaque", "net", "unfinished", "ended"}
    assert "not this one" in report["left_out"]["net"]
    cells.run("nested = holder = None; step = 0")
    cells.load(folder)
    cells.run("assert [len(n) for n in (*nested.unbind(), *holder.parts.unbind())] == [2, 3, 2, 3] and step == 1")


KEPT = """
import torch, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
import ddip

def make(wrap):
    global model, optimizer, state, ran
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.2), nn.Linear(12, 12)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state, ran = ddip.dist_state(model, optimizer), []

def train(last):
    for step in range(state.restore(default=0), last):
        optimizer.zero_grad()
        model(torch.ones(4, 12)).square().mean().backward()
        optimizer.step()
        state.save(step + 1)
        ran.append(step)

def whole(value): return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
def facts(): return ran, state.step, [whole(p) for p in model.parameters()]
"""


def facts_after(group: ddip.Group, code: str) -> Any:
    """Run `code`, and return the facts of rank 0."""
    group.run(f"{code}\nout = facts()")
    return group.pull(["out"])["out"]


@pytest.mark.parametrize("wrap", ["DDP", pytest.param("fully_shard", marks=pytest.mark.grid(in_ci=True))])
def test_dist_state_continues_from_a_load(cells: ddip.Group, nothing_kept: None, folder: str, wrap: str) -> None:
    cells.run(f"{KEPT}\nmake({wrap}); train(3)")
    cells.save(folder)
    undisturbed = facts_after(cells, "train(6)")
    cells.load(folder)
    assert facts_after(cells, "train(6)") == undisturbed
    cells.load(folder, ["model", "optimizer", "state", "ran"])
    assert facts_after(cells, "pass")[:2] == ([0, 1, 2], 3)
    assert facts_after(cells, "train(6)")[:2] == undisturbed[:2]
    with ddip.Group(2) as group:
        group.load(folder)
        assert facts_after(group, "train(6)") == undisturbed


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("wrap", ["DDP", "fully_shard"])
def test_dist_state_continues_from_a_load_on_other_ranks(
    cells: ddip.Group, nothing_kept: None, folder: str, wrap: str
) -> None:
    saved = facts_after(cells, f"{KEPT}\nmake({wrap}); train(3)")
    cells.save(folder)
    with ddip.Group(3) as group:
        assert {"state", "ran"} <= {*group.load(folder)["loaded"]}
        assert facts_after(group, "train(3)") == saved
        assert facts_after(group, "train(6)")[:2] == ([*range(6)], 6)


@pytest.mark.slow
def test_copies_of_a_model_that_is_loaded_alone_are_deleted(cells: ddip.Group, nothing_kept: None, folder: str) -> None:
    saved = facts_after(cells, f"{KEPT}\nmake(DDP); train(3)\nother = nn.Linear(1, 1)")
    cells.save(folder)
    cells.run("train(6)")
    assert cells.load(folder, ["other", "state"])["not_loaded"] == {}
    assert facts_after(cells, "assert state.restore() == 6")[1] == 6
    assert list(cells.load(folder, ["model", "optimizer"])["not_loaded"]) == ["dist_state 'state'"]
    assert facts_after(cells, "assert state.restore(default=0) == 0")[2] == saved[2]
