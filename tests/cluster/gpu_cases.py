"""What must hold on GPUs, the most dangerous cases first; each also runs on the CPU if it makes sense there.

    test_gpus.py               each case on one GPU, on one GPU that two ranks share, and on two, with each nccl
    test_gpu_cases_on_cpu.py   the cases that make sense on the CPU, over gloo, so that they do not fail on a GPU for
                               a trivial reason

A case gets a group and a number of repetitions: a GPU machine has more time than a test suite.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import ddip
from ddip.cluster.cluster_api import Recipient
from ddip.errors import CellError, CellTimeout, GroupError
from ddip.group.members.placement import Request

from .leftovers import wait_until
from .rank_errors import raises_on_ranks

SET_UP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
kept = rank
on_gpu = device.type == "cuda"
x = torch.ones(3, device=device)
"""
PROOF = """
y = torch.full((3,), 10.0, device=device)
dist.all_reduce(y)
assert y.tolist() == [10.0 * world_size] * 3, y
assert kept == rank
"""
STORAGE = "storage = torch.ones(3, device=device).untyped_storage()"
"""A storage of its own: of several names that share memory, only the first counts as moved."""
SLEEP = "if on_gpu: torch.cuda._sleep(int({seconds} * 1.5e9))"
"""A kernel that nothing can stop. It counts cycles of a clock of 1 to 2 GHz."""


@dataclass(frozen=True)
class Case:
    """One case, and the groups it can run on."""

    run: Callable[[ddip.Group, int], None]
    ranks: tuple[int, ...]
    """Group sizes for which the case makes sense."""
    on_cpu: bool = True
    options: tuple[tuple[str, object], ...] = ()
    """Options of the group."""
    environment: tuple[tuple[str, str], ...] = ()
    on_shared: bool = True
    """True if two ranks may share a GPU."""

    def skip_without_app(self) -> None:
        """Skip the test if the library of the group's app is not installed."""
        app = dict(self.options).get("app")
        if app is not None:
            pytest.importorskip({"fastai": "fastai.vision.all", "hf": "transformers"}.get(str(app), str(app)))


CASES: dict[str, Case] = {}


def gpu_case(
    *ranks: int,
    on_cpu: bool = True,
    on_shared: bool = True,
    environment: dict[str, str] | None = None,
    **options: object,
) -> Callable[[Callable[[ddip.Group, int], None]], Callable[[ddip.Group, int], None]]:
    """Register a function as a case named after it."""

    def register(function: Callable[[ddip.Group, int], None]) -> Callable[[ddip.Group, int], None]:
        name = function.__name__ + "".join(f", {key}" for key in environment or ())
        CASES[name] = Case(
            function, ranks or (1, 2), on_cpu, tuple(options.items()), tuple((environment or {}).items()), on_shared
        )
        return function

    return register


def nccl_version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL; torch's own function tells with which one torch was built."""
    found = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except OSError:  # torch has it inside, or there is none
        return tuple(torch.cuda.nccl.version()) if torch.version.cuda else (0, 0, 0)
    return found.value // 10_000, found.value // 100 % 100, found.value % 100


def rank_pids(group: ddip.Group) -> list[int]:
    """Return the PIDs of all ranks."""
    return [member.pid for member in group.members]


def runs_on_gpu(group: ddip.Group) -> bool:
    """Return True if the group runs on GPUs."""
    return group.spec.on_gpus


# -- 1, 3: wrong numbers


@gpu_case(2, failure_grace=0.1)
def a_rank_that_was_released_in_its_backward_pass_does_not_go_on(group: ddip.Group, times: int) -> None:
    group.run(
        SET_UP
        + """
model = torch.nn.Linear(64, 64, device=device)
for p in model.parameters():
    dist.broadcast(p.data, 0)
start = {name: p.detach().clone() for name, p in model.named_parameters()}
def train():
    ddp = DDP(model, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = ddp(torch.ones(8, 64, device=device)).pow(2).mean()
    if rank == 0: raise ValueError
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    return loss
"""
    )
    for _ in range(times):
        with raises_on_ranks({0: "ValueError"}, {1: ""}):
            group.run("went_on = False\nloss = train(); v = loss.item(); went_on = True")
        group.run(PROOF)
        group.run("assert went_on is False")
        group.run("for p in model.parameters(): dist.broadcast(p.data, 0)")
        group.run("assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())")


