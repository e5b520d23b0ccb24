"""Tests that need a GPU and are skipped without one; ``tests/gpu.sh`` runs them on an offline machine."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import ddip
from ddip.cluster.devices import gpu_names
from ddip.cluster.processes import preload_client
from ddip.group.members.placement import SHARES

from .apps import installed_app
from .environment import environment
from .gpu_cases import CASES, nccl_version
from .leftovers import wait_until
from .rank_errors import raises_on_ranks

COUNT = len(gpu_names())
pytestmark = pytest.mark.skipif(not COUNT, reason="there is no GPU here: nvidia-smi -L lists none")

NCCL = nccl_version()
IMPLEMENTATIONS = {"nccl": {}, "the former nccl": {"TORCH_DIST_USE_NCCL2": "0"}}
"""torch 2.15 has two implementations and uses the new one by default; earlier versions have one."""
LAYOUTS = {
    "one rank": ([0], None, "", COUNT >= 1),
    "two ranks on two GPUs": ([0, 1], None, "there is only one GPU here", COUNT >= 2),
    "two ranks on one GPU": (
        [0, 0],
        "cpu:gloo,cuda:nccl",
        f"NCCL {'.'.join(map(str, NCCL))} puts no two ranks on one GPU, 2.30 does",
        NCCL >= (2, 30),
    ),
}
"""GPUs, backend, and the message if that combination is impossible."""
TIMES = 10
"""Repetitions within a case."""
RUNS = [
    pytest.param(
        name,
        gpus,
        backend,
        variables,
        id=f"{name} - {layout} - {nccl}",
        marks=[
            pytest.mark.skipif(not possible, reason=why),
            pytest.mark.skipif(
                bool(variables) and not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has one nccl only"
            ),
        ],
    )
    for name, case in CASES.items()
    for layout, (gpus, backend, why, possible) in LAYOUTS.items()
    if len(gpus) in case.ranks and (case.on_shared or len({*gpus}) == len(gpus))
    for nccl, variables in IMPLEMENTATIONS.items()
]


@pytest.mark.parametrize(("name", "gpus", "backend", "variables"), RUNS)
def test_case(
    name: str, gpus: list[int], backend: str | None, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    case.skip_without_app()
    for variable, value in {**dict(case.environment), SHARES: "1"}.items():
        monkeypatch.setenv(variable, value)
    with (
        environment(**variables) if variables else contextlib.nullcontext(),
        ddip.Group(gpus=gpus, backend=backend, **dict(case.options)) as group,  # type: ignore[arg-type]
    ):
        case.run(group, TIMES)


SUM = "import torch, torch.distributed as dist\nx = torch.ones(1, device=device)\ndist.all_reduce(x)\ntotal = x.item()"


def test_one_rank_on_each_gpu_over_nccl() -> None:
    with ddip.Group(gpus="all") as group:
        assert group.world_size == COUNT
        group.run(SUM + "\nfound = (str(device), torch.cuda.current_device(), dist.get_backend(), total)")
        found = [values["found"] for values in group.pull_all(["found"], range(COUNT))[0]]
        assert [(name, current) for name, current, _, _ in found] == [(f"cuda:{i}", i) for i in range(COUNT)]
        assert {total for *_, total in found} == {float(COUNT)}
        assert {info.device for info in group.info()} == {f"GPU {i}" for i in range(COUNT)}


def test_two_ranks_on_one_gpu_over_gloo() -> None:
    with ddip.Group(gpus=[0, 0]) as group:
        assert "two ranks share a GPU" in group.spec.notice
        group.run("""
            import torch, torch.distributed as dist
            x = torch.ones(1)
            dist.all_reduce(x)
            here = str(device)
        """)
        assert [values["here"] for values in group.pull_all(["here"], [0, 1])[0]] == ["cuda:0", "cuda:0"]


@pytest.mark.skipif(COUNT < 2, reason="only one GPU here")
def test_gpus_in_the_order_given() -> None:
    with ddip.Group(gpus=[1, 0]) as group:
        group.run("import torch; name = torch.cuda.get_device_properties(device).uuid")
        swapped = [str(values["name"]) for values in group.pull_all(["name"], [0, 1])[0]]
    with ddip.Group(gpus=[0, 1]) as group:
        group.run("import torch; name = torch.cuda.get_device_properties(device).uuid")
        assert [str(values["name"]) for values in group.pull_all(["name"], [1, 0])[0]] == swapped


def test_reserved_memory_is_freed_and_tensors_arrive_on_the_cpu() -> None:
    with ddip.Group(gpus=[0]) as group:
        group.run("""
            import torch
            large = torch.zeros(100_000_000, device=device)
            kept = torch.ones(3, device=device)
        """)
        assert (group.info()[0].gpu_reserved or 0) >= 400_000_000
        group.run("del large")
        wait_until(lambda: (group.info()[0].gpu_reserved or 0) < 100_000_000)
        values, moved = group.pull_all(["kept"], [0])
        assert (values[0]["kept"].device.type, moved) == ("cpu", ["kept"])


def test_ranks_are_forked_from_a_preload_process_without_gpu_memory() -> None:
    with ddip.Group(gpus=[0]) as group:
        group.run("""
            import torch
            from torch.nn.parallel import DistributedDataParallel
            model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            before = model.module.weight.clone()
            model(torch.ones(2, 4, device=device)).sum().backward(); optimizer.step()
            changed = not torch.equal(before, model.module.weight)
        """)
        assert group.pull(["changed"]) == {"changed": True}
        parent = psutil.Process(group.members[0].pid).ppid()
        if not group.options.spawn:
            assert group.cluster.spawned == ""
            assert parent == preload_client.ensure_process().pid
            links = [os.readlink(fd) for fd in glob.glob(f"/proc/{parent}/fd/*")]
            assert [link for link in links if "nvidia" in link] == []


@pytest.mark.skipif("config.getoption('--spawn')", reason="there is no preload process")
def test_ranks_are_spawned_if_importing_an_app_uses_a_gpu(tmp_path: Path) -> None:
    code = "import torch\nhere = torch.ones(1, device='cuda')\n"
    with installed_app(tmp_path, code), ddip.Group(gpus=[0], app="toy") as group:
        assert group.cluster.spawned == "CUDA is initialised in the preload process"
        group.run(SUM)


# -- failures


def test_a_rank_raises_while_another_waits_on_the_same_gpu() -> None:
    with ddip.Group(gpus=[0, 0], failure_grace=0.1) as group:
        group.run("""
            import torch, torch.distributed as dist
            kept, x = rank, torch.ones(3, device=device)
            y = x.cpu()
        """)
        with raises_on_ranks({0: "ValueError"}, {1: "all_reduce"}):
            group.run("if rank == 0: raise ValueError\ndist.all_reduce(y)")
        group.run("""
            z = torch.ones(1)
            dist.all_reduce(z)
            assert z.item() == 2 and kept == rank and x.sum().item() == 3
        """)


def test_after_running_out_of_memory_reserved_memory_is_freed() -> None:
    with ddip.Group(gpus=[0]) as group:
        group.run("""
            import torch
            kept = rank
            torch.cuda.set_per_process_memory_fraction(0.1, device)  # others may use this GPU
            def fill():
                held = []
                while True: held.append(torch.empty(2**28, device=device))
        """)
        for _ in range(2):
            with pytest.raises(ddip.CellError, match="OutOfMemoryError"):
                group.run("fill()")
            wait_until(lambda: (group.info()[0].gpu_reserved or 0) < 2 * 2**30)
        group.run("assert kept == rank")
