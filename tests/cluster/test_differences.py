"""After a fault in a training step, ddip names every object that differs between ranks, and %dipsync fixes it.

Each test continues training for ten steps and compares with an undisturbed twin: losses, parameters, optimizer,
scheduler, average, scaler, generators and data order, on every rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ddip
from ddip.errors import BadInput
from ddip.group.cells import differences
from ddip.protocol import on_rank

from .leftovers import wait_until
from .notebook import Notebook
from .variants import few

CODE = """
import copy, random, torch, torch.distributed as dist
from types import SimpleNamespace
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DistributedSampler

class Stopping:
    def __init__(self): self.patience = 0

def make():
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    opt = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)
    return SimpleNamespace(
        net=net, opt=opt, sched=torch.optim.lr_scheduler.StepLR(opt, 2, 0.9), ema=AveragedModel(net.module),
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2), stopping=Stopping(),
        generator=torch.Generator().manual_seed(7), sampler=DistributedSampler(range(16), shuffle=True), losses=[],
    )

def step(job, fails="", on=1):
    def at(place):
        if place == fails and rank == on: raise ValueError(f"planted at {place}")
    job.opt.zero_grad()
    batch = torch.randperm(24, generator=job.generator)[rank::world_size][:8].float().reshape(2, 4)
    loss = job.net(batch / 16).square().mean()
    job.scaler.scale(loss).backward()
    at("backward")
    job.scaler.step(job.opt)
    at("optimizer step")
    job.scaler.update()
    at("scaler")
    job.sched.step()
    at("scheduler")
    job.ema.update_parameters(job.net.module)
    at("average")
    job.stopping.patience += 1
    at("counter")
    job.sampler.set_epoch(job.sampler.epoch + 1)
    at("sampler")
    job.losses.append(loss.item())

def state(job):
    tensors = [*job.net.state_dict().values(), *job.ema.state_dict().values()]
    return [t.tolist() for t in tensors], repr(
        [job.opt.state_dict(), job.sched.state_dict(), job.scaler.state_dict(), job.generator.get_state().tolist(),
         job.stopping.patience, list(job.sampler)]
    )

def check_equal(job, twin):
    assert job.losses[-10:] == twin.losses[-10:], (job.losses, twin.losses)
    mine, other = state(job), state(twin)
    assert mine[1] == other[1], (mine[1], other[1])
    # statistics of BatchNorm are each rank's own until the next forward pass, in which rank 0's are sent
    assert job.net.module[0].weight.tolist() == twin.net.module[0].weight.tolist()
    assert [p.tolist() for p in job.ema.parameters()] == [p.tolist() for p in twin.ema.parameters()]
