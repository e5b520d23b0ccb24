"""Push objects to ranks, and pull them back."""

from __future__ import annotations

import builtins
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import ddip
from ddip.errors import BadInput, CellError, RequestFailed, RequestInterrupted, TransferError
from ddip.group.cells import comms
from ddip.group.cells.cells import LATE_CELLS
from ddip.group.cells.comms import KEPT, _Widget
from ddip.group.objects import delivery
from ddip.output.cells.router import CellOutput
from ddip.protocol import on_rank
from ddip.protocol.objects import shared
from ddip.protocol.objects.pickling import fill_sampler

from .leftovers import wait_until
from .notebook import Notebook
from .variants import few


def double_value(x: float) -> float:
    return 2 * x


def run_in_main(code: str) -> dict[str, object]:
    """Run `code` in a notebook's ``__main__``; return the names it defines."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(code, namespace)
    return namespace


def test_arrays_frames_tensors_and_networks_survive_a_round_trip(cells: ddip.Group) -> None:
    network = torch.nn.Linear(3, 2)
    cells.push({"a": np.arange(6).reshape(2, 3), "f": pd.DataFrame({"x": [1, 2]}), "t": torch.ones(3), "net": network})
    cells.run("a = a + rank; f['x'] += rank; t += rank; y = net(t).detach()")
    back = cells.pull(["a", "f", "t", "net", "y"], rank=1)
    assert cells.pull([]) == cells.peek([]) == {}
    assert back["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert back["f"]["x"].tolist() == [2, 3]
    assert torch.equal(back["t"], torch.full((3,), 2.0))
    assert torch.equal(back["y"], network(torch.full((3,), 2.0)).detach())
    assert torch.equal(back["net"].weight, network.weight)


def test_functions_classes_and_lambdas_of_the_notebook_work_on_ranks(cells: ddip.Group) -> None:
    made = run_in_main(
        "class Scale:\n"
        "    def __init__(self, factor): self.factor = factor\n"
        "    def __call__(self, x): return self.factor * x\n"
        "def outer(x): return inner(x) + 1\n"
        "def inner(x): return 10 * x\n"
        "scale, shift = Scale(3), (lambda x: x - 1)"
    )
    cells.push({name: made[name] for name in ("Scale", "scale", "outer", "shift")})
    cells.run("results = [scale(rank), outer(rank), shift(rank), Scale(5)(rank), type(scale) is Scale]")
    assert cells.pull(["results"], 1) == {"results": [3, 11, 0, 5, True]}


def test_a_class_defined_only_on_a_rank_can_be_pulled(cells: ddip.Group) -> None:
    cells.run("""
        class Only:
            def __init__(self): self.rank = rank
        only = Only()
    """)
    only = cells.pull(["only"], 1)["only"]
    assert (type(only).__name__, only.rank) == ("Only", 1)


def test_an_instance_with_slots_has_no_other_attributes(cells: ddip.Group) -> None:
    names = run_in_main("import dataclasses\n@dataclasses.dataclass(slots=True)\nclass Slotted:\n    x: int = 1")
    cells.push({"slotted": names["Slotted"](2)})  # type: ignore[operator]
    cells.run("assert not hasattr(slotted, '__dict__') and slotted.x == 2")
    assert cells.pull(["slotted"])["slotted"] == names["Slotted"](2)  # type: ignore[operator]


OLD = pytest.mark.skipif(
    torch.__version__.startswith(("2.7.", "2.10.", "2.11.")),
    reason="this torch cannot gather FSDP1's full state on the CPU",
)


@pytest.mark.parametrize("name", ["ddp", pytest.param("old", marks=OLD), "new", "inside", "other"])
def test_a_wrapped_model_is_pulled_without_its_wrapper(cells: ddip.Group, name: str) -> None:
    cells.run("""
        import torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.nn.parallel import DistributedDataParallel
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        old = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=device)
        new = fully_shard(torch.nn.Linear(2, 2))
        inside = {"net": ddp}
        other = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=torch.distributed.new_group())
    """)
    kind = "DistributedDataParallel" if name in ("ddp", "inside", "other") else "FSDP"
    with pytest.raises(TransferError, match=f"{name} .*{kind}") as error:
        cells.pull([name])
    if name != "inside":
        code = str(error.value).split("`")[1]  # the line that the message suggests to type
        cells.run(code)
        assert cells.pull([code.split()[0]])
    cells.run("del ddp, old, new, inside, other")


SHARDED = """
    import copy, torch, torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Shard, distribute_tensor
    def train(model, optimizer, steps):
        losses = []
        for step in range(steps):
            loss = model(torch.full((2, 4), 0.1 * (step + rank))).square().mean()
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    def make(how):
        torch.manual_seed(0)
        plain = torch.nn.Linear(4, 3)
        made = {
            "new": lambda: fully_shard(plain),
            "old": lambda: FullyShardedDataParallel(plain, device_id=device),
            "original": lambda: FullyShardedDataParallel(plain, device_id=device, use_orig_params=True),
        }[how]()
        optimizer = torch.optim.Adam(made.parameters(), 0.1)
        train(made, optimizer, 2)
        return made, optimizer
