"""Decisions of a rank about its GPU, on a simulated GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ddip.protocol.rank_spec import has_nccl
from ddip.rank.native import sockets
from ddip.rank.process_group import membership
from ddip.rank.runtime import c10d
from ddip.rank.runtime import gpu as module
from ddip.rank.runtime.gpu import Gpu

from ..cluster.leftovers import wait_until


class SimulatedGpu(Gpu):
    """A GPU whose progress a test dictates, wait by wait: finished, not finished, or an error."""

    def __init__(self, *looks: bool | RuntimeError) -> None:
        super().__init__()
        self.device = torch.device("cuda:0")
        self.looks = list(looks)
        self.count = 0

    _is_used = True  # type: ignore[assignment]

    def begun(self) -> int:
        return self.count

    def _synchronize(self) -> None:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, RuntimeError):
            raise look
        if not look:
            threading.Event().wait(1)

    def note_figures(self) -> None:
        self.figures = {"allocated": 1, "reserved": 2, "total": 3}


class Backend:
    """An accelerator backend as in torch: it counts, and it can be aborted once `may_end` is set."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.may_end = log, threading.Event()
        self.may_end.set()

    def abort(self) -> None:
        self.log.append("abort")
        self.may_end.wait()
        self.log.append("aborted")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the actions of a rank on its group, in order."""
    log: list[str] = []
    monkeypatch.setattr(membership, "_store", "the store")
    monkeypatch.setattr(membership, "_is_cut_off", False)
    monkeypatch.setattr(sockets, "shut_down", lambda *_: log.append("cut"))
    monkeypatch.setattr(membership, "_interrupt_cell", lambda: log.append("interrupt"))
    yield log
    membership._released = False
    c10d._aborted.clear()
    c10d._aborts.clear()


@pytest.fixture
def backend(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Give this process one accelerator backend."""
    backend = Backend(log)
    monkeypatch.setattr(c10d, "_device_backends", lambda: [backend])
    return backend