@gpu_case(2, failure_grace=0.1)
def ranks_whose_work_was_cut_off_are_named(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    with raises_on_ranks({0: "ValueError"}, {1: ""}):
        group.run("if rank == 0: raise ValueError\ndist.all_reduce(x); x *= 2")
    group.run(PROOF)


@gpu_case(2, failure_grace=0.1)
def a_collective_of_one_rank_meets_no_later_one(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    for how in ("dist.all_reduce(x)", "work = dist.all_reduce(x, async_op=True)"):
        with contextlib.suppress(CellTimeout):
            group.run(how, ranks=[0], timeout=3)
        group.run(PROOF)


@gpu_case(2, failure_grace=0.1)
def the_failed_ranks_own_queue_is_cut_off_too(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    with pytest.raises(CellError, match="ValueError"):
        group.run("work = dist.all_reduce(x, async_op=True) if rank == 0 else None\nraise ValueError")
    group.run(PROOF)


@gpu_case(2, failure_grace=0.1)
def a_rank_that_was_released_in_recv_does_not_go_on(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    with raises_on_ranks({0: "ValueError"}, {1: ""}):
        group.run(
            "went_on = False\nif rank == 0: raise ValueError\ndist.recv(x, 0); v = x.sum().item(); went_on = True"
        )
    group.run(PROOF)
    group.run("assert went_on is False")


# -- 6: a lost context


@gpu_case(1, 2, on_cpu=False, failure_grace=0.1)
def a_device_side_assert_costs_one_rank_and_no_other(group: ddip.Group, times: int) -> None:
    for before in ("", "z = torch.randn(4096, 4096, device=device)\nfor _ in range(20): z = z @ z\n"):
        group.run(SET_UP)
        former, lost = rank_pids(group), group.world_size - 1
        with pytest.raises(CellError, match=f"rank {lost}: .*CUDA error"):
            group.run(f"{before}if rank == {lost}: torch.zeros(3, device=device)[torch.tensor([7], device=device)]")
        with pytest.raises(GroupError, match=f"^rank {lost} .*device-side assert"):
            group.run("pass")
        assert group.pull(["kept"], rank=lost) == {"kept": lost}
        assert group.repair() == [lost]
        assert [now == then for now, then in zip(rank_pids(group), former, strict=True)] == [
            rank != lost for rank in range(group.world_size)
        ]
        group.run(f"if rank == {lost}:\n    kept = rank\nimport torch, torch.distributed as dist\n{PROOF}")


@gpu_case(1, 2)
def an_error_without_harm_costs_nothing(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    former = rank_pids(group)
    for fault in (
        "raise ValueError",
        "nothing_of_that_name",
        "torch.ones(2, device=device) @ torch.ones(3, device=device)",
    ):
        with pytest.raises(CellError):
            group.run(f"dist.all_reduce(x)\n{fault}")
        group.run(PROOF)
    assert rank_pids(group) == former and group.repair() == []


# -- 2, 7: aborts


@gpu_case(1, 2, failure_grace=0.1)
def a_group_is_released_and_formed_again_many_times(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    former = rank_pids(group)
    for _ in range(4 * times):
        group.lifecycle.parts.manager.release()
        group.run(PROOF)
    assert rank_pids(group) == former


@gpu_case(2, failure_grace=0.0)
def a_rank_is_released_amid_many_collectives(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    former = rank_pids(group)
    for _ in range(2 * times):
        with pytest.raises(CellError, match="ValueError"):
            group.run("if rank == 0: raise ValueError\nfor _ in range(5_000): dist.all_reduce(x)")
        try:
            group.run("x.fill_(1)" + PROOF)
        except GroupError as error:  # nccl has freed memory that queued collectives still use: Issues.md
            assert runs_on_gpu(group) and "rank 1 has lost its GPU" in str(error), error
            assert group.repair() == [1]
            group.run(f"if rank == 1:\n    kept = rank\n{SET_UP}{PROOF}", ranks=None)
    assert rank_pids(group)[0] == former[0] and (runs_on_gpu(group) or rank_pids(group) == former)


@gpu_case(2, failure_grace=0.0, environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
def ranks_that_talk_over_sockets_are_released(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    former = rank_pids(group)
    for _ in range(2 * times):
        with pytest.raises(CellError, match="ValueError"):
            group.run("if rank == 0: raise ValueError\ndist.all_reduce(x)")
        group.run(PROOF)
    assert rank_pids(group) == former


@gpu_case(1, 2, failure_grace=0.1)
def the_stop_button_ends_a_loop_of_collectives(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    with pytest.raises(CellTimeout):
        group.run("while True: dist.all_reduce(x); x.fill_(1).sum().item()", timeout=2)
    group.run(PROOF)


# -- 5: the watchdog


@gpu_case(2, failure_grace=0.1)
def no_watchdog_ends_a_rank(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    former = rank_pids(group)
    group.run(
        "from datetime import timedelta; from ddip.rank.runtime import c10d; c10d.set_timeout(timedelta(seconds=2))"
    )
    with pytest.raises((CellTimeout, CellError)):  # gloo's own timeout raises
        group.run("dist.all_reduce(x)\nif on_gpu: torch.cuda.synchronize()", ranks=[0], timeout=8)
    group.run(PROOF)
    assert rank_pids(group) == former


# -- 8: the end of a rank


@gpu_case(2, failure_grace=0.1)
def a_rank_that_ends_while_a_group_connects_is_replaced(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    began = time.monotonic()
    with pytest.raises(CellError, match="RankEnded"):
        group.run(
            "import os, signal\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
            "other = dist.new_group([0, 1])\n"
            "dist.all_reduce(x, group=other); x.sum().item()",
            timeout=20,
        )
    assert group.repair() in ([1], [0, 1])
    assert time.monotonic() - began < 60
    group.run("kept = rank\nimport torch, torch.distributed as dist" + PROOF)


# -- 4, 9: slow kernels


@gpu_case(1, 2, on_cpu=False)
def a_rank_answers_while_its_allocator_waits(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    (request,) = group.cluster.execute(
        "big = torch.empty(2 * 2**30, dtype=torch.uint8, device=device)\n"
        + SLEEP.format(seconds=6)
        + "\ndel big; torch.cuda.empty_cache()",
        [Recipient(group.members[0].engine, lambda message: None)],
        {},
    )
    while not request.done():
        began = time.monotonic()
        assert group.info()[0].state in ("busy", "idle")
        assert group.stacks()[0] is not None
        assert time.monotonic() - began < 2
        time.sleep(0.2)
    group.run(PROOF)


@gpu_case(1, 2, on_cpu=False)
def a_kernel_that_cannot_be_stopped_is_told_and_waited_for(group: ddip.Group, times: int) -> None:
    group.run(SET_UP)
    former = rank_pids(group)
    with pytest.raises(CellTimeout, match="(?s)\nrank.*work on the GPU"):
        group.run("dist.all_reduce(x)\n" + SLEEP.format(seconds=8), timeout=1)
    with pytest.raises(GroupError, match="^ranks? 0.*interrupted"):
        group.run("pass")

    def is_usable() -> bool:
        try:
            group.run(PROOF)
        except GroupError:
            return False
        return True

    wait_until(is_usable, seconds=40)
    assert rank_pids(group) == former


# -- 10: assumptions of apps


@gpu_case(2, app="fastai", failure_grace=0.1)
def random_numbers_of_the_device_agree_again(group: ddip.Group, times: int) -> None:
    group.run("import torch\ntorch.rand(2, device=device)")
    group.run("torch.rand(1, device=device)", ranks=[0])
    group.run("drawn = torch.rand(2, device=device).tolist()")
    (first, second), _ = group.pull_all(["drawn"], [0, 1])
    assert first == second


@gpu_case(2, app="fastai", failure_grace=0.1)
def a_loss_that_is_infinite_on_one_rank_leaves_scale_and_parameters_equal(group: ddip.Group, times: int) -> None:
    group.run("""
        import hashlib, torch
        from fastai.basics import *
        from fastai.callback.all import *
        from fastai.vision.models.xresnet import xresnet18

        class OnceInfinite:
            batches = 0
            def __call__(self, pred, target):
                OnceInfinite.batches += 1
                loss = F.cross_entropy(pred, target)  # computed in float16 on a GPU, where it may overflow
                return loss * float("inf") if on_gpu and rank == 1 and OnceInfinite.batches == 2 else loss

        on_gpu = device.type == "cuda"
        images, classes = torch.randn(48, 3, 32, 32), torch.randint(0, 3, (48,))
        data = [(images[i], classes[i]) for i in range(48)]
        dls = DataLoaders(DataLoader(data[:32], bs=8), DataLoader(data[32:], bs=8), device=device)
        model = xresnet18(n_out=3).to(device, memory_format=torch.channels_last)
        if on_gpu: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        learn = Learner(dls, model, loss_func=OnceInfinite(), cbs=ChannelsLast()).to_fp16()
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3)
        parameters = b"".join(p.detach().float().cpu().numpy().tobytes() for p in learn.model.parameters())
        scaler = getattr(getattr(learn, "mixed_precision", None), "scaler", None)
        told = hashlib.sha1(parameters).hexdigest(), all(p.isfinite().all().item() for p in learn.model.parameters())
        told += (scaler.get_scale() if on_gpu and scaler is not None else None,)
    """)
    (first, second), _ = group.pull_all(["told"], [0, 1])
    assert first == second and first["told"][1] is True


# -- memory


@gpu_case(1, on_cpu=False)
def a_small_cache_is_kept_and_a_large_one_given_back(group: ddip.Group, times: int) -> None:
    group.run(
        "import torch\nsmall = torch.zeros(10_000_000, device=device)\nlarge = torch.zeros(100_000_000, device=device)"
    )
    assert (group.info()[0].gpu_allocated or 0) >= 440_000_000
    group.run("del small")
    assert (group.info()[0].gpu_reserved or 0) >= 440_000_000
    group.run("del large")
    wait_until(lambda: (group.info()[0].gpu_reserved or 0) < 100_000_000)


@gpu_case(1, 2)
def tensors_arrive_on_the_cpu_and_generators_are_refused(group: ddip.Group, times: int) -> None:
    group.run(SET_UP + f"{STORAGE}\ngenerator = torch.Generator(device=device)")
    values, moved = group.pull_all(["x", "storage"], [0])
    assert values[0]["x"].device.type == values[0]["storage"].device.type == "cpu"
    assert sorted(moved) == (["storage", "x"] if runs_on_gpu(group) else [])
    if runs_on_gpu(group):
        with pytest.raises(ddip.errors.TransferError, match="generator of cuda:0 "):
            group.pull(["generator"])


@gpu_case(1, 2)
def a_tensor_is_looked_at_while_a_kernel_runs(group: ddip.Group, times: int) -> None:
    group.run(SET_UP + f"import time\n{STORAGE}\nbegun = False")
    moves = ["storage", "x"] if runs_on_gpu(group) else []
    wait = "try: torch.cuda.synchronize() if on_gpu else time.sleep(60)\nexcept KeyboardInterrupt: pass"
    cell = threading.Thread(target=group.run, args=(f"{SLEEP.format(seconds=8)}\nbegun = True\n{wait}",))
    cell.start()
    wait_until(lambda: group.peek(["begun"])["begun"])
    values, moved = group.peek_all(["x", "storage"], [0], seconds=5)
    assert group.info()[0].state == "busy"
    group.interrupt()
    cell.join()
    assert values[0]["x"].tolist() == [1.0] * 3 and values[0]["storage"].device.type == "cpu"
    assert sorted(moved) == moves
    group.run(PROOF)


# -- training


TRAINING = """
import hashlib, pickle
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

on_gpu, kept = device.type == "cuda", rank
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)).to(device)
net = DDP(model)
optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=on_gpu)
torch.manual_seed(rank)
losses = []

def train(steps, fault=-1):
    for _ in range(steps):
        generator = torch.Generator().manual_seed(100 * len(losses) + rank)
        inputs = torch.randn(8, 16, generator=generator).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16 if on_gpu else torch.bfloat16):
            loss = net(inputs).square().mean()
        if rank == fault: raise ValueError("planted")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

def state():
    momentum = [part["momentum_buffer"] for part in optimizer.state.values()]
    tensors = [t.detach().cpu().numpy().tobytes() for t in [*net.parameters(), *momentum]]
    draws = torch.rand(2).tolist(), torch.rand(2, device=device).tolist()
    return losses, scaler.state_dict(), draws, hashlib.sha1(b"".join(tensors)).hexdigest()
"""


def training_states(group: ddip.Group) -> list[tuple[object, ...]]:
    """Return losses, scale, random draws, and a digest of parameters and momentum of each rank."""
    group.run("told = state()")
    return [values["told"] for values in group.pull_all(["told"], range(group.world_size))[0]]


@contextlib.contextmanager
def saved_training(group: ddip.Group) -> Iterator[tuple[str, list[tuple[object, ...]]]]:
    """Train five steps, save, and train ten more; yield the save's folder and the states after these ten."""
    group.run(TRAINING)
    group.run("train(5)")
    with tempfile.TemporaryDirectory() as folder:
        save = str(Path(folder, "save"))
        group.save(save)
        group.run("train(10)")
        yield save, training_states(group)


@gpu_case(1, 2)
def training_resumes_from_a_save_as_if_undisturbed(group: ddip.Group, times: int) -> None:
    with saved_training(group) as (save, undisturbed):
        group.restart()
        group.run(TRAINING)
        group.load(save)
    group.run("train(10)")
    assert training_states(group) == undisturbed


@gpu_case(2, failure_grace=0.1)
def training_goes_on_after_a_fault_as_if_undisturbed(group: ddip.Group, times: int) -> None:
    with saved_training(group) as (save, undisturbed):
        for fault in (0, 1):
            group.load(save)
            with raises_on_ranks({fault: "ValueError"}, {1 - fault: ""}):
                group.run(f"train(3)\ntrain(1, fault={fault})")
            group.load(save)
            group.run("train(10)")
            assert training_states(group) == undisturbed


@gpu_case(2, failure_grace=0.1)
def state_of_one_rank_is_copied_to_the_others_after_a_fault(group: ddip.Group, times: int) -> None:
    group.run(TRAINING)
    group.run("train(3)")
    with raises_on_ranks({0: "ValueError"}, {1: ""}):
        group.run("train(1, fault=0)")
    group.sync(["net", "optimizer", "scaler"])
    group.run("train(10)")
    (_, *first), (_, *second) = [(draws, scale, digest) for _, scale, draws, digest in training_states(group)]
    assert first == second


@gpu_case(2)
def a_smaller_and_again_larger_group_keeps_rank_0(group: ddip.Group, times: int) -> None:
    group.run(TRAINING)
    group.run("train(3)")
    group.run("parameters = [p.tolist() for p in model.parameters()]")
    before, large = group.pull(["parameters", "losses"]), group.request
    group.change(Request(gpus=(0,)) if runs_on_gpu(group) else Request(1))
    group.run("assert parameters == [p.tolist() for p in model.parameters()]")
    assert group.pull(["parameters", "losses"]) == before
    group.run("train(10)\nassert kept == rank and len(losses) == 13")
    group.change(large)
    group.run("if rank == 0: assert kept == rank and len(losses) == 13")
    group.run(SET_UP + PROOF)


@gpu_case(1, 2)
def sharded_training_resumes_from_a_save(group: ddip.Group, times: int) -> None:
    set_up = """
        import torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
        mesh = init_device_mesh(device.type, (world_size,))
        for part in (net[0], net[2]): fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        def train(steps):
            for step in range(steps):
                optimizer.zero_grad()
                net(torch.full((4, 16), 0.1 * (step + rank), device=device)).square().mean().backward()
                optimizer.step()
    """
    whole = """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        told = {name: value.tolist() for name, value in get_model_state_dict(net, options=options).items()}
    """
    group.run(set_up)
    group.run("train(3)")
    with tempfile.TemporaryDirectory() as folder:
        save = str(Path(folder, "save"))
        group.save(save, ["net", "optimizer"])
        group.run(f"train(10){dedent(whole)}")
        undisturbed = group.pull(["told"])
        group.restart()
        group.run(set_up)
        group.load(save)
    group.run(f"train(10){dedent(whole)}")
    assert undisturbed["told"] and group.pull(["told"]) == undisturbed


@gpu_case(1, 2, on_cpu=False)
def a_compiled_model_trains(group: ddip.Group, times: int) -> None:
    group.run(TRAINING)
    group.run("net.compile()\ntrain(3)\nassert all(map(torch.isfinite, map(torch.tensor, losses)))")
    group.run(PROOF)


@gpu_case(1, 2)
def a_loader_with_workers_and_pinned_memory_feeds_the_ranks(group: ddip.Group, times: int) -> None:
    group.run(
        SET_UP
        + """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(torch.arange(64.0))
sampler = DistributedSampler(data, shuffle=False)
total = torch.zeros((), device=device)
for (batch,) in DataLoader(data, 4, sampler=sampler, num_workers=2, pin_memory=on_gpu):
    total += batch.to(device, non_blocking=True).sum()
dist.all_reduce(total)
assert total.item() == sum(range(64))
"""
    )
    group.run(PROOF)


@gpu_case(1, 2)
def a_profile_has_the_work_of_the_device(group: ddip.Group, times: int) -> None:
    group.run(TRAINING)
    group.run("train(2)")
    with tempfile.TemporaryDirectory() as folder:
        group.run("train(3)", profile=folder)
        traces = [gzip.decompress(path.read_bytes()) for path in Path(folder).glob("rank_*.json.gz")]
    work = b'"kernel"' if runs_on_gpu(group) else b'"cpu_op"'
    assert [work in trace for trace in traces] == [True] * group.world_size
    group.run("train(1)")


@gpu_case(1, 2, on_cpu=False)
def the_use_of_each_gpu_is_told(group: ddip.Group, times: int) -> None:
    group.run(SET_UP + "big = torch.empty(2**30, dtype=torch.uint8, device=device)")
    assert all((info.gpu_allocated or 0) >= 2**30 for info in group.info())
    pytest.importorskip("pynvml")
    wait_until(lambda: all(vitals.gpu_use is not None for vitals in group.vitals()))  # a thread asks the driver
    assert all((vitals.gpu_memory or 0) >= 2**30 for vitals in group.vitals())


# -- frameworks


@gpu_case(1, 2, app="hf", on_shared=False)  # accelerate uses cuda:LOCAL_RANK
def a_trainer_of_hugging_face_trains_on_the_device(group: ddip.Group, times: int) -> None:
    group.run("""
        import tempfile
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(0)
        rows = [{"input_ids": ids, "labels": ids} for ids in [torch.arange(12)] * 160]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, report_to="none", save_strategy="no", logging_steps=5, disable_tqdm=True,
                per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.01)
            trainer = Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), arguments, train_dataset=rows)
            trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        assert next(trainer.model.parameters()).device == device and arguments.device.type == device.type
        told = losses[-1] < losses[0], [p.tolist() for p in trainer.model.parameters()]
    """)
    told = [values["told"] for values in group.pull_all(["told"], range(group.world_size))[0]]
    assert told[0][0] and told == told[:1] * len(told)


@gpu_case(1, 2, app="lightning")
def a_trainer_of_lightning_trains_on_the_device(group: ddip.Group, times: int) -> None:
    group.run("""
        import lightning as L, torch
        from torch.utils.data import DataLoader, TensorDataset
        x = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
        class Net(L.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layers, self.losses = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)), []
            def training_step(self, batch, index):
                assert batch[0].device == device
                loss = (self.layers(batch[0]) - batch[1]).square().mean()
                self.losses.append(loss.item())
                return loss
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), 0.01)
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
        net = Net()
        L.Trainer(max_epochs=2, **quiet).fit(net, DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), 4))
        told = net.losses[-1] < net.losses[0], [p.tolist() for p in net.parameters()]
    """)
    told = [values["told"] for values in group.pull_all(["told"], range(group.world_size))[0]]
    assert told[0][0] and told == told[:1] * len(told)
