"""Each row of the tables in docs/objects.md: arriving objects keep what the page says, others are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddip
from ddip.errors import BadInput, CellError, TransferError

PAGE = Path(__file__).parents[2] / "docs" / "objects.md"
SET_UP = """
import collections, copy, dataclasses, io, json, random, socket, threading
import numpy, pandas, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
@dataclasses.dataclass
class Point: x: int = 1
def scale(value, factor=3): return value * factor * base
base, passed = 2, []
generator = torch.Generator().manual_seed(1)
net = torch.nn.Linear(2, 2)
net.tied = net.weight
def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(model(torch.full((3, 2), 0.1 * step)).square().mean())
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses], [p.tolist() for p in model.parameters()]
"""
ARRIVES = {
    "numbers, texts, containers, dataclasses": (
        "shared = [1]; x = {'a': (1, 2.5, 'ä', {3}), 'b': shared, 'c': Point(4)}; y = shared",
        "assert x['a'] == (1, 2.5, 'ä', {3}) and x['c'].x == 4 and list(x) == ['a', 'b', 'c'] and x['b'] is y",
    ),
    "NumPy arrays, pandas frames": (
        "x = numpy.arange(6, dtype='f4').reshape(2, 3); y = pandas.DataFrame({'k': [1, 2]}), x[1]",
        "x[1] = 9; assert x.dtype == 'f4' and y[0]['k'].tolist() == [1, 2] and y[1].tolist() == [3, 4, 5]",
    ),
    "tensors": (
        "b = torch.arange(6.); x = [b.view(2, 3).t(), b]; y = torch.ones(2, requires_grad=True) * 2",
        "assert x[0].stride() == (1, 3) and x[0].data_ptr() == x[1].data_ptr()\n"
        "assert y.requires_grad and y.is_leaf and y.tolist() == [2, 2]",
    ),
    "modules": (
        "x = copy.deepcopy(net).eval(); x(torch.ones(1, 2)).sum().backward()\n"
        "_ = x.register_forward_hook(lambda *of: passed.append(1)); y = x",
        "assert x.tied is x.weight and not x.training and x.weight.grad is None and y is x\n"
        "before = len(passed); x(torch.ones(1, 2)); assert len(passed) == before + 1",
    ),
    "optimizers, schedulers, gradient scalers": (
        "torch.manual_seed(0); x = torch.nn.Linear(2, 1); y = torch.optim.Adam(x.parameters(), 0.1)\n"
        "_ = train(x, y, 3); expected = train(*copy.deepcopy((x, y)), 10)\n"
        "z = [torch.optim.lr_scheduler.StepLR(y, 3), torch.amp.GradScaler('cpu', init_scale=8.0)]",
        "assert z[0].optimizer is y and z[1].get_scale() == 8.0 and train(x, y, 10) == expected",
    ),
    "compiled modules": (
        "x = torch.compile(net, backend='eager'); y = net",
        "assert type(x).__name__ == 'OptimizedModule' and x._orig_mod is y",
    ),
    "functions and classes of the notebook": ("x = scale; y = Point", "base = 5; assert x(1) == 15 and y().x == 1"),
    "functions and classes of modules": ("x = json.dumps; y = collections.OrderedDict", "assert x is json.dumps"),
    "random generators of the CPU": (
        "x = torch.Generator().set_state(generator.get_state()); y = random.Random(1)",
        "assert torch.equal(x.get_state(), generator.get_state()) and y.random() == random.Random(1).random()",
    ),
    "data loaders, samplers": (
        "y = DistributedSampler(range(8), seed=2); y.set_epoch(1); x = DataLoader(range(8), sampler=y)",
        "assert x.sampler is y and (y.seed, y.epoch, y.rank) == (2, 1, rank) and list(x.dataset) == list(range(8))",
    ),
    "open files": ("x = open('/proc/self/comm'); y = x.name", "assert type(x) is io.StringIO and x.read()"),
}
"""Code that defines variables on rank 0, and code that checks them there after a pull and a push."""
MESH = "from torch.distributed.device_mesh import init_device_mesh; "
REFUSED = {
    "models in `DistributedDataParallel`": {"torch.nn.parallel.DistributedDataParallel(net)": "plain = x.module"},
    "FSDP models, DTensors, sharded state dicts, FSDP1 optimizers": {
        "torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2))": "x is an FSDP model",
        "torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2)).state_dict()": "holds a DTensor",
    },
    "`ZeroRedundancyOptimizer`": {
        "dist.optim.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)": "consolidate_state_dict"
    },
    "device meshes, process groups, stores, handles of collectives": {
        "dist.device_mesh.init_device_mesh('cpu', (2,))": "init_device_mesh",
        "dist.new_group([0, 1])": "ProcessGroup",
        "dist.HashStore()": "HashStore",
        "dist.barrier(async_op=True)": "Work",
    },
    "`rank`, `world_size`, `device`": {},
    "random generators of a GPU": {},
    "locks, threads, sockets, generators, iterators of loaders": {
        "threading.Lock()": "lock",
        "threading.Thread()": "lock|_ThreadHandle",
        "socket.socket()": "socket",
        "(n for n in range(3))": "generator",
        "iter(DataLoader(range(8)))": "DataLoaderIter",
    },
}
"""Expressions, and the error of a pull; ``gpu_cases.py`` has those of a GPU."""


def rows_of_page() -> list[str]:
    """Return the first column of the tables of the page, without headings."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [name for line in lines if (name := line.split("|")[1].strip()) != "object"]


def test_each_row_of_the_page_has_a_case() -> None:
    assert rows_of_page() == [*ARRIVES, *REFUSED]


@pytest.mark.grid(in_ci=True)
def test_objects_arrive_as_the_page_says(cells: ddip.Group) -> None:
    """Pull and push each object, and check it also on a rank that did not create it."""
    cells.run(SET_UP)
    for row, (make, check) in ARRIVES.items():
        cells.run(f"if rank == 0:\n    {make.replace(chr(10), chr(10) + '    ')}")
        names = ["x", "y", *(["z"] if "z = " in make else []), *(["expected"] if "expected" in make else [])]
        values = cells.pull(names)
        cells.push(values)
        try:
            cells.run(check)
        except CellError as error:
            pytest.fail(f"{row}: {error}")


def test_refused_objects_have_a_clear_error(cells: ddip.Group) -> None:
    cells.run(SET_UP + "import torch.distributed.optim, torch.distributed.device_mesh, torch.distributed.fsdp")
    for row, expressions in REFUSED.items():
        for expression, text in expressions.items():
            cells.run(f"x = {expression}")
            with pytest.raises(TransferError) as error:
                cells.pull(["x"])
                pytest.fail(f"{row}: {expression}")
            assert re.search(text, str(error.value)), (row, str(error.value))
    for name in ("rank", "world_size", "device"):
        with pytest.raises(BadInput, match=f"push {name}"):
            cells.push({name: 1})
    cells.run("x = None")
