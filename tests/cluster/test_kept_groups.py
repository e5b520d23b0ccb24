"""Groups that outlive their kernel: ``%makedip --keep``, ``--attach`` and ``python -m ddip groups``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddip.cluster.processes.processes import Proc
from ddip.errors import BadInput
from ddip.kept import kept_folder
from ddip.kept.kept_folder import KeptGroup

from .conftest import whole_preload
from .leftovers import assert_nothing_left, family_of, wait_until
from .notebook import Notebook
from .test_debugger import LEAVE_BREAKPOINT

SETUP = """
import os, time, torch, torch.distributed as dist
def make():
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def train(state, steps, wait_for=None):
    model, optimizer = state
    losses = []
    for step in range(steps):
        if step == 3 and wait_for:
            while not os.path.exists(wait_for): time.sleep(0.02)
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print("step", step, flush=True)
    return losses
def numbers(state):
    model, optimizer = state
    momenta = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    return [*model.parameters(), *momenta, torch.get_rng_state()]
def assert_same_training(losses, state, steps):
    other = make()
    assert losses == train(other, steps), losses
    state_numbers, other_numbers = numbers(state), numbers(other)
    assert all(map(torch.equal, state_numbers, other_numbers))
"""


def start(notebook: Notebook, options: str = "--keep -n 2") -> KeptGroup:
    """Start a kept group in `notebook`, define `SETUP` on its ranks, and return it."""
    before = {kept.pid for kept in kept_folder.list_kept()}
    notebook.ok("%load_ext ddip")
    assert "is kept for" in notebook.ok(f"%makedip {options}").stdout
    (kept,) = (kept for kept in kept_folder.list_kept() if kept.pid not in before)
    notebook.ok(f"%%dip\n{SETUP}")
    return kept


def assert_ended(kept: KeptGroup) -> None:
    """Wait until the keeper has ended, and prove that it has left nothing."""
    wait_until(lambda: not kept.is_alive, what="the end of the keeper")
    wait_until(lambda: family_of(kept.pid) == [], what="the end of its processes")
    assert not Path(kept.folder).exists()
    assert_nothing_left(kept.pid)


def train_without_kernel(notebook: Notebook, end: Callable[[Notebook], None]) -> KeptGroup:
    """Start a kept group in `notebook` that trains for ten steps; `end` ends the kernel after the third."""
    kept = start(notebook)
    go, done = notebook.folder / "go", notebook.folder / "done"
    cell = notebook.begin(
        f"%%dip --bg\nstate = make()\nlosses = train(state, 10, {str(go)!r})\n"
        f"dist.barrier()\nif rank == 0: open({str(done)!r}, 'w').close()"
    )
    notebook.finish(cell)
    notebook.late(cell, "step 2")
    end(notebook)
    wait_until(lambda: not kept.is_claimed, what="the end of the kernel")
    go.touch()
    wait_until(done.exists, what="the end of the training")
    return kept


def attach(notebook: Notebook, kept: KeptGroup) -> Notebook:
    """Attach `notebook` to the group."""
    notebook.ok("%load_ext ddip")
    shown = notebook.ok(f"%makedip --attach {kept.name}")
    assert shown.stdout.startswith("ddip: 2 ranks on the CPU, gloo")
    return notebook


@pytest.fixture(scope="module")
def shared_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Attach a notebook to a group of two ranks, which has trained since its first kernel was killed."""
    with whole_preload():
        first, notebook = Notebook(tmp_path_factory.mktemp("first")), Notebook(tmp_path_factory.mktemp("kept"))
    for kernel in (first, notebook):
        kernel.ok("get_ipython().config.DipMagics.warm = False")  # the keeper has a preload process of its own
    kept = train_without_kernel(first, Notebook.kill)
    attach(notebook, kept)
    yield notebook
    notebook.ok("%makedip -k")
    assert_ended(kept)
    for kernel in (first, notebook):
        kernel.shut_down()
        assert_nothing_left(kernel.pid)


