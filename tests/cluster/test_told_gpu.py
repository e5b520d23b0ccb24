"""Real ranks with a simulated GPU: how a rank waits for the GPU, and is freed from that wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.errors import CellError, CellTimeout

from .meanwhile import StderrText
from .rank_errors import raises_on_ranks

TOLD_GPU = """
import threading, torch, torch.distributed as dist
from ddip.rank.runtime import gpu as module, stacks
from ddip.rank.kernel import kernel
from ddip.rank.process_group import membership as process_group
former = module.gpu
class ToldGpu(module.Gpu):
    _is_used = True
    works, holds = False, False
    def begun(self): return int(self.works)
    def _synchronize(self):
        main = threading.current_thread() is threading.main_thread()
        if self.holds or (self.works and not main): threading.Event().wait(None if main else 10)
    def note_figures(self): self.figures = None
    def tidy(self, empty): pass
def put(gpu):
    module.gpu = kernel.gpu = process_group.gpu = stacks.gpu = sys.modules["ddip.rank.kernel.cell_report"].gpu = gpu
    sys.modules["ddip.rank.runtime.housekeeping"].gpu = sys.modules["ddip.rank.process_group.collectives"].gpu = gpu
import sys
told = ToldGpu()
told.device = torch.device("cuda:0")
put(told)
kept = rank
"""
PROOF = "y = torch.ones(2)\ndist.all_reduce(y)\nassert y.tolist() == [2.0, 2.0] and kept == rank"


@pytest.fixture
def told_gpus(group: ddip.Group) -> Iterator[ddip.Group]:
    """Give two ranks a simulated GPU each."""
    group.repair()
    group.options.failure_grace, before = 0.1, group.options.failure_grace
    group.run(TOLD_GPU)
    yield group
    group.options.failure_grace = before
    group.repair()
    group.run("put(former)\ndel told, former")


@pytest.mark.grid
def test_an_aborted_rank_does_not_continue_past_its_gpu_wait(
    told_gpus: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    told_gpus.run("big, went_on = torch.randn(3500, 3500), False")
    with raises_on_ranks({0: "ValueError"}, {1: "work on the GPU"}) as caught:
        told_gpus.run("if rank == 0: raise ValueError\ntold.works = True\nproduct = torch.mm(big, big); went_on = True")
    assert "line 3" in caught.value.by_rank[1].waited
    assert "ddip: rank 1: GPU work was cut off" in StderrText(capsys).text()
    told_gpus.run(f"told.works = False\n{PROOF}\nassert went_on is False")


@pytest.mark.grid(in_ci=True)
def test_a_cell_lasts_until_its_gpu_has_finished(told_gpus: ddip.Group) -> None:
    with pytest.raises(CellTimeout, match=r"ranks 0, 1: work on the GPU,.* line 2: .*$"):
        told_gpus.run("told.holds, y = True, torch.ones(1)\ndist.all_reduce(y)\nended = True", timeout=1)
    told_gpus.run(f"told.holds = False\n{PROOF}\nassert ended")


def test_a_gpu_error_at_the_end_fails_the_cell(told_gpus: ddip.Group) -> None:
    told_gpus.run("""
        def fail():
            if told.fails:
                told.fails = False
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        told.fails, told._synchronize = False, fail
    """)
    with pytest.raises(CellError, match="^rank 1: RuntimeError: CUDA"):
        told_gpus.run("told.fails = rank == 1")
    told_gpus.run(PROOF)