"""
REFUSED = {
    "model": "model.state_dict()",
    "parameters": "{'inside': [tuple(model.parameters())]}",
    "optimizer": "optimizer.state_dict()",
    "whole optimizer": "optimizer",
    "tensor": "distribute_tensor(torch.arange(4.), mesh, [Shard(0)])",
    "object": "Box(distribute_tensor(torch.arange(4.), mesh, [Shard(0)]))",
    "gradient": "[p.grad for p in model.parameters()]",
    "mesh": "mesh",
    "zero": "ZeroRedundancyOptimizer(torch.nn.Linear(1, 1).parameters(), torch.optim.SGD, lr=0.1)",
    "FSDP1 optimizer": "flat[1].state_dict()",
    "FSDP1 module": "flat[0].module",
    "FSDP1 parameters": "list(original[0].parameters())",
    "FSDP1 shards": "sharded(original[0])",
    "FSDP1 inner state": "original[0].module.state_dict()",
}
"""Objects of which rank 0 has only its own part."""


def a_sharded_tensor() -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return {"w": distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])}


@pytest.mark.grid(in_ci=True)
def test_parts_of_sharded_tensors_are_refused(cells: ddip.Group) -> None:
    """Rank 0's part could be mistaken for the whole: loaded on all ranks, it is half of a model, twice."""
    cells.run(SHARDED)
    cells.run("""
        class Box:
            def __init__(self, deep): self.deep = {"a": [(deep,)]}
        def sharded(model):
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                return model.state_dict()
        mesh = init_device_mesh("cpu", (2,))
        (model, optimizer), flat, original = make("new"), make("old"), make("original")
        model(torch.ones(2, 4)).sum().backward()
    """)
    for what, code in REFUSED.items():
        cells.run(f"x = {code}")
        usual = r"full_state_dict=True.*full_tensor\(\).*dist_state"
        todo = {"mesh": "init_device_mesh", "zero": r"consolidate_state_dict\(0\)"}.get(what, usual)
        for pull in (cells.pull, cells.peek):
            with pytest.raises(TransferError, match=f"x .*rank 0: .*{todo}"):
                pull(["x"])
                pytest.fail(what)
    with pytest.raises(TransferError, match="rank 0 .*DTensor"):
        ddip.in_torchddp(2, a_sharded_tensor)
    cells.run("local = list(model.parameters())[0].to_local()")  # an explicit local part
    assert cells.pull(["local"])["local"].shape == (2, 4)
    with pytest.raises(CellError):
        cells.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(TransferError, match="x .*rank 0: .*full_state"):
        cells.repair(["x"], 0)
    assert cells.repair() == [1]