def test_training_goes_on_while_no_kernel_is_attached(shared_kept: Notebook) -> None:
    steps = [f"step {step}\n" for step in range(10)]
    wait_until(lambda: "".join(steps) in shared_kept.ok("%dipcell").text, what="all output of the cell")
    number = shared_kept.ok("%%dip\nassert_same_training(losses, state, 10)\nlosses = train(state, 10)").number
    assert number is not None and number > 5  # the numbers of cells continue


@pytest.mark.grid(in_ci=True)
def test_training_goes_on_while_a_kernel_restarts(new_notebook: Callable[[], Notebook]) -> None:
    notebook = new_notebook()
    kept = train_without_kernel(notebook, Notebook.restart)
    test_training_goes_on_while_no_kernel_is_attached(attach(notebook, kept))
    notebook.ok("%makedip -k")
    assert_ended(kept)


@pytest.mark.grid(in_ci=True)
def test_a_kernel_attaches_while_a_cell_runs(new_notebook: Callable[[], Notebook], tmp_path: Path) -> None:
    notebook = new_notebook()
    kept = start(notebook)
    go = tmp_path / "go"
    notebook.finish(notebook.begin(f"%%dip\nstate = make()\nlosses = train(state, 10, {str(go)!r})"), until="step 2\n")
    notebook.kill()
    other = new_notebook()
    other.ok("%load_ext ddip")
    shown = other.ok(f"%makedip --attach {kept.name}")
    assert "still running: [" in shown.stdout and "step 0\nstep 1\nstep 2\n" in shown.text
    go.touch()
    other.ok("%%dip\nassert_same_training(losses, state, 10)")
    other.ok("%makedip -k")
    assert_ended(kept)


@pytest.mark.grid(in_ci=True)
def test_a_group_ends_when_no_kernel_comes(new_notebook: Callable[[], Notebook]) -> None:
    notebook = new_notebook()
    kept = start(notebook, "--keep 1s -n 2")
    assert kept.seconds == 1 and kept.is_claimed
    notebook.kill()
    assert_ended(kept)


@pytest.mark.grid(in_ci=True)
def test_one_kernel_at_a_time(new_notebook: Callable[[], Notebook]) -> None:
    notebook, other = new_notebook(), new_notebook()
    kept = start(notebook)
    other.ok("%load_ext ddip")
    refusal = other.fails(f"%makedip --attach {kept.name}").message
    assert f"{kept.name} is held by the kernel" in refusal and refusal.count(f"PID {notebook.pid}") == 1
    assert "%unload_ext ddip releases it" in refusal
    if len(kept_folder.list_kept()) == 1:  # other kernels of this user may have kept groups of their own
        assert "type one of" not in other.fails("%makedip --attach").message
    assert "no kept group has this name" in other.fails("%makedip --attach nobody").message
    assert "attached to" in notebook.fails("%makedip --attach").message
    groups = run_groups()
    assert kept.name in groups and f"PID {notebook.pid}" in groups
    assert run_groups("--end", kept.name) == f"ended {kept.name}\n"
    assert_ended(kept)
    assert "the keeper of" in notebook.fails("%%dip\n1").message
    assert "there is no group yet" in notebook.fails("%%dip\n1").message