def release_rank(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> bool:
    """Release the rank, wait until that is complete, and return True if work was cut off."""
    monkeypatch.setattr(membership, "gpu", gpu)
    cut_off = membership.release_group("the store", [])
    for thread in threading.enumerate():
        if thread.name == "ddip-release":
            thread.join()
    return cut_off


def test_a_rank_on_the_cpu_is_unblocked_at_once(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert release_rank(monkeypatch, Gpu()) is False
    assert log == ["cut"] and not c10d._aborts


def test_a_blocked_rank_is_interrupted_then_aborted_then_cut_off(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimulatedGpu(False)
    gpu.begin_cell()
    gpu.count = 1
    assert release_rank(monkeypatch, gpu) is True
    assert log == ["interrupt", "abort", "aborted", "cut"]


@pytest.mark.parametrize(("count", "look"), [(0, False), (1, True)])
def test_a_rank_without_a_running_collective_is_not_interrupted(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch, count: int, look: bool
) -> None:
    gpu = SimulatedGpu(look)
    gpu.begin_cell()
    gpu.count = count
    assert release_rank(monkeypatch, gpu) is False
    assert log == ["abort", "aborted", "cut"]


def test_a_collective_that_begins_during_the_abort_is_noticed(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimulatedGpu(False)
    gpu.begin_cell()
    begin_aborts = c10d.abort_collectives

    def begin_abort() -> None:
        gpu.count += 1
        begin_aborts()

    monkeypatch.setattr(c10d, "abort_collectives", begin_abort)
    assert release_rank(monkeypatch, gpu) is True
    assert "interrupt" in log


def test_a_collective_that_begins_after_the_abort_is_noticed(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimulatedGpu(False)
    gpu.begin_cell()
    assert release_rank(monkeypatch, gpu) is False
    assert "interrupt" not in log
    gpu.count += 1
    wait_until(lambda: "interrupt" in log)


@pytest.mark.parametrize("late", [False, True])
def test_a_cell_that_was_cut_off_cannot_succeed(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The interrupt may have been delayed until the end of the cell, or caught by it."""
    gpu = SimulatedGpu(False)
    gpu.begin_cell()
    monkeypatch.setattr(membership, "_interrupt_cell", membership._note_cut_off)
    gpu.count = 0 if late else 1
    assert release_rank(monkeypatch, gpu) is not late
    gpu.count = 1
    with pytest.raises(KeyboardInterrupt):
        membership.ensure_not_cut_off()
    assert membership._is_cut_off


def test_a_cell_without_collectives_survives_a_release(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimulatedGpu(False)
    gpu.begin_cell()
    release_rank(monkeypatch, gpu)
    membership.ensure_not_cut_off()


def test_a_context_that_an_abort_has_broken_is_told_when_the_group_is_left(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_rank(monkeypatch, SimulatedGpu(RuntimeError("CUDA error: an illegal memory access\nmore")))
    assert membership.leave_group()["gpu_lost"] == "CUDA error: an illegal memory access"


def test_an_endless_abort_delays_no_connections_but_prevents_leaving(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "ABORT_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(membership, "ABORT_SECONDS", 0.01)
    backend.may_end.clear()
    release_rank(monkeypatch, SimulatedGpu(True))
    assert log == ["abort", "cut"]
    with pytest.raises(RuntimeError, match="GPU"):
        membership.leave_group()
    backend.may_end.set()
    monkeypatch.setattr(membership, "ABORT_SECONDS", 10.0)
    assert membership.leave_group() == {"wrappers": 0, "meshes": 0, "subgroups": 0, "rpc": False, "gpu_lost": ""}


def test_each_communicator_is_aborted_once(log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(True)
    for _ in range(2):
        release_rank(monkeypatch, gpu)
    assert log == ["abort", "aborted", "cut", "cut"]


def test_an_abort_for_another_group_does_nothing(log: list[str], backend: Backend) -> None:
    assert membership.release_group("another store", []) is False
    assert log == []


ONCE = RuntimeError("invalid argument")
ALWAYS = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")


@pytest.mark.parametrize(
    ("looks", "state", "lost"),
    [
        ([True], "done", ""),
        ([False], "under way", ""),
        ([ONCE, True], "done", ""),
        ([ALWAYS], "lost", "CUDA error: device-side assert triggered"),
    ],
)
def test_after_a_cell_gpus_are_done_or_busy_or_lost(
    monkeypatch: pytest.MonkeyPatch, looks: list[Any], state: str, lost: str
) -> None:
    monkeypatch.setattr(module, "FAILED_SECONDS", 0.02)
    gpu = SimulatedGpu(*looks)
    gpu.begin_cell()
    assert (gpu.settle(), gpu.lost, gpu.figures is not None) == (state, lost, state == "done")


def test_after_a_good_cell_the_gpu_is_not_checked_twice() -> None:
    gpu = SimulatedGpu(True, RuntimeError("not asked"))
    gpu.begin_cell()
    gpu.finish()
    assert (gpu.settle(), gpu.state) == ("done", "done")


def test_aborting_requests_of_ddip_reports_no_damage(
    log: list[str], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimulatedGpu(True, False)
    gpu.begin_cell()
    gpu.finish()
    gpu.count = 1
    assert release_rank(monkeypatch, gpu) is False
    assert log == ["interrupt", "abort", "aborted", "cut"]


def test_sends_and_receives_count_although_torch_omits_them() -> None:
    class Counting(SimulatedGpu):
        begun = Gpu.begun

    gpu = Counting(False)
    gpu.begin_cell()
    assert not gpu.is_under_way()
    gpu.note_begun()
    assert gpu.is_under_way()


def test_work_on_a_lost_gpu_counts_as_running() -> None:
    gpu = SimulatedGpu(ALWAYS)
    gpu.begin_cell()
    gpu.count = 1
    assert gpu.is_under_way()


def test_ranks_on_the_cpu_wait_for_no_gpu() -> None:
    gpu = Gpu()
    gpu.use(torch.device("cpu"))
    gpu.begin_cell()
    gpu.note_begun()
    gpu.finish()
    gpu.tidy(empty=True)
    assert (gpu.settle(), gpu.is_under_way(), gpu.figures, gpu.last) == ("done", False, None, (None, 0))


@pytest.mark.parametrize(
    ("backend", "has"),
    [("gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:nccl2", True), ("mpi", False)],
)
def test_each_implementation_of_nccl_is_known(backend: str, has: bool) -> None:
    assert has_nccl(backend) is has


@pytest.mark.parametrize(
    ("backend", "former", "at_once"),
    [("gloo", "", False), ("cpu:gloo,cuda:nccl", "0", False), ("nccl2", "0", True), ("nccl-legacy", "", False)],
)
def test_an_nccl_that_connects_at_once_is_recognized(
    monkeypatch: pytest.MonkeyPatch, backend: str, former: str, at_once: bool
) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", former)
    assert c10d.connects_at_once(backend) is at_once
    assert c10d.connects_at_once("cpu:gloo,cuda:nccl") is (
        hasattr(torch.distributed, "ProcessGroupNCCL2") and not former
    )