@pytest.mark.grid(in_ci=True)
def test_a_part_of_a_sharded_tensor_is_not_pushed(cells: ddip.Group) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        part = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(TransferError, match="part .*DTensor"):
            cells.push({"part": part})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("how", few(["new", "old"], "new"))
def test_a_gathered_state_trains_as_if_never_gathered(cells: ddip.Group, how: str) -> None:
    cells.run(SHARDED)
    cells.run(f"""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = make({how!r})
        state = get_model_state_dict(model, options=options)
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    """)
    pulled = cells.pull(["state", "optimizer_state"])
    cells.run("""
        undisturbed = train(model, optimizer, 10)
        end = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    """)
    cells.push(pulled)
    cells.run(f"""
        model, optimizer = make({how!r})
        train(model, optimizer, 3)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, state, options=options)
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
        assert train(model, optimizer, 10) == undisturbed
        now = get_model_state_dict(model, options=options)
        assert now.keys() == end.keys() and all(torch.equal(now[name], end[name]) for name in end)
    """)


LARGE = 2 * delivery.LARGE
HELD = """
    from pathlib import Path
    open_files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    held = [name for name in [*open_files, *Path("/proc/self/maps").open()] if "ddip-push" in name]
"""


def shared_memory_of_notebook() -> list[str]:
    """Return the links of this process to memory that it shares with ranks."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [str(link) for link in links if "ddip-push" in str(link)]


def shared_memory_of_ranks(cells: ddip.Group) -> list[str]:
    """Return the links of all ranks to memory that they share with the notebook."""
    cells.run(HELD)
    return [name for values in cells.pull_all(["held"], range(cells.world_size))[0] for name in values["held"]]


@pytest.mark.parametrize("way", ["memory", "file", "parts"])
def test_large_objects_arrive_on_all_ranks_and_leave_nothing(
    cells: ddip.Group, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "memory":
        monkeypatch.delattr(os, "memfd_create")
    if way == "parts":
        monkeypatch.setattr(shared.tempfile, "mkstemp", raise_disk_full)
    before = sorted(path.name for path in cells.cluster.run_folder.iterdir())
    large = np.random.default_rng(0).integers(0, 256, LARGE, np.uint8)
    cells.push({"large": large, "small": 1})
    cells.run("large[rank] = 0; total = int(large.sum()) + small")  # each rank has its own copy
    totals = [values["total"] for values in cells.pull_all(["total"], [0, 1])[0]]
    assert totals == [int(large.sum()) - int(large[rank]) + 1 for rank in (0, 1)]
    assert shared_memory_of_notebook() == [] and bool(shared_memory_of_ranks(cells)) == (way == "memory")
    cells.run("del large")  # frees the memory of that array
    assert shared_memory_of_ranks(cells) == []
    assert sorted(path.name for path in cells.cluster.run_folder.iterdir()) == before


@pytest.mark.grid(in_ci=True)
def test_pushed_memory_is_shared_until_a_rank_changes_it(cells: ddip.Group) -> None:
    cells.push({"array": np.ones(8 * LARGE, np.uint8), "tensor": torch.ones(8 * LARGE, dtype=torch.uint8), "small": 1})
    cells.run("""
        import numpy, torch
        def own():  # kB of the memory of pushed objects that this rank has alone
            mine, found = False, 0
            for first, second, *_ in map(str.split, open("/proc/self/smaps")):
                if "-" in first:
                    mine = "ddip-push" in " ".join(_)
                elif mine and first == "Anonymous:":
                    found += int(second)
            return found
        total = int(array.sum()) + int(tensor.sum())
        before = own()
        array[: array.size // 2] = rank
        after = own()
        sums = int(array.sum()), int(tensor.sum())
    """)
    for rank in (0, 1):
        found = cells.pull(["total", "before", "after", "sums"], rank)
        half = 4 * LARGE
        assert found["total"] == 4 * half and found["sums"] == (half + rank * half, 2 * half)
        assert found["before"] == 0 and half / 1024 <= found["after"] <= half / 1024 + 64
    cells.run("del array")
    assert all("ddip-push" in name for name in shared_memory_of_ranks(cells))
    cells.run("del tensor")
    assert shared_memory_of_ranks(cells) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", few(["memory", "parts"], "parts"))
def test_large_objects_are_pulled_completely_and_leave_nothing(
    cells: ddip.Group, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells.run(f"import numpy, torch; large = numpy.arange({LARGE}) + rank; tensor = torch.arange({LARGE}) - rank")
    if way == "parts":
        cells.run("import os; memory = os.memfd_create; del os.memfd_create")
    pulled, _ = cells.pull_all(["large", "tensor"], [0, 1])
    for rank, values in enumerate(pulled):
        assert (values["large"] == np.arange(LARGE) + rank).all()
        assert torch.equal(values["tensor"], torch.arange(LARGE) - rank)
        values["large"][0] = values["tensor"][0] = 1000  # changes only our copy
    if way == "parts":
        cells.run("os.memfd_create = memory")
    cells.run("firsts = int(large[0]), int(tensor[0])")
    assert [values["firsts"] for values in cells.pull_all(["firsts"], [0, 1])[0]] == [(0, 0), (1, -1)]
    assert shared_memory_of_ranks(cells) == []


@pytest.mark.slow
def test_a_rank_that_dies_while_it_packs_leaves_nothing(cells: ddip.Group) -> None:
    cells.push({"kept": 1})
    cells.run(f"""
        import os, signal, numpy
        class Dies:
            def __reduce__(self):
                os.kill(os.getpid(), signal.SIGKILL)
        large, dies = numpy.zeros({LARGE}), Dies()
    """)
    with pytest.raises(RequestFailed, match="rank 1: RankEnded"):
        cells.pull_all(["large", "dies"], [1])
    assert shared_memory_of_notebook() == []
    cells.repair(["kept"], 0)
    assert shared_memory_of_ranks(cells) == []


def raise_disk_full(**asked: object) -> None:
    raise OSError(28, "No space left on device")


def unpickle(how: str) -> object:
    """Behave as `how` says when a rank unpickles the object."""
    import os
    import signal
    import sys

    rank = sys.modules["__main__"].__dict__["rank"]
    if how == "raise" and rank == 1:
        raise ValueError("no way")
    if how == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "sleep":
        pass
    return how


class Unpickled:
    """An object that raises, kills its process or hangs when it is unpickled."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> tuple[object, ...]:
        return types.FunctionType(unpickle.__code__, {"__builtins__": builtins}), (self.how,)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raise", TransferError, "odd .*ValueError: .*rank 1"),
        pytest.param("die", RequestFailed, "rank 1: RankEnded", marks=pytest.mark.grid),
        ("sleep", RequestInterrupted, "pushing"),
    ],
)
def test_a_large_push_that_fails_changes_nothing_and_leaves_nothing(
    cells: ddip.Group, how: str, error: type[Exception], text: str
) -> None:
    cells.push({"large": 1})
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    if how == "sleep":
        timer.start()
    with pytest.raises(error, match=text):
        cells.push({"large": bytes(LARGE), "odd": Unpickled(how)})
    timer.cancel()
    assert shared_memory_of_notebook() == []
    cells.repair(["large"] if how == "die" else [], 0 if how == "die" else None)
    assert [values["large"] for values in cells.pull_all(["large"], [0, 1])[0]] == [1, 1]
    assert shared_memory_of_ranks(cells) == []


