"""What must hold on GPUs, the most dangerous cases first; each also runs on the CPU if it makes sense there.

    test_gpus.py               each case on one GPU, on one GPU that two ranks share, and on two, with each nccl
    test_gpu_cases_on_cpu.py   the cases that make sense on the CPU, over gloo, so that they do not fail on a GPU for
                               a trivial reason

A case gets a group and a number of repetitions: a GPU machine has more time than a test suite.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import ddip
from ddip.cluster.cluster_api import Recipient
from ddip.errors import CellError, CellTimeout, GroupError

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


CASES: dict[str, Case] = {}


def gpu_case(
    *ranks: int, on_cpu: bool = True, environment: dict[str, str] | None = None, **options: object
) -> Callable[[Callable[[ddip.Group, int], None]], Callable[[ddip.Group, int], None]]:
    """Register a function as a case named after it."""

    def register(function: Callable[[ddip.Group, int], None]) -> Callable[[ddip.Group, int], None]:
        name = function.__name__ + "".join(f", {key}" for key in environment or ())
        CASES[name] = Case(
            function, ranks or (1, 2), on_cpu, tuple(options.items()), tuple((environment or {}).items())
        )
        return function

    return register


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
        group.run("x.fill_(1)" + PROOF)
    assert rank_pids(group) == former


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
    group.run(SET_UP + "storage = x.untyped_storage()\ngenerator = torch.Generator(device=device)")
    values, moved = group.pull_all(["x", "storage"], [0])
    assert values[0]["x"].device.type == values[0]["storage"].device.type == "cpu"
    assert sorted(moved) == (["storage", "x"] if runs_on_gpu(group) else [])
    if runs_on_gpu(group):
        with pytest.raises(ddip.errors.TransferError, match="generator of cuda:0 "):
            group.pull(["generator"])


@gpu_case(1, 2)
def a_tensor_is_looked_at_while_a_kernel_runs(group: ddip.Group, times: int) -> None:
    group.run(SET_UP + "import time\nstorage, begun = x.untyped_storage(), False")
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
