"""Process-wide settings: an aborted restoration leaves none changed, and settings made by a cell stay."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddip
from ddip.errors import CellInterrupted

from .meanwhile import meanwhile, press_stop
from .rank_errors import raises_on_ranks
from .ten_steps import TEN_STEPS
from .variants import few

CUT = """
import sys
def cut(code, error=KeyboardInterrupt):
    "Raise `error` at the first line of `code` that is executed from here on: as a stop that comes there."
    def trace(frame, event, arg):
        if frame.f_code is code:
            sys.settrace(None)
            raise error
    sys.settrace(trace)
"""
STATE = """
import os, sys, warnings, numpy, torch
def state():
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"), torch.is_anomaly_enabled(), torch.get_default_dtype(),
        torch.get_default_device(), torch._C._len_torch_function_stack(), torch.get_deterministic_debug_mode(),
        warnings.filters is kept, os.getcwd(), numpy.geterr(), dict(os.environ),
    )
kept = warnings.filters
before = state()
"""
WITH = {
    "no_grad": ("torch.no_grad()", "torch.no_grad.__exit__"),
    "enable_grad": ("torch.enable_grad()", "torch.enable_grad.__exit__"),
    "inference_mode": ("torch.inference_mode()", "torch.inference_mode.__exit__"),
    "autocast": ("torch.autocast('cpu', torch.float16)", "torch.autocast.__exit__"),
    "anomaly": ("torch.autograd.detect_anomaly()", "torch.autograd.detect_anomaly.__exit__"),
    "default device": ("torch.utils._device.DeviceContext('meta')", "torch.utils._device.DeviceContext.__exit__"),
    "warning filters": ("warnings.catch_warnings()", "warnings.catch_warnings.__exit__"),
    "working directory": ("contextlib.chdir('/')", "contextlib.chdir.__exit__"),
    "numpy's errors": ("numpy.errstate(all='raise')", "numpy.errstate.__exit__"),
    "environment": ("mock.patch.dict(os.environ, HOME='/')", "mock._patch_dict._unpatch_dict"),
    "a user's": ("theirs()", "theirs.__wrapped__"),
}
THEIRS = """
import contextlib
from unittest import mock
@contextlib.contextmanager
def theirs():
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
"""


@pytest.fixture
def ranks(cells: ddip.Group) -> ddip.Group:
    cells.options.failure_grace = 30.0  # all ranks fail alike, but a loaded machine may delay one
    cells.run(CUT + STATE + THEIRS + TEN_STEPS)
    return cells


@pytest.mark.grid(in_ci=True)
def test_an_interrupted_context_exit_still_restores_its_settings(ranks: ddip.Group) -> None:
    """Test all kinds in one group, so that each starts with what the previous ones left."""
    ranks.run("undisturbed = train()")
    for manager, code in WITH.values():
        with pytest.raises(ddip.CellError, match="KeyboardInterrupt"):
            ranks.run(f"with {manager}:\n    cut({code}.__code__)")
        ranks.run("assert [now == then for now, then in zip(state(), before)] == [True] * len(before)")
    ranks.run("assert train() == undisturbed")


def test_an_optimizer_whose_step_was_cut_off_leaves_gradients_enabled(ranks: ddip.Group) -> None:
    ranks.run("undisturbed = train()\nmodel = torch.nn.Linear(1, 1)\nmodel(torch.ones(1)).backward()")
    ranks.run("import torch._dynamo\noptimizer = torch.optim.Adam(model.parameters())\noptimizer.step()")
    with pytest.raises(ddip.CellError, match="RuntimeError: odd"):
        ranks.run("cut(torch._dynamo.graph_break.__code__, RuntimeError('odd'))\noptimizer.step()")
    ranks.run("assert torch.is_grad_enabled() and train() == undisturbed")


ON_PURPOSE = {
    "gradients": ("torch.set_grad_enabled(False)", "gradients disabled", "torch.set_grad_enabled(True)"),
    "dtype": (
        "torch.set_default_dtype(torch.float64)",
        "the default dtype torch.float64",
        "torch.set_default_dtype(torch.float32)",
    ),
    "device": ("torch.set_default_device('meta')", "the default device meta", "torch.set_default_device(None)"),
    "deterministic": (
        "torch.use_deterministic_algorithms(True)",
        "deterministic algorithms enabled",
        "torch.set_deterministic_debug_mode(0)",
    ),
    "environment": ("os.environ['HOME'] = '/odd'", "os.environ changed (HOME)", "os.environ['HOME'] = "),
    "numpy": ("numpy.seterr(all='raise')", "np.seterr changed", "numpy.seterr(**before[-2])"),
}


@pytest.mark.parametrize("kind", few(ON_PURPOSE, "gradients", "environment"))
def test_settings_left_by_a_failed_cell_are_reported(
    ranks: ddip.Group, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, left, back = ON_PURPOSE[kind]
    with raises_on_ranks(dict.fromkeys((0, 1), "ValueError")):
        ranks.run(f"{code}\nraise ValueError")
    stderr = capsys.readouterr().err
    assert f"the failed cell left {left}" in stderr and "on ranks 0, 1; %%dip: " in stderr
    ranks.run("assert state() != before")
    restore = stderr.partition("%%dip: ")[2].partition(" restores the former value")[0].replace("np.", "numpy.")
    assert back in restore or kind == "numpy"
    ranks.run(f"{restore}\nassert state() == before")
    assert capsys.readouterr().err == ""


def test_a_good_cell_reports_settings_only_if_ranks_differ(
    ranks: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run("torch.use_deterministic_algorithms(True)\nos.environ['HOME'] = str(rank)")
    assert capsys.readouterr().err == ""
    ranks.run("torch.use_deterministic_algorithms(False)\nos.environ['HOME'] = before[-1]['HOME']")
    ranks.run("if rank == 1: _ = torch.set_grad_enabled(False)")
    assert "this cell left gradients disabled on rank 1, but not on rank 0; %%dip: torch.set_grad_enabled(True)" in (
        capsys.readouterr().err
    )
    ranks.run("_ = torch.set_grad_enabled(True)\nassert state() == before")


SLOW = """
import pathlib, time
class Slow:
    def __enter__(self): _ = torch.set_grad_enabled(False)
    def __exit__(self, *_):
        pathlib.Path({folder!r}, f"leaving {{rank}}").touch()
        time.sleep(0.1)
        _ = torch.set_grad_enabled(True)