@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_small_push_failing_on_one_rank_restores_others(cells: ddip.Group, how: str) -> None:
    cells.push({"small": 1})
    cells.run("kept = small = [rank]")
    with pytest.raises((TransferError, RequestFailed), match="rank 1"):
        cells.push({"small": 2, "new": 3, "odd": Unpickled(how)})
    cells.repair()
    cells.run(
        "found = rank == 1 and 'kept' not in globals() or (small is kept, 'new' in globals(), 'odd' in globals())"
    )
    others = (True, False, False) if how == "raise" else True
    assert [values["found"] for values in cells.pull_all(["found"], [0, 1])[0]] == [(True, False, False), others]


def test_a_failed_transfer_keeps_objects_pushed_before(cells: ddip.Group) -> None:
    cells.push({"number": 1})
    cells.push({"number": 2})
    with pytest.raises(TransferError, match="nowhere"):
        cells.pull(["nowhere"])
    with pytest.raises(TransferError, match="odd .*rank 1"):
        cells.push({"odd": Unpickled("raise")})
    cells.ranks.ask([0, 1], on_rank.drop_transfers(1 << 40))  # drops a push that never reached these ranks
    assert [values["number"] for values in cells.pull_all(["number"], [0, 1])[0]] == [2, 2]


def test_a_push_frees_replaced_objects_when_all_ranks_finish(cells: ddip.Group) -> None:
    cells.run("""
        import numpy, weakref
        x = numpy.zeros(10)
        gone = []
        weakref.finalize(x, gone.append, 1)
    """)
    cells.push({"x": 1})
    assert [values["gone"] for values in cells.pull_all(["gone"], [0, 1])[0]] == [[1], [1]]