"""
NAMED = {
    "backward": ["job.stopping", "job.sampler", "job.sched", "job.ema", "job.scaler"],
    "optimizer step": ["job.stopping", "job.sampler", "job.sched", "job.ema", "job.scaler"],
    "scaler": ["job.stopping", "job.sampler", "job.sched", "job.ema"],
    "scheduler": ["job.stopping", "job.sampler", "job.ema"],
    "average": ["job.stopping", "job.sampler"],
    "counter": ["job.sampler"],
}


def wait_until_recorded(group: ddip.Group) -> None:
    """Wait until every rank has recorded its state after the last good cell."""
    ranks = range(group.world_size)
    wait_until(lambda: all(group.ranks.call_on_control_channel(ranks, on_rank.is_recorded(True)).values()))


def run_and_record(group: ddip.Group, code: str) -> None:
    """Run a good cell, and wait until its state is recorded."""
    group.run(code)
    wait_until_recorded(group)


@pytest.fixture(autouse=True)
def define_training(cells: ddip.Group) -> None:
    cells.options.failure_grace = 0.1
    cells.run(CODE)


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("place", few(NAMED, "scheduler"))
def test_a_fault_within_a_step_is_named_and_synced(
    cells: ddip.Group, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("job, twin = make(), make()")
    run_and_record(cells, "for _ in range(2): step(job); step(twin)")
    run_and_record(cells, "for _ in range(2): step(job); step(twin)")
    capsys.readouterr()
    with pytest.raises(ddip.CellError, match="planted"):
        cells.run(f"step(job, {place!r})")
    copied = cells.sync()
    stderr = capsys.readouterr().err
    assert "the ranks differ after the fault:" in stderr
    assert [name for name in NAMED[place] if name not in stderr] == []
    assert {path.split(".")[1].partition("[")[0] for path in copied} >= {name[4:] for name in NAMED[place]}
    cells.run("step(twin)\nfor _ in range(10): step(job); step(twin)\ncheck_equal(job, twin)")
    assert [row.what for row in cells.check(["job"]).rows if ".running_" not in row.what] == []
    wait_until_recorded(cells)
    capsys.readouterr()
    with pytest.raises(ddip.CellError):
        cells.run("raise ValueError")
    cells.run("pass")
    assert "differ" not in capsys.readouterr().err


@pytest.mark.grid(in_ci=True)
def test_a_difference_is_named_again_until_it_is_resolved(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    """Good cells in between do not make a difference count as intended.

    After %dipsync the next fault is also named.
    """
    cells.run("job = make()")
    run_and_record(cells, "step(job)")
    run_and_record(cells, "step(job)")
    failing_cell = "step(job, 'scheduler')"
    for _ in range(2):
        with pytest.raises(ddip.CellError, match="planted"):
            cells.run(failing_cell)
        run_and_record(cells, "looked = job.sched.last_epoch")
        assert "job.stopping.patience" in capsys.readouterr().err
    assert "job.stopping.patience" in cells.sync()
    assert cells.sync() == []
    run_and_record(cells, "step(job)")
    with pytest.raises(ddip.CellError, match="planted"):
        cells.run(failing_cell)
    cells.run("pass")
    assert "job.stopping.patience" in capsys.readouterr().err


@pytest.mark.slow
def test_after_a_rebuild_only_rank_0_offers_its_values(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail on rank 0 before its optimizer's step, while rank 1 takes that step."""
    cells.run("job, twin = make(), make()")
    run_and_record(cells, "for _ in range(2): step(job); step(twin)")
    run_and_record(cells, "for _ in range(2): step(job); step(twin)\nshown = 'one' if rank else 'two'")
    capsys.readouterr()
    with pytest.raises(ddip.CellError, match="planted"):
        cells.run("step(job, 'backward', 0)")
    with pytest.raises(BadInput, match="the optimizers of rank 1 do not belong"):
        cells.sync(source=1)
    stderr = capsys.readouterr().err
    assert "rebuilt, with rank 0's parameters" in stderr and "job.opt" in stderr and "--from" not in stderr
    assert cells.sync(["shown"], source=1) == ["shown"]
    assert "the optimizers of rank 1 do not belong" in capsys.readouterr().err
    cells.sync()
    cells.run("""
        torch.randperm(24, generator=twin.generator)  # rank 0 had drawn the batch
        for _ in range(10): step(job); step(twin)
        check_equal(job, twin)
    """)
    capsys.readouterr()
    cells.options.failure_grace = 30.0
    with pytest.raises(ddip.CellError):  # the next fault offers other ranks again
        cells.run("job.stopping.patience += rank\nraise ValueError")
    assert "job.stopping.patience" in cells.sync(source=1)
    assert "--from RANK" in capsys.readouterr().err


def test_gradients_that_differ_are_cleared(cells: ddip.Group) -> None:
    cells.run("torch.manual_seed(0); net = nn.Linear(2, 1); net(torch.ones(1, 2)).sum().backward()")
    wait_until_recorded(cells)
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: net.zero_grad(); raise ValueError")
    assert cells.sync() == ["net.bias.grad", "net.weight.grad"]
    cells.run("assert net.weight.grad is None and net.bias.grad is None")