def run_groups(*options: str) -> str:
    """Return what ``python -m ddip groups`` prints."""
    command = [sys.executable, "-m", "ddip", "groups", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.grid(in_ci=True)
def test_groups_of_one_name_are_told_apart(
    new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = new_notebook()
    kept = start(notebook)
    twin = replace(kept, pid=os.getpid(), started=Proc.of(os.getpid()).started)
    monkeypatch.setattr(kept_folder, "list_kept", lambda: [kept, twin])
    with pytest.raises(BadInput, match=f"type the PID of a keeper: {kept.pid}, {os.getpid()}"):
        kept_folder.find_kept(kept.name)
    assert kept_folder.find_kept(str(kept.pid)) == kept
    notebook.ok("%autodip on")
    assert "%autodip is off" in notebook.ok("%makedip -k").stdout
    notebook.ok("1 + 1")
    assert_ended(kept)


@pytest.mark.grid(in_ci=True)
def test_a_killed_keeper_leaves_nothing(new_notebook: Callable[[], Notebook]) -> None:
    notebook = new_notebook()
    kept = start(notebook)
    cell = notebook.begin("%%dip\nprint('begun', flush=True)\ntime.sleep(1000)")
    notebook.finish(cell, until="begun")
    os.kill(kept.pid, signal.SIGKILL)
    shown = notebook.finish(cell)
    assert "has ended, and its group with it" in shown.message
    wait_until(lambda: family_of(kept.pid) == [], what="the end of its processes")
    notebook.ok("%makedip -n 1")  # which also removes the folders of the keeper
    assert not Path(kept.folder).exists()
    notebook.ok("%makedip -k")
    assert_nothing_left(kept.pid)


@pytest.mark.grid(in_ci=True)
def test_a_failed_start_leaves_nothing(new_notebook: Callable[[], Notebook]) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip")
    before = kept_folder.list_kept()
    assert "-n" in notebook.fails("%makedip --keep -n 0").message
    assert "leave out -k" in notebook.fails("%makedip --kee -k").message
    assert "starts no group" in notebook.fails("%makedip --keep -t 300").message
    assert "--keep soon" in notebook.fails("%makedip --keep soon").message
    assert kept_folder.list_kept() == before
    assert_nothing_left(notebook.pid, 0)


@pytest.mark.slow
def test_values_are_pushed_and_pulled(shared_kept: Notebook) -> None:
    shared_kept.ok("import torch\nclass Point:\n    x = torch.arange(3.0)\npoint, both = Point(), [1, 2]")
    shared_kept.ok("%dipush point both")
    shared_kept.ok(
        "%%dip\nassert point.x.tolist() == [0, 1, 2] and both == [1, 2]\npoint.x, both = point.x + rank, rank"
    )
    shared_kept.ok("%dipull point both -r 1\nassert point.x.tolist() == [1, 2, 3] and both == 1")
    shared_kept.ok("ranks = %dipull both -r all\nassert ranks == [0, 1], ranks")
    assert "no variable nothing" in shared_kept.fails("%dipush nothing").message
    assert "nothing" in shared_kept.fails("%dipull nothing").message
    shared_kept.ok("%dipull both as other\nassert other == 0")


@pytest.mark.slow
def test_pushes_and_pulls_equal_those_of_an_own_group(shared_kept: Notebook) -> None:
    shared_kept.ok("%%dip\nx, y, _h, gg = 1, 2, 41, 5\ndef h(): return gg")
    shared_kept.ok("x = 7")
    assert "-r 9" in shared_kept.fails("%dipush x -r 9").message
    shared_kept.ok("%dipull x\nassert x == 1")
    shared_kept.ok("del x\n%dipull _h\nassert _h == 41")
    assert "no variable x" in shared_kept.fails("%dipush x").message
    shared_kept.ok("a, b = %dipull x as y y as x\nassert (a, b, x, y) == (1, 2, 2, 1)")
    shared_kept.ok("gg = 1\n%dipull h")
    shared_kept.ok("gg = 77\nassert h() == 77")
    shared_kept.ok("import threading\nr, z = threading.Lock(), 3\n%dipush z -r 1")
    assert "TransferError" in shared_kept.fails("%dipush r").error
    shared_kept.ok("now = %dipull --now x\nassert now == 1")
    shared_kept.ok("def reads(): return along\nalong = 6\n%dipush reads")
    shared_kept.ok("%%dip\nassert reads() == 6")
    assert "finds no module nowhere" in shared_kept.fails("%dipush --modules nowhere").message


@pytest.mark.grid(in_ci=True)
def test_a_stopped_push_leaves_the_notebook_usable(shared_kept: Notebook) -> None:
    shared_kept.ok("big = b'x' * 3_000_000")
    for seconds in (0.05, 0.2, 0.35):
        cell = shared_kept.begin("print('begun', flush=True)\nfor i in range(1000):\n    %dipush i big")
        shared_kept.finish(cell, until="begun")
        threading.Timer(seconds, os.kill, (shared_kept.pid, signal.SIGINT)).start()
        assert shared_kept.finish(cell).status == "error"
        shared_kept.ok("%%dip\ndist.barrier()")


def test_settings_lines_and_output_keep_their_meaning(shared_kept: Notebook) -> None:
    shared_kept.ok("%config DipMagics.stall_timeout = float('inf')")
    shared_kept.ok("%%dip\npass")
    shared_kept.ok("%config DipMagics.stall_timeout = 10")
    shown = shared_kept.ok("print('before')\n%dipcells\nprint('after')").stdout
    assert shown.startswith("before\ncell ") and shown.endswith("\nafter\n")
    shared_kept.ok("path = 'P{1+1}'")
    assert "P{1+1}" in shared_kept.fails("%dipstop {path}").message
    shared_kept.ok("%%dip -q everywhere\nquiet = 6")
    shared_kept.ok("assert quiet == 6")
    shared_kept.ok("%%dip\nassert quiet == 6")


def test_a_warning_to_the_kernel_saves_the_kept_group(shared_kept: Notebook) -> None:
    shared_kept.ok("%dipsave warned --every 1h")
    shared_kept.ok("%%dip\nimport ddip")
    os.kill(shared_kept.pid, signal.SIGUSR1)
    wait_until(lambda: [*(shared_kept.folder / "warned").glob("save-*/save.json")], what="the save")
    shared_kept.ok("%dipsave --stop")


def test_a_notebook_leaves_and_attaches_again(shared_kept: Notebook) -> None:
    shared_kept.ok("%config DipMagics.show_ranks = 'all'")
    shared_kept.ok("%%dip\nprint('shown once')")
    (kept,) = (kept for kept in kept_folder.list_kept() if str(shared_kept.pid) in kept.holder())
    shared_kept.ok("%unload_ext ddip\nassert get_ipython().find_line_magic('dipcells') is None")
    for _ in range(2):
        shown = shared_kept.ok(f"%load_ext ddip\n%makedip --attach {kept.name}")
        assert "shown once" not in shown.text
        shared_kept.ok("%run -m ddip groups")
        assert kept.is_claimed and str(shared_kept.pid) in kept.holder()
        shared_kept.ok("%unload_ext ddip")
        assert not kept.is_claimed
    shared_kept.ok(f"%load_ext ddip\n%makedip --attach {kept.name}")
    assert "from 1" in shared_kept.ok("%%dip\nprint('from', rank)").text
    shared_kept.ok("%config DipMagics.show_ranks = '0'")
    assert "from 1" not in shared_kept.ok("%%dip\nprint('from', rank)").text


@pytest.mark.slow
def test_errors_output_and_numbers_are_those_of_the_cell(shared_kept: Notebook) -> None:
    failed = shared_kept.fails("%%dip\nif rank == 1: 1 / 0\ndist.barrier()")
    assert failed.error == "CellError" and "rank 1: ZeroDivisionError" in failed.message
    assert f"cell [{failed.number}]" in failed.traceback.replace(f"Cell [{failed.number}]", f"cell [{failed.number}]")
    shown = shared_kept.ok("%config DipMagics.show_ranks = 'all'\n%autodip on")
    shown = shared_kept.ok("print('from', rank)")
    assert "from 0" in shown.text and "from 1" in shown.text
    shared_kept.ok("%%dip local\nhere = 5\nassert 'rank' not in globals()")
    shared_kept.ok("%autodip off\n%config DipMagics.show_ranks = '0'\nassert here == 5")
    shared_kept.ok("%%dip everywhere\nboth_sides = 7")
    shared_kept.ok("assert both_sides == 7")
    shared_kept.ok("%%dip\nassert both_sides == 7")
    assert "-r 9" in shared_kept.fails("%%dip everywhere -r 9\nnot_here = 1").message
    shared_kept.ok("assert 'not_here' not in globals()")
    assert "-S 9" in shared_kept.fails("%autodip on -a '-S 9'").message
    assert "does not work with a kept group" in shared_kept.fails("%dipper group").message


@pytest.mark.grid(in_ci=True)
def test_the_cells_of_a_kept_group_are_exported(new_notebook: Callable[[], Notebook]) -> None:
    notebook = new_notebook()
    kept = start(notebook)
    notebook.ok("scale = 2.0\n%dipush scale\n%unload_ext ddip")
    notebook.ok(f"%load_ext ddip\n%makedip --attach {kept.name}")
    notebook.ok("%%dip\nstate = make()\nmodel = state[0]\nlast = torch.tensor(train(state, 10)[-1]) * scale")
    shown = notebook.ok("%dipexport train.py --check model last")
    assert "ddip: train.py gives the session's values: 3 compared, largest difference 0" in shown.stdout
    notebook.ok("%makedip -k")
    assert_ended(kept)


def test_the_stop_button_reaches_the_ranks(shared_kept: Notebook) -> None:
    cell = shared_kept.begin(
        "%%dip\nkept = rank\nprint('begun', flush=True)\nif rank: dist.barrier()\ntime.sleep(1000)"
    )
    shared_kept.finish(cell, until="begun")
    shared_kept.interrupt()
    shown = shared_kept.finish(cell)
    assert shown.error == "CellInterrupted"
    shared_kept.ok("%%dip\nassert kept == rank\ndist.barrier()")


def test_ranks_ask_in_the_notebook(shared_kept: Notebook) -> None:
    asked = shared_kept.converse("%%dip -r 1\nname = input('name? ')\nassert name == 'me'", "me")
    assert (asked.shown.status, asked.prompts) == ("ok", ["rank 1: name? "])
    seen = shared_kept.converse(
        "%%dip\nif rank == 1: breakpoint()\na = rank + 40\nb = 1", *LEAVE_BREAKPOINT, "n", "p a", "c"
    )
    assert seen.shown.status == "ok" and "41\n" in seen.text
    seen = shared_kept.converse("%%dip\nif rank == 1: breakpoint()\na = rank", shared_kept.interrupt)
    assert (seen.shown.error, len(seen.prompts)) == ("CellInterrupted", 1)


@pytest.mark.grid(in_ci=True)
def test_a_dead_rank_of_a_kept_group_is_replaced(shared_kept: Notebook) -> None:
    shared_kept.ok("%%dip\nkept_value, pid = rank + 40, os.getpid()\nstate = make()\ntrain(state, 3)")
    shared_kept.ok("%dipull pid -r 1")
    shared_kept.ok("import os, signal\nos.kill(pid, signal.SIGKILL)")
    shared_kept.fails("%%dip\ndist.barrier()")
    shown = shared_kept.ok("%makedip --repair --from 0 kept_value")
    assert "rank 1 replaced, with kept_value from rank 0" in shown.text
    shared_kept.ok(f"%%dip -r 1\nassert kept_value == 40\n{SETUP}")
    shared_kept.ok("%%dip\nstate = make()\nlosses = train(state, 10)\nassert_same_training(losses, state, 10)")


def test_tab_and_help_know_the_ranks_variables(shared_kept: Notebook) -> None:
    shared_kept.ok("%%dip\ndef remote_function(number):\n    'Double a number.'\nremote_number = 5")
    # a rank has half a second to answer
    wait_until(lambda: "remote_number" in shared_kept.ask("complete", "%%dip\nremote_nu")["matches"])
    wait_until(lambda: "Double a number." in str(shared_kept.ask("inspect", "%%dip\nremote_function")["data"]))


@pytest.mark.grid(in_ci=True)
def test_impossible_requests_are_refused(shared_kept: Notebook) -> None:
    assert "attached to" in shared_kept.fails("%makedip --keep -n 2").message
    with pytest.raises(BadInput, match="no kept group has this name"):
        kept_folder.find_kept("nobody")