def test_a_repair_transfers_large_objects(cells: ddip.Group) -> None:
    cells.push({"large": bytes(LARGE)})
    with pytest.raises(CellError):
        cells.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert cells.repair(["large"], 0) == [1]
    assert cells.pull(["large"], 1) == {"large": bytes(LARGE)}
    assert shared_memory_of_notebook() == shared_memory_of_ranks(cells) == []


def test_a_sampler_of_rank_0_fits_a_new_rank(cells: ddip.Group) -> None:
    cells.run("""
        from torch.utils.data import DataLoader, DistributedSampler
        sampler = DistributedSampler(range(8), seed=3)
        loader, one = DataLoader(range(8), sampler=sampler), DistributedSampler(range(8), 4, 1)
        sampler.set_epoch(2)
        taken = list(sampler)
    """)
    taken = [values["taken"] for values in cells.pull_all(["taken"], [0, 1])[0]]
    assert cells.pull(["sampler"], 1)["sampler"].rank == 1
    with pytest.raises(CellError):
        cells.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert cells.repair(["loader", "sampler", "one"], 0) == [1]
    cells.run("taken = list(sampler); assert loader.sampler is sampler and one.rank == 1 and one.num_replicas == 4")
    assert [values["taken"] for values in cells.pull_all(["taken"], [0, 1])[0]] == taken


def test_a_sampler_that_was_in_the_notebook_fits_each_rank(cells: ddip.Group) -> None:
    """One of a group of another size fits as well; one that the notebook created is left as it is."""
    cells.run("""
        from torch.utils.data import DataLoader, DistributedSampler
        sampler = DistributedSampler(range(9), seed=3)
        taken = list(sampler)
    """)
    taken = [values["taken"] for values in cells.pull_all(["taken"], [0, 1])[0]]
    of_ranks = [values["sampler"] for values in cells.pull_all(["sampler"], [0, 1])[0]]
    assert [list(sampler) for sampler in of_ranks] == taken
    of_four = torch.utils.data.DistributedSampler(range(9), 4, 3, seed=3)
    fill_sampler(of_four, {**vars(of_four)})  # as it arrives from rank 3 of 4
    own = torch.utils.data.DistributedSampler(range(9), 2, 0)
    cells.push({"loaders": [torch.utils.data.DataLoader(range(9), sampler=of_ranks[1]), of_four], "own": own})
    cells.run("""
        taken = [list(loaders[0].sampler), list(loaders[1])]
        assert vars(loaders[1]).keys() == vars(own).keys() and own.rank == 0
    """)
    assert [values["taken"] for values in cells.pull_all(["taken"], [0, 1])[0]] == [[indices] * 2 for indices in taken]