"""


def test_a_stop_waits_until_a_users_context_manager_has_left(ranks: ddip.Group, tmp_path: Path) -> None:
    """Without the wait, 6 of 24 stops in a loop that enters and leaves one left its setting changed."""
    ranks.run(SLOW.format(folder=str(tmp_path)))
    stopped = meanwhile(lambda: len(list(tmp_path.iterdir())) == 2, press_stop)
    with pytest.raises(CellInterrupted):
        ranks.run("with Slow(): pass\nwhile True: pass")
    stopped.join()
    ranks.run("assert state() == before")


CHANGED = """
os.chdir({folder!r})
os.environ["RATE"] = "0.1"; os.environ["MINE"] = str(rank); del os.environ["LANG_OF_A_TEST"]
sys.path.insert(0, {folder!r})
torch.set_default_dtype(torch.float64); torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("high"); torch.backends.cudnn.benchmark = True
"""
FRESH = """
import rates
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = DDP(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), rates.of(os.environ["RATE"]))
data, losses = torch.tensor(numpy.loadtxt("data.txt"), dtype=torch.get_default_dtype()), []
for step in range(10):
    loss = net(data[rank % 2 :: 2] + step).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.item())
done = losses, [p.tolist() for p in net.parameters()], os.environ["MINE"], state()[4:10]
"""


DRAW = """
import torch, torch.distributed as dist
rows = [None] * world_size
dist.all_gather_object(rows, torch.randperm(16)[rank::world_size].tolist())
assert sorted(sum(rows, [])) == list(range(16)), rows
"""
"""Draws rows for one step of all ranks: each row once if the ranks draw the same random numbers."""


@pytest.mark.grid(in_ci=True)
def test_a_new_rank_has_the_settings_that_cells_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without them, the new rank would not find its files, or would compute other numbers."""
    monkeypatch.setenv("LANG_OF_A_TEST", "C")
    (tmp_path / "data.txt").write_text("\n".join(f"{n / 7} {n / 3} 1" for n in range(8)))
    (tmp_path / "rates.py").write_text("def of(text): return float(text)\n")
    with ddip.Group(3) as group:
        group.run(STATE + CHANGED.format(folder=str(tmp_path)) + FRESH)
        undisturbed = [values["done"] for values in group.pull_all(["done"], [0, 1, 2])[0]]
        with pytest.raises(ddip.CellError):
            group.run("torch.manual_seed(7); torch.rand(3)\nif rank == 2: os.kill(os.getpid(), 9)")
        assert group.repair() == [2]
        stderr = capsys.readouterr().err
        assert "MINE differed on ranks 0, 1, so ddip did not set it on rank 2" in stderr
        assert "rank 2 got torch's random numbers from ranks 0, 1, which all had the same" in stderr
        group.run(DRAW)
        group.run(STATE + "if rank == 2: os.environ['MINE'] = '2'\nassert 'LANG_OF_A_TEST' not in os.environ")
        group.run(FRESH)
        assert [values["done"] for values in group.pull_all(["done"], [0, 1, 2])[0]] == undisturbed
        group.run("assert os.environ['RANK'] == str(rank) and sys.path[0] == os.getcwd()")


def test_a_profiler_goes_on_in_the_next_cell(cells: ddip.Group) -> None:
    cells.run("import cProfile, io, pstats\ndef mine(): pass\nprofiler = cProfile.Profile(); profiler.enable(); mine()")
    cells.run("mine(); mine()")
    cells.run("profiler.disable()")
    cells.run("""
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).print_stats("mine")
        assert "(mine)" in text.getvalue() and " 3 " in text.getvalue(), text.getvalue()
    """)


def test_torchs_profiler_goes_on_in_the_next_cell(cells: ddip.Group) -> None:
    cells.run("import torch\nprofiler = torch.profiler.profile(with_stack=True)\nprofiler.start()")
    cells.run("def mine(): return torch.ones(3).cumsum(0)\n_ = mine()")
    cells.run("profiler.stop()\nassert 'aten::cumsum' in [event.key for event in profiler.key_averages()]")