@pytest.mark.grid(in_ci=True)
def test_a_fault_that_leaves_the_ranks_equal_says_nothing(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("job = make()")
    run_and_record(cells, "step(job)")
    run_and_record(cells, "step(job)\nown = [random.random(), torch.full((3,), float(rank))]")
    cells.options.failure_grace = 30.0  # both ranks fail alike, but a loaded machine may delay one
    with pytest.raises(ddip.CellError):
        cells.run("step(job)\nown[1] += 1\nraise ValueError")
    cells.run("step(job)")
    assert capsys.readouterr().err == ""


HIDDEN = """
def make_hidden():
    torch.manual_seed(0)
    student = torch.compile(DDP(nn.Linear(4, 2)), backend="eager")
    teacher = torch.compile(copy.deepcopy(student._orig_mod.module).requires_grad_(False), backend="eager")
    for p in student.parameters(): p.momentum = torch.zeros_like(p)
    def endless():
        while True:
            for x in torch.arange(32.0).reshape(8, 4): yield x / 32
    return SimpleNamespace(student=student, teacher=teacher, batches=endless(), losses=[])

def hidden_step(job, fails=False):
    x = next(job.batches)
    loss = (job.student(x) - job.teacher(x) - 1).square().mean()
    loss.backward()
    if fails and rank == 1: raise ValueError
    with torch.no_grad():
        for p, t in zip(job.student.parameters(), job.teacher.parameters()):
            p.momentum.mul_(0.9).add_(p.grad)
            p.grad = None
            p.sub_(p.momentum, alpha=0.1)
            t.lerp_(p, 0.1)
    job.losses.append(loss.item())
def hidden_state(job):
    return job.losses, *([p.tolist() for p in net.parameters()] for net in (job.student, job.teacher))
"""


@pytest.mark.grid(in_ci=True)
def test_what_tensors_loops_and_compiled_models_hold_is_named_and_synced(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    run_and_record(cells, f"{HIDDEN}\njob, twin = make_hidden(), make_hidden()")
    run_and_record(cells, "hidden_step(job); hidden_step(twin)")
    with pytest.raises(ddip.CellError):
        cells.run("hidden_step(twin)\nhidden_step(job, fails=True)")
    cells.sync()
    stderr = capsys.readouterr().err
    assert "teacher" in stderr and "momentum" in stderr
    cells.run("""
        for _ in range(10): hidden_step(job); hidden_step(twin)
        found, expected = hidden_state(job), hidden_state(twin)
        both = [None] * world_size
        dist.all_gather_object(both, found)
    """)
    (found,), _ = cells.pull_all(["both", "expected"], [0])
    assert found["both"][0] == found["both"][1]
    assert found["both"][0] == found["expected"]


@pytest.mark.grid
def test_a_generator_ahead_on_one_rank_is_named_and_synced(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a sync, ranks with the same seed draw the same permutation of the data."""
    run_and_record(cells, "torch.manual_seed(3); random.seed(3); order = torch.randperm(16)")
    run_and_record(cells, "order = torch.randperm(16); random.random()")
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\ntorch.randperm(16); random.random()")
    cells.sync()
    stderr = capsys.readouterr().err
    assert "torch's default generator: at different positions" in stderr
    assert "Python's random: at different positions" in stderr
    cells.run("""
        taken = [None] * world_size
        dist.all_gather_object(taken, (torch.randperm(16)[rank::world_size].tolist(), random.random()))
        assert sorted(taken[0][0] + taken[1][0]) == list(range(16)) and taken[0][1] == taken[1][1]
    """)


@pytest.mark.grid
def test_half_an_optimizer_step_without_a_wrapper_is_synced(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    """Average the gradients by hand, and stop Adam at its second parameter on rank 1."""
    cells.run("""
        def make_plain():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
            return SimpleNamespace(net=net, opt=torch.optim.Adam(net.parameters(), 0.05, foreach=False), losses=[])
        def plain_step(job):
            job.opt.zero_grad()
            loss = job.net(torch.full((2, 4), 1.0 + rank)).square().mean()
            loss.backward()
            for p in job.net.parameters(): dist.all_reduce(p.grad, op=dist.ReduceOp.SUM); p.grad /= world_size
            job.opt.step()
            job.losses.append(loss.item())
        plain, twin = make_plain(), make_plain()
        plain_step(plain); plain_step(twin)
    """)
    wait_until_recorded(cells)
    run_and_record(cells, "plain_step(plain); plain_step(twin)")
    with pytest.raises(ddip.CellError, match="planted"):
        cells.run("""
            from torch.optim import adam
            usual, left = torch.Tensor.addcdiv_, [1]
            def stops(*args, **kwargs):
                if not left.pop(): raise ValueError("planted")
                return usual(*args, **kwargs)
            if rank == 1: left[:] = [0, 1]; torch.Tensor.addcdiv_ = stops
            else: left[:] = [1] * 9
            try: plain_step(plain)
            finally: torch.Tensor.addcdiv_ = usual
        """)
    cells.sync()
    stderr = capsys.readouterr().err
    assert "plain.net: parameters and buffers" in stderr and "plain.opt: state" in stderr
    cells.run("""
        plain_step(twin)
        for _ in range(10): plain_step(plain); plain_step(twin)
        assert plain.losses[-10:] == twin.losses[-10:]
        assert repr(plain.opt.state_dict()) == repr(twin.opt.state_dict())
    """)


@pytest.mark.grid
def test_the_first_training_cell_is_compared_by_its_counters(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    run_and_record(cells, "seed = 3 + rank")
    with pytest.raises(ddip.CellError, match="planted"):
        cells.run("job, best = make(), 0.5 * rank\nstep(job, 'scheduler')")
    cells.run("pass")
    stderr = capsys.readouterr().err
    assert "job.stopping.patience" in stderr and "job.ema.n_averaged" in stderr
    assert "seed" not in stderr and "best" not in stderr


@pytest.mark.grid
def test_an_unfinished_state_is_named_even_on_equal_ranks(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        class Loop:
            def __init__(self): self.state, self.runs = "idle", 0
            def run(self, fails=False):
                self.state, self.runs = "running", self.runs + 1
                if fails: raise ValueError
                self.state = "idle"
        loop = Loop()
    """)
    wait_until_recorded(cells)
    run_and_record(cells, "loop.run()")
    with pytest.raises(ddip.CellError):
        cells.run("loop.run(True)")
    cells.run("pass")
    stderr = capsys.readouterr().err
    assert (
        "these were left in the middle of an operation:\n  loop.state is 'running' on ranks 0, 1 (at rest 'idle')"
        in stderr
    )


def test_objects_keep_their_identity_and_missing_objects_are_created(cells: ddip.Group) -> None:
    cells.run("""
        net = nn.Linear(2, 1)
        opt = torch.optim.Adam(net.parameters())
        if rank == 0:
            net(torch.ones(1, 2)).sum().backward(); opt.step()
            extra = {"a": [net.weight, 1.5]}
            history = [1, 2]
        else:
            history = []
        weight, kept = net.weight, history
    """)
    copied = cells.sync(["net", "opt", "extra", "history"])
    assert "extra" in copied
    cells.run("""
        assert net.weight is weight and opt.param_groups[0]["params"][0] is weight and weight.grad is None
        assert opt.state[weight]["step"].item() == 1.0 and extra["a"][0] is weight and history is kept == [1, 2]
        values = [None] * world_size
        dist.all_gather_object(values, [p.tolist() for p in net.parameters()])
        assert values[0] == values[1]
    """)


@pytest.mark.native("sockets")
def test_sharded_objects_are_refused_by_name(cells: ddip.Group) -> None:
    cells.run("""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        sharded = nn.Linear(4, 4)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size,)))
        value = rank
    """)
    with pytest.raises(BadInput, match="sharded: each rank "):
        cells.sync(["sharded", "value"])
    cells.run("assert value == rank\ndel sharded")
    with pytest.raises(ddip.CellError):  # the mesh must end with this group, not with that of a later test
        cells.run("if rank == 1: raise ValueError\ndist.barrier()")
    cells.run("pass")


def test_a_check_finds_common_mistakes(cells: ddip.Group) -> None:
    cells.run("""
        from torch.utils.data import DataLoader, random_split
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
        net[1].eval()
        opt = torch.optim.SGD(net[0].parameters(), 0.1 + rank)
        gone = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        loader, plain = DataLoader(range(8), shuffle=True), DataLoader(range(8))
        part, _ = random_split(range(100), [50, 50])
        sampler = DistributedSampler(range(8))
        for _ in range(2): list(sampler)
    """)
    found = str(cells.check())
    for line in (
        "net: parameters and buffers",
        "net     2 of 4 trainable parameters are in no optimizer: 2.weight, 2.bias",
        "opt.param_groups[0]['lr'] is 0.1 on rank 0, 1.1 on rank 1",
        "gone    2 of its 2 parameters belong to no model",
        "net     trains, with dropout off in 1",
        "loader  shuffles without a DistributedSampler",
        "plain   gives every rank the same data in the same order",
        "sampler has shuffled 2 epochs in the same order: set_epoch was never called",
        "part.indices",
    ):
        assert " ".join(line.split()) in " ".join(found.split()), (line, found)
    cells.run(
        "del net, opt, gone, loader, plain, part, _, sampler\ntorch.manual_seed(0)\nimport random; random.seed(0)"
    )
    assert str(cells.check()).endswith("objects equal on 2 ranks")


@pytest.mark.grid
def test_a_check_finds_an_optimizer_that_has_lost_its_model(cells: ddip.Group) -> None:
    """Push a model and an optimizer separately: each push brings its own parameters."""
    net = torch.nn.Linear(2, 1)
    cells.push({"net": net})
    cells.push({"opt": torch.optim.SGD(net.parameters(), 0.1)}, [1])
    message = "rank 1: 2 of its 2 parameters belong to no model"
    assert message in str(cells.check())
    cells.run("del net")
    assert message in str(cells.check())
    cells.run("""
        w, by_name = torch.nn.Parameter(torch.ones(2)), {"b": torch.ones(2, requires_grad=True)}
        def make():
            inner = torch.nn.Linear(1, 1)
            return (lambda: inner), inner.parameters()
        closure, held = make()
        opt = torch.optim.SGD([w, *by_name.values(), *held], 0.1)
        del held
    """)
    assert "belong to no model" not in str(cells.check())


def test_the_report_appears_below_the_error_and_dipsync_repairs_it(notebook: Notebook) -> None:
    notebook.ok("%dipsync")  # variables of earlier tests that differ
    notebook.ok(f"%%dip\n{CODE}job = make()\nfor _ in range(2): step(job)")
    notebook.ok("""
        import time
        import ddip
        from ddip.protocol import on_rank
        ranks = ddip.current_group().ranks
        while not all(ranks.call_on_control_channel(range(3), on_rank.is_recorded(True)).values()):
            time.sleep(0.02)
        del ranks
    """)
    notebook.ok("%autodip on")
    failed = notebook.fails("step(job, 'scheduler')")
    assert "job.stopping.patience is 3 on ranks 0, 2, 2 on rank 1" in failed.stderr
    assert "%dipsync copies rank 0's values to the others" in failed.stderr
    assert "object" in notebook.ok("%dipcheck job").text
    assert "copied from rank 0: job." in notebook.ok("%dipsync").stdout
    checked = notebook.ok("%dipcheck job").stdout
    assert "compared on 3 ranks; equal, except job.losses, job.sampler.rank, where" in checked
    assert "type one rank from 0 to 2" in notebook.fails("%dipsync job --from 7").traceback
    assert "type names of variables" in notebook.fails("%dipcheck job.net").traceback


@pytest.mark.grid
def test_objects_of_a_former_size_refuse_to_work(capsys: pytest.CaptureFixture[str]) -> None:
    """A sampler for three replicas would skip a third of the data in a group of two."""
    with ddip.Group(3) as group:
        group.run("""
            from torch.utils.data import DataLoader, DistributedSampler
            from torch.nn.parallel import DistributedDataParallel as DDP
            import torch, torch.distributed as dist
            sampler = DistributedSampler(range(24), shuffle=False)
            loader, net = DataLoader(range(24), batch_size=2, sampler=sampler), DDP(torch.nn.Linear(1, 1))
            class Config: pass
            config = Config(); config.rank, config.ranks, config.epochs = rank, world_size, 7
        """)
        group.change(ddip.Request(n=2))
        assert (
            "belong to the former group of 3 ranks, and raise errors now; recreate them: config, sampler"
            in capsys.readouterr().err
        )
        for code, what in (("list(loader)", "DistributedSampler"), ("config.ranks", "Config")):
            with pytest.raises(ddip.CellError, match=f"{what} .*3 ranks"):
                group.run(code)
        group.run("""
            assert config.epochs == 7
            config.ranks = world_size
            assert type(config) is Config and config.ranks == 2
            net(torch.ones(1, 1)).sum().backward()
            taken = [None] * world_size
            dist.all_gather_object(taken, list(DistributedSampler(range(24), shuffle=False)))
            assert sorted(taken[0] + taken[1]) == list(range(24))
        """)


@pytest.mark.grid
def test_only_states_after_the_same_cell_are_compared(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank may have abandoned the walk after a cell, or cells may have run on one rank only."""
    cells.run("steps, seen = 0, 0\nfrom ddip.rank.inspection.state_history import history")
    run_and_record(cells, "steps += 1")
    run_and_record(cells, "steps += 1")
    for _ in range(2):  # rank 0 knows an older state than rank 1
        cells.run("steps += 1\nif rank == 0: history.resume = lambda: None")
        cells.run("steps += 1\nif rank == 0: del history.resume")
    run_and_record(cells, "steps += 1")
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\nsteps += 1")
    cells.run("assert True")
    assert "steps is 8 on rank 0, 7 on rank 1" in capsys.readouterr().err
    assert cells.sync() == ["steps"]
    run_and_record(cells, "steps += 1")
    cells.run("seen += 1", ranks=[0])
    wait_until_recorded(cells)
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\nsteps += 1")
    cells.run("assert True")
    stderr = capsys.readouterr().err
    assert "steps is 10 on rank 0, 9 on rank 1" in stderr and "seen" not in stderr


def test_sync_copies_exactly_the_listed_objects(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Copy NumPy arrays and numbers, sets, class attributes, and many optimizer states.

    There are more optimizer states than list items that a comparison includes.
    """
    cells.run("""
        import numpy as np
        class Counter: n = 0
        class Whole(int): pass
        array, view, best, members, whole = np.zeros(3), np.zeros((3, 3)).T, np.float64(1), {1, 2}, Whole(1)
        weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(300)])
        opt = torch.optim.Adam(weights, foreach=False)
        def part(begin, end):
            for number, weight in enumerate(weights):
                weight.grad = torch.ones(1) if begin <= number < end else None
            opt.step()
        kept = array
        part(0, 300)
    """)
    wait_until_recorded(cells)
    with pytest.raises(ddip.CellError):
        cells.run("""
            if rank == 1: raise ValueError
            array[0] = 5; view[0, 1] = 5; best += 1; members = {1, 9}; whole = Whole(2); Counter.n += 1
            part(100, 200)
        """)
    cells.sync()
    stderr = capsys.readouterr().err
    for text in ("Counter.n is 1 on rank 0", "opt: state (300 differ", "array differs", "best differs"):
        assert text in stderr
    cells.run("""
        states = [opt.state[weight] for weight in weights]
        now = repr((array, view, best, members, whole, Counter.n, states, list(weights)))
        found = [None] * world_size
        dist.all_gather_object(found, now)
        assert found[0] == found[1] and array is kept
    """)


@pytest.mark.slow
def test_objects_in_arrays_and_bytes_are_compared_and_copied(cells: ddip.Group) -> None:
    run_and_record(
        cells,
        """
        import numpy as np
        words, labels = np.array([["a", None], ["b", 1.5]], object).T, np.full(3000, "no", object)
        data = kept_data = bytearray(b"ab")
        """,
    )
    with pytest.raises(ddip.CellError):
        cells.run("""
            if rank == 1: raise ValueError
            words[0, 1] = "c"; labels[1500] = "yes"; data[0] = 7
        """)
    assert cells.sync() == ["data", "labels", "words"]
    cells.run("""
        found = [None] * world_size
        dist.all_gather_object(found, repr((words, list(labels), data)))
        assert found[0] == found[1] and words[0, 1] == "c" and data is kept_data
    """)


@pytest.mark.slow
def test_a_number_without_a_text_ends_no_comparison(cells: ddip.Group) -> None:
    """Python refuses to convert an int with this many digits to text."""
    run_and_record(cells, "large, count = 10**5000, 0")
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\nlarge *= 2; count += 1")
    assert cells.sync() == ["count", "large"]
    cells.run("assert large == 2 * 10**5000 and count == 1")


@pytest.mark.grid
def test_long_containers_and_the_users_modules_are_compared_and_copied(
    cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "counting_here.py").write_text("steps = 0\ndef tick():\n    global steps\n    steps += 1\n")
    run_and_record(
        cells,
        f"""
            import sys
            sys.path.insert(0, {str(tmp_path)!r})
            import counting_here
            buffer, table = list(range(1000)), dict.fromkeys(range(1000), 0)
            parts = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(300)])
            many = torch.optim.Adam(parts, foreach=False)
            for one in parts: one.grad = torch.ones(2)
            many.step()
            first = many.state[parts[150]]["exp_avg"]
        """,
    )
    run_and_record(cells, "many.step(); counting_here.tick()")
    with pytest.raises(ddip.CellError):
        cells.run("""
            if rank == 1: raise ValueError
            buffer[500] = table[500] = 7
            counting_here.tick()
            many.state[parts[150]]["exp_avg"] += 1
        """)
    cells.sync()
    stderr = capsys.readouterr().err
    assert "<counting_here>.steps is 2 on rank 0, 1 on rank 1" in stderr
    assert all(text in stderr for text in ("buffer differs", "table differs", "first differs")), stderr
    cells.run("""
        values = [None] * world_size
        dist.all_gather_object(values, (buffer, table, counting_here.steps, first.tolist()))
        assert values[0] == values[1] and buffer[500] == 7 and counting_here.steps == 2
        assert many.state[parts[150]]["exp_avg"] is first
    """)
    with pytest.raises(BadInput, match="nowhere: rank 0 "):
        cells.sync(["buffer", "nowhere"])


def test_parameters_whose_values_were_not_known_before_are_named(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leave no time for checksums between cells, as "Run All" does.

    In-place writes of a fused optimizer do not raise a tensor's version.
    """
    cells.run("""
        from ddip.rank.inspection import state_history as history
        usual, history.SUM_SECONDS = history.SUM_SECONDS, 3600.0
        net = nn.Linear(8, 8)
        dist.broadcast(net.weight.data, 0); dist.broadcast(net.bias.data, 0)
        opt = torch.optim.SGD(net.parameters(), 0.1, fused=True)
        net(torch.ones(1, 8)).sum().backward()
    """)
    ranks = range(2)
    for _ in range(2):
        cells.run("opt.step()")
        wait_until(lambda: all(cells.ranks.call_on_control_channel(ranks, on_rank.is_recorded(False)).values()))
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\nopt.step()")
    cells.run("history.SUM_SECONDS = usual")
    stderr = capsys.readouterr().err
    assert "net: parameters and buffers (2 differ" in stderr, stderr


@pytest.mark.grid
def test_sync_never_copies_part_of_a_loader_iterator(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """A loader iterator's position in the data cannot be set, so ddip sets none of its counters."""
    cells.run("""
        from torch.utils.data import DataLoader
        batches = iter(DataLoader(list(range(40)), 4, shuffle=True, generator=torch.Generator().manual_seed(1)))
        count, pair = 0, torch.ones(2, dtype=torch.complex64).conj()
        row = torch.zeros(1).expand(3)
    """)
    run_and_record(cells, "next(batches)")
    with pytest.raises(ddip.CellError):
        cells.run("""
            if rank == 1: raise ValueError
            next(batches); count += 1; pair += 1
            row.data = torch.ones(1).expand(3)
        """)
    assert cells.sync() == ["count", "pair"]
    stderr = capsys.readouterr().err
    assert "batches was not copied: the iterator of a loader cannot be copied: recreate it on all ranks" in stderr
    assert "row was not copied: several of its elements share memory" in stderr
    assert [row.name for row in cells.check().rows].count("batches") == 1
    with pytest.raises(BadInput, match="cuont: rank 0 "):
        cells.sync(["cuont", "count"])


@pytest.mark.grid
def test_objects_above_the_comparison_limit_are_mentioned(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    run_and_record(cells, "count = 0")
    with pytest.raises(ddip.CellError):
        cells.run("many = [[[i] for i in range(250)] for _ in range(250)]; count += 1\nraise ValueError")
    cells.run("del many")
    assert "ddip compares only a part of so many objects after a fault" in capsys.readouterr().err


@pytest.mark.grid(in_ci=True)
def test_reading_requests_keep_the_recorded_checksums(cells: ddip.Group) -> None:
    cells.run("""
        from ddip.rank.inspection.state_history import history as recorder
        scheduled, schedule = [], recorder._schedule
        recorder._schedule = lambda *args: (scheduled.append(args), schedule(*args))
    """)
    run_and_record(cells, "count, average = 0, torch.zeros(100)")
    for request in (lambda: cells.pull(["count"]), cells.check, lambda: cells.has_name("count")):
        run_and_record(cells, "count_walks = lambda: scheduled.count((0.05, False)); walks = count_walks()")
        request()
        cells.run("assert count_walks() == walks + 1, scheduled")  # the one after the cell before
    run_and_record(cells, "del recorder._schedule")


@pytest.mark.grid(in_ci=True)
def test_the_state_after_a_sync_keeps_its_checksums(cells: ddip.Group) -> None:
    run_and_record(
        cells,
        """
        from ddip.rank.inspection.state_history import history as recorder
        scheduled, schedule = [], recorder._schedule
        recorder._schedule = lambda *args: (scheduled.append(args), schedule(*args))
        count = 0
    """,
    )
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\ncount += 1")
    run_and_record(cells, "scheduled.clear()")
    assert cells.sync() == ["count"]
    cells.run("assert scheduled.count((0.05, False)) == 1, scheduled")  # a second walk would replace the checksums
    run_and_record(cells, "del recorder._schedule")


def test_a_fault_after_a_sync_is_compared_with_the_sync(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    run_and_record(cells, "count, average = 0, torch.zeros(100)")
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\ncount += 1")
    assert cells.sync() == ["count"]
    wait_until_recorded(cells)
    capsys.readouterr()
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\naverage.data += 1")
    cells.run("pass")
    assert "average differs" in capsys.readouterr().err


@pytest.mark.grid
def test_a_seed_set_by_the_last_good_cell_counts(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Let the generators differ intentionally before the last good cell seeds them."""
    run_and_record(cells, "torch.manual_seed(rank)")
    run_and_record(cells, "torch.manual_seed(3); order = torch.randperm(16)")
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\norder = torch.randperm(16)")
    cells.sync()
    assert "torch's default generator: at different positions" in capsys.readouterr().err
    cells.run("""
        taken = [None] * world_size
        dist.all_gather_object(taken, torch.randperm(16).tolist())
        assert taken[0] == taken[1]
    """)


@pytest.mark.grid
def test_sync_also_copies_differences_above_the_display_limit(
    cells: ddip.Group, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(differences, "MOST_PATHS", 5)
    run_and_record(cells, "many = dict.fromkeys('abcdefghijklmnop', 0)")
    with pytest.raises(ddip.CellError):
        cells.run("if rank == 1: raise ValueError\nfor key in many: many[key] += 1")
    assert len(cells.sync()) == 16
    assert "and 11 more values" in capsys.readouterr().err
    cells.run("assert set(many.values()) == {1}")


def test_defaults_of_functions_are_copied(cells: ddip.Group) -> None:
    code = "def collect(x, found=[], *, seen={}): found.append(x); seen['last'] = x"
    run_and_record(cells, f"{code}\nnumber = id(collect.__defaults__[0])")
    with pytest.raises(ddip.CellError):  # the state after a good cell, once recorded, counts as intended
        cells.run("collect(rank + 5)\ndist.barrier()\nraise ValueError")
    assert cells.sync(["collect"])
    cells.run("assert collect.__defaults__ == ([5],) and id(collect.__defaults__[0]) == number")
    cells.run("assert collect.__kwdefaults__['seen'] == {'last': 5}, collect.__kwdefaults__\ndel collect, number")


def test_variables_that_a_rank_lacks_are_copied_with_their_links(cells: ddip.Group) -> None:
    cells.run("""
        copied_net = nn.Linear(2, 2)
        copied_opt, broken = torch.optim.SGD(copied_net.parameters(), 0.1), (n for n in [1])
        if rank == 1: del copied_net, copied_opt, broken
    """)
    assert cells.sync(["copied_net", "copied_opt", "broken"])
    cells.run("assert copied_opt.param_groups[0]['params'][0] is copied_net.weight")
    cells.run("assert ('broken' in globals()) == (rank == 0)")
    cells.run("del copied_net, copied_opt; globals().pop('broken', None)")


def test_copied_functions_and_classes_read_the_variables_of_their_rank(cells: ddip.Group) -> None:
    """The source keeps its own, and a variable that only the source has comes along."""
    cells.run("""
        lr, calls = 1.0, 0
        if rank == 0:
            import math
            scale = 2.0
            def read(): return lr * scale + math.floor(0.5)
            def count():
                global calls
                calls += 1
            class Reader:
                def read(self): return lr
            def make_inner():
                class Inner:
                    def read(self): return lr
                return Inner()
            reader, inner = Reader(), make_inner()
            own = reader, Reader, read
    """)
    assert cells.sync(["read", "count", "Reader", "reader", "inner"]) == [
        "Reader",
        "count",
        "inner",
        "math",
        "read",
        "reader",
        "scale",
    ]
    cells.push({"lr": 7.0, "scale": 3.0})
    cells.run("""
        count()
        assert (read(), reader.read(), inner.read(), calls) == (21.0, 7.0, 7.0, 1)
        assert type(reader) is Reader and read.__globals__ is globals()
        assert rank == 1 or (reader, Reader, read) == own
    """)


def test_a_copied_sampler_draws_the_part_of_its_rank(cells: ddip.Group) -> None:
    cells.run("""
        from torch.utils.data import DataLoader
        if rank == 0: loader = DataLoader(range(8), 2, sampler=DistributedSampler(range(8), shuffle=False))
    """)
    cells.sync(["loader"])
    cells.run("assert [n for batch in loader for n in batch.tolist()] == list(range(rank, 8, 2))")


def test_the_order_of_keys_is_copied_in_place(cells: ddip.Group) -> None:
    cells.run("""
        from collections import OrderedDict
        keys = "ab" if rank == 0 else "ba"
        order, nested, long = dict.fromkeys(keys, 1), [{key: key for key in keys}], dict.fromkeys(range(300), 0)
        ordered, best = OrderedDict(a=1, b=2), OrderedDict()
        if rank == 0:
            ordered.move_to_end("a"); best.update(x=1, y=2)
            long[150] = long.pop(150)
        held = order, nested[0], long, ordered, best
    """)
    assert cells.sync(["order", "nested", "long", "ordered", "best"])
    cells.run("""
        assert list(order) == list(nested[0]) == ["a", "b"] and list(long)[-1] == 150
        assert list(ordered.items()) == [("b", 2), ("a", 1)] and list(best.items()) == [("x", 1), ("y", 2)]
        assert all(one is two for one, two in zip(held, (order, nested[0], long, ordered, best)))
    """)


def test_containers_that_cannot_change_are_replaced(cells: ddip.Group) -> None:
    cells.run("""
        import functools, types
        part = functools.partial(max, 5 + rank)
        members = frozenset({1, 2}) if rank == 0 else frozenset({1})
        view = types.MappingProxyType({"a": 1} if rank == 0 else {})
    """)
    assert cells.sync(["members", "part", "view"]) == ["members", "part", "view"]
    cells.run("assert members == {1, 2} and view == {'a': 1} and part.args == (5,)")


def test_copied_containers_share_objects_with_copied_variables(cells: ddip.Group) -> None:
    cells.run("""
        class Item: pass
        items = []
        if rank == 0:
            first = Item()
            items += [first, torch.arange(6)]
            tail = items[1][2:]
    """)
    cells.sync(["items", "first", "tail"])
    cells.run("assert items[0] is first and tail.data_ptr() == items[1][2:].data_ptr()")


def test_a_sync_that_fails_on_a_rank_changes_nothing(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("""
        def fail(): raise ValueError("not here")
        class Broken:
            def __reduce__(self): return fail, ()
        count, items = rank, []
        if rank == 0:
            import threading
            lock = threading.Lock()
            def locked(): return lock
            broken, items, extra = Broken(), [1], 5
    """)
    with pytest.raises(ddip.GroupError, match="cannot take the state: ValueError: not here; nothing has changed"):
        cells.sync(["extra", "items", "broken"])
    cells.run("assert ('extra' in globals(), items) == ((True, [1]) if rank == 0 else (False, []))")
    capsys.readouterr()
    assert cells.sync(["locked"]) == ["locked"]
    assert "lock, which locked reads, was not copied: it cannot be pickled: TypeError" in capsys.readouterr().err


def test_sync_finds_objects_that_other_variables_hold_as_well(cells: ddip.Group) -> None:
    cells.run("""
        torch.manual_seed(0)
        job = SimpleNamespace(counts=[0], net=nn.Linear(1, 1))
        before, count = job, job.counts
        job.counts[0] = rank + 5
        if rank == 0: added, again = [job.net], job.net
    """)
    assert cells.sync(["job", "added", "again"]) == ["added", "again", "job.counts[0]"]
    cells.run("assert job is before and job.counts is count == [5] and added[0] is again is job.net")