def test_imported_random_functions_draw_from_the_ranks_generator(cells: ddip.Group) -> None:
    names = run_in_main("from random import choice\ndef draw(): return [choice(range(1000)) for _ in range(9)]")
    cells.push({"draw": names["draw"]})
    cells.run("import random; random.seed(rank); drawn = draw()")
    expected = [[generator.choice(range(1000)) for _ in range(9)] for generator in map(random.Random, (0, 1))]
    assert [values["drawn"] for values in cells.pull_all(["drawn"], [0, 1])[0]] == expected


def test_values_are_in_the_order_of_requested_ranks(cells: ddip.Group) -> None:
    cells.run("mine = rank * 10")
    for ranks in ([0, 1], [1, 0]):
        assert [v["mine"] for v in cells.pull_all(["mine"], ranks)[0]] == [10 * rank for rank in ranks]
        assert [v["mine"] for v in cells.peek_all(["mine"], ranks)[0]] == [10 * rank for rank in ranks]


def test_the_magic_gives_a_list_in_the_order_typed(notebook: Notebook) -> None:
    notebook.ok("%%dip\nmine = rank * 10")
    for typed, values in (("1,0", [10, 0]), ("2 0-1", [20, 0, 10]), ("2,0,2", [20, 0]), ("all", [0, 10, 20])):
        for now in ("", "--now "):
            shown = notebook.ok(f"%dipull {now}-r {typed} mine\nprint(mine)").stdout
            assert f"{values}" in shown, (typed, now, shown)


def test_a_push_to_one_rank_leaves_the_others_unchanged(cells: ddip.Group) -> None:
    cells.push({"only": 1}, ranks=[1])
    cells.run("there = 'only' in globals()")
    assert [v["there"] for v in cells.pull_all(["there"], [0, 1])[0]] == [False, True]


def test_an_unpicklable_object_is_named_and_nothing_arrives(cells: ddip.Group) -> None:
    with pytest.raises(TransferError, match="lock"):
        cells.push({"fine": 1, "lock": threading.Lock()})
    cells.run("found = 'fine' in globals()")
    assert cells.pull(["found"]) == {"found": False}


def test_an_object_that_a_rank_cannot_unpickle_is_named(
    cells: ddip.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here_module.py").write_text("class Here: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here_module  # type: ignore[import-not-found]

    with pytest.raises(TransferError, match="here .*only_here_module.*ranks 0, 1"):
        cells.push({"fine": 1, "here": only_here_module.Here()})
    cells.run("found = 'fine' in globals()")
    assert cells.pull(["found"]) == {"found": False}


def test_a_class_importable_only_on_ranks_gives_one_clear_error(cells: ddip.Group, tmp_path: Path) -> None:
    (tmp_path / "only_there_module.py").write_text("class There: pass\n")
    cells.run(f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        from only_there_module import There
        there = There()
    """)
    with pytest.raises(TransferError, match="there .*only_there_module"):
        cells.pull(["there"])


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_an_object_whose_unpickling_raises_is_one_clear_error(cells: ddip.Group, error: str) -> None:
    cells.run(
        f"def bad(): raise {error}('no way')\nclass Bad:\n    def __reduce__(self): return (bad, ())\nobject_ = Bad()"
    )
    with pytest.raises(TransferError, match=f"object_ .*{error}: no way"):
        cells.pull(["object_"])


def test_a_missing_or_unpicklable_name_of_a_rank_is_named(cells: ddip.Group) -> None:
    cells.run("import threading; lock = threading.Lock(); fine = 1")
    with pytest.raises(TransferError, match="lock .*rank 0"):
        cells.pull(["fine", "lock"])
    with pytest.raises(TransferError, match="rank 1 .*nowhere"):
        cells.pull(["fine", "nowhere"], rank=1)


def test_a_large_array_arrives_whole(cells: ddip.Group) -> None:
    large = np.random.default_rng(0).standard_normal(4_000_000)
    cells.push({"large": large})
    cells.run("total = large.sum()")
    assert cells.pull(["total"], 1)["total"] == large.sum()


@pytest.mark.grid
def test_a_finished_transfer_leaves_no_objects(cells: ddip.Group) -> None:
    """Prove that cells, transfers, requests and widget messages leave no records in the client."""
    client = cells.cluster.client
    tables = ("history", "results", "metadata", "outstanding", "_futures", "_output_futures", "listeners", "cells")

    def table_sizes() -> list[int]:
        return [len(getattr(client, name)) for name in tables] + [sum(map(len, client._outstanding_dict.values()))]

    def use_everything() -> None:
        cells.push({"x": 1})
        cells.pull_all(["x"], [0, 1])
        cells.peek_all(["x"], [0, 1])
        cells.info()
        cells.try_call(on_rank.complete_code("x", 1), 30)
        cells.stacks()
        for _ in range(10):
            proxy.handle_msg({"header": {"msg_type": "comm_msg"}, "content": {"comm_id": "page", "data": {}}})

    opening = {"content": {"comm_id": "page", "data": {}}}
    cells.comms._open_comm(_Widget(0, CellOutput([0]), set(), opening), opening["content"])
    proxy = comms._find_comms()[0].comms.pop("page")
    for _ in range(LATE_CELLS):
        cells.run("pass")
    for _ in range(KEPT // 10 + 1):
        use_everything()
    before = table_sizes()
    for _ in range(10):
        use_everything()
        cells.run("pass")
    wait_until(lambda: all(now <= then for now, then in zip(table_sizes(), before, strict=True)), 10, f"{before} again")


@pytest.mark.grid(in_ci=True)
def test_objects_are_freed_as_soon_as_they_have_travelled(cells: ddip.Group) -> None:
    """Free objects without the cycle collector, which runs rarely if there are many objects."""
    size = 1_000_000
    cells.run(f"there = bytes({size})")
    cells.pull(["there"])
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(10):
            cells.push({"here": bytes(size)})
            cells.pull(["there"])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held < 3 * size


TERMINAL = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
import ddip

class Opens:
    def __reduce__(self):
        return eval, ("__import__('comm').create_comm(target_name='jupyter.widget') and 1",)

with ddip.Group(2) as group:
    for _ in range(5):
        group.push({"opened": Opens()})
        group.run("print(opened, rank)", show_ranks=[0, 1])
"""


@pytest.mark.grid
def test_a_widget_during_a_push_blocks_nothing_without_a_kernel(tmp_path: Path) -> None:
    """An exception in the client's thread used to stop later requests of IPython in a terminal."""
    script = tmp_path / "script.py"
    script.write_text(TERMINAL)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("1 1") == done.stdout.count("1 0") == 5


def test_only_valid_names_are_accepted() -> None:
    from ddip.group.objects.transfer import check_names

    with pytest.raises(BadInput, match="%dipush model.weight: "):
        check_names(["model.weight"], "%dipush")


@pytest.mark.grid
def test_modules_beside_the_notebook_need_no_push(notebook: Notebook) -> None:
    notebook.ok("%makedip -n 2\nopen('mine_beside.py', 'w').write('x = 1')")
    expected = (
        "ddip: the ranks are on the notebook's host and import mine_beside from the same files; nothing was sent\n"
    )
    assert notebook.ok("%dipush --modules mine_beside").text == expected
    assert notebook.ok("y = 2\n%dipush --modules mine_beside y").text.startswith(f"{expected}ddip: pushed y: ")
    notebook.ok("%%dip\nimport mine_beside\nassert mine_beside.x + y == 3")
