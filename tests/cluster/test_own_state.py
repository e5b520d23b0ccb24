"""``ddip.dist_state`` keeps each rank's own state; a fault at any line loses at most the newest save."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

import ddip

from .leftovers import wait_until
from .variants import few

CODE = """
import ddip, os, random, signal, sys, torch, torch.distributed as dist
import ddip.sharded.state
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.tied, self.frozen = (nn.Linear(width, width) for _ in range(3))
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.norm, self.drop, self.last = nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.drop(self.frozen(self.tied(torch.tanh(self.norm(self.first(x)))))))

class Average:
    def __init__(self, of): self.values = {name: of(value).clone() for name, value in model.state_dict().items()}
    def update(self):
        for name, value in model.state_dict().items():
            now = value.to_local() if type(self.values[name]) is torch.Tensor and hasattr(value, "to_local") else value
            self.values[name] = (self.values[name] * 3 + now) / 4
    def state_dict(self): return {"values": self.values, "of rank": rank}
    def load_state_dict(self, state):
        assert state["of rank"] == rank
        self.values = state["values"]

class Partial(Net):
    def forward(self, x): return self.last(x) if rank == 0 else super().forward(x)

def local_of(value): return value.to_local() if hasattr(value, "to_local") else value
def replicas(): torch.manual_seed(0); return DDP(Net())
def sharded(): torch.manual_seed(0); return fsdp.fully_shard(Net())
def ensemble(): torch.manual_seed(rank); return Net()
def stages(): torch.manual_seed(0); return Net(4 + 2 * rank)
def partial(): torch.manual_seed(0); return Partial()

def make(kind, average=lambda value: value):
    global model, opt, state, scheduler, data, sampler, ema
    model = kind()
    opt = torch.optim.AdamW(model.parameters(), 0.05 + 0.01 * rank)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2 + rank, 0.9)
    data, sampler = torch.Generator().manual_seed(rank), DistributedSampler(range(8))
    ema = Average(average)
    state = ddip.dist_state(model, opt, scheduler, data, sampler, ema)
    random.seed(rank)
    torch.manual_seed(rank)

def step():
    opt.zero_grad()
    width = next(value for name, value in model.state_dict().items() if name.endswith("norm.weight")).shape[0]
    loss = model(torch.randn(8, width, generator=data) + rank + random.random()).square().mean()
    loss.backward()
    opt.step()
    scheduler.step()
    ema.update()
    sampler.set_epoch(sampler.epoch + 1 + rank)
    return loss.item()

def train(first, last):
    losses = []
    for number in range(first, last):
        losses.append(step())
        state.save(number + 1)
    return losses

def outcome():
    values = [*model.state_dict().values(), *ema.values.values(), data.get_state(), torch.get_rng_state()]
    values += [value for one in opt.state.values() for value in one.values()]
    return [local_of(value).clone() for value in values], [opt.param_groups[0]["lr"], sampler.epoch, random.random()]

def ensure_same(path, first):
    losses, (tensors, numbers) = torch.load(path)
    found = train(first, 14)
    assert found == losses[first:], (found, losses)
    ours, others = outcome()
    assert len(ours) == len(tensors) and all(map(torch.equal, ours, tensors)) and others == numbers

class At:
    'Runs `action` at the n-th new line of ddip/sharded below save() or restore(), or counts the lines.'
    def __init__(self, number=None, action=None): self.number, self.action, self.lines = number, action, set()
    def __call__(self, frame, event, argument):
        if "/ddip/sharded/" not in frame.f_code.co_filename: return None
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in self.lines:
            self.lines.add(line)
            if len(self.lines) == self.number: self.action()
        return self
    def __enter__(self): sys.settrace(self); return self
    def __exit__(self, *error): sys.settrace(None)

def die(): os.kill(os.getpid(), signal.SIGKILL)
def fail(): raise ValueError("planted")
"""


@pytest.fixture
def ranks(cells: ddip.Group, nothing_kept: None) -> ddip.Group:
    cells.options.failure_grace = 0.1
    cells.run(CODE)
    return cells


def write_expected_and_train(group: ddip.Group, kind: str, folder: Path) -> None:
    """Write the results of 14 undisturbed steps on each rank; then train 4 of them again."""
    group.run(f"""
        make({kind})
        torch.save((train(0, 14), outcome()), f"{folder}/{{rank}}")
        state.forget()
        make({kind})
        train(0, 4)
    """)


def repair_ended_ranks(group: ddip.Group) -> None:
    wait_until(lambda: group.ranks.ended)
    for rank in group.repair():
        group.run(f"if rank == {rank}:\n    exec({CODE!r})")


def kill_and_repair(group: ddip.Group, rank: int) -> None:
    os.kill(group.members[rank].pid, signal.SIGKILL)
    repair_ended_ranks(group)


def assert_continues(group: ddip.Group, kind: str, folder: Path, steps: str = "(4,)") -> None:
    group.run(f"""
        make({kind})
        first = state.restore()
        assert first in {steps}, first
        ensure_same(f"{folder}/{{rank}}", first)
    """)


KINDS = ["ensemble", "sharded", "sharded, local_of", "replicas", "stages", "partial"]
FEW = [pytest.param(kind, marks=[pytest.mark.grid] * (number > 0)) for number, kind in enumerate(KINDS)]


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("kind", FEW)
def test_each_rank_restores_its_own_state(ranks: ddip.Group, kind: str, tmp_path: Path) -> None:
    """Restore buffers, learning rates, momenta, schedulers, generators, samplers and averages."""
    write_expected_and_train(ranks, kind, tmp_path)
    for rank in (1, 0):
        kill_and_repair(ranks, rank)
        assert_continues(ranks, kind, tmp_path)
        ranks.run(f"state.forget(); make({kind}); train(0, 4)")


@pytest.mark.grid(in_ci=True)
def test_a_failed_save_and_fatal_restore_lose_one_save(ranks: ddip.Group, tmp_path: Path) -> None:
    write_expected_and_train(ranks, "ensemble", tmp_path)
    with pytest.raises(ddip.CellError, match="planted"):
        ranks.run("""
            exchange, ddip.sharded.state.mirror_copy = ddip.sharded.state.mirror_copy, lambda *copies: fail()
            step()
            state.save(5)
        """)
    ranks.run("ddip.sharded.state.mirror_copy = exchange")
    with pytest.raises(ddip.CellError):
        ranks.run("make(ensemble)\nif rank == 1: model.load_state_dict = lambda state: die()\nstate.restore()")
    repair_ended_ranks(ranks)
    assert_continues(ranks, "ensemble", tmp_path, "(4, 5)")


def count_lines(group: ddip.Group, cell: str) -> int:
    """Return how many lines of ddip/sharded a cell runs within ``counted``."""
    group.run(cell.format(action="At() as counted") + "\nlines = len(counted.lines)")
    lines: int = group.pull(["lines"], 1)["lines"]
    return lines


SAVE = "step()\nwith {action}: state.save(5)"
RESTORE = "make(ensemble)\nwith {action}: state.restore()"
LOSE = "if rank == 1: ddip.sharded.state._kept.clear()"


def train_again(group: ddip.Group) -> None:
    group.run("state.forget(); make(ensemble); train(0, 4)")


PARTS = [(SAVE, "(4, 5)"), (RESTORE, "(4,)"), (f"{LOSE}\n{RESTORE}", "(4,)")]
"""The cell of a rank that saves, restores, or restores as a new rank; and the steps that may be restored after it."""
SOME = [pytest.param(*part, 30, marks=pytest.mark.grid) for part in PARTS]


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("cell", "steps", "every"), [(SAVE, "(4, 5)", 60), *SOME])
def test_a_death_at_any_line(
    ranks: ddip.Group, cell: str, steps: str, every: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Die at every line with ``--every-line``, which takes 10 minutes; otherwise at a few lines."""
    write_expected_and_train(ranks, "ensemble", tmp_path)
    lines = count_lines(ranks, cell)
    assert lines > 60
    chosen = range(1, lines + 1) if pytestconfig.getoption("--every-line") else range(every // 3, lines + 1, every)
    for number in chosen:
        train_again(ranks)
        with pytest.raises(ddip.CellError):
            ranks.run(cell.format(action=f"At({number}, die if rank == 1 else lambda: 0)"))
        repair_ended_ranks(ranks)
        assert_continues(ranks, "ensemble", tmp_path, steps)


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_a_failure_anywhere_in_save_then_death_loses_one_save(
    ranks: ddip.Group, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    write_expected_and_train(ranks, "ensemble", tmp_path)
    chosen = random.Random(0)
    in_save, in_restore = count_lines(ranks, SAVE), count_lines(ranks, RESTORE)
    for _ in range(45 if pytestconfig.getoption("--every-line") else 6):
        train_again(ranks)
        number, rank = chosen.randint(1, in_save), chosen.randint(0, 1)
        with pytest.raises(ddip.CellError, match="planted"):
            ranks.run(SAVE.format(action=f"At({number}, fail if rank == {rank} else lambda: 0)"))
        number, rank = chosen.randint(1, in_restore), chosen.randint(0, 1)
        with pytest.raises(ddip.CellError):
            ranks.run(RESTORE.format(action=f"At({number}, die if rank == {rank} else lambda: 0)"))
        repair_ended_ranks(ranks)
        assert_continues(ranks, "ensemble", tmp_path, "(4, 5)")


def test_a_save_before_training_restores_an_optimizer_without_momentum(ranks: ddip.Group) -> None:
    ranks.run("""
        def make_one():
            torch.manual_seed(rank)
            model = nn.Linear(3, 1)
            return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        def steps(model, optimizer):
            for _ in range(10):
                optimizer.zero_grad(); model(torch.ones(1, 3)).square().sum().backward(); optimizer.step()
            return model.weight.tolist(), [state["momentum_buffer"].tolist() for state in optimizer.state.values()]
        one, its = make_one()
        state = ddip.dist_state(one, its, name="before the first step")
        state.save(0)
        first = steps(one, its)
        one.weight.grad.add_(1)
        assert state.restore() == 0 and not its.state and one.weight.grad is None
        assert steps(one, its) == first == steps(*make_one())
    """)


def test_the_sampler_within_a_sampler_is_restored(ranks: ddip.Group) -> None:
    ranks.run("""
        from torch.utils.data import BatchSampler, RandomSampler
        batches = BatchSampler(RandomSampler(range(16), generator=torch.Generator().manual_seed(rank)), 4, False)
        state = ddip.dist_state(nn.Linear(1, 1), None, batches, name="samplers")
        list(batches); state.save(1); then = list(batches); list(batches)
        assert state.restore() == 1 and list(batches) == then
    """)


@pytest.mark.grid
def test_a_second_model_needs_a_name_but_reruns_do_not(ranks: ddip.Group) -> None:
    """The output history or a traceback may still hold the former model."""
    cell = "a, b = nn.Linear(2, 2), nn.Linear(2, 2)\nsa, sb = ddip.dist_state(a), ddip.dist_state(b)\n"
    ranks.run(cell + "sa.save(1)")
    for call in ("sb.save(1)", "sb.restore(default=0)"):
        with pytest.raises(ddip.CellError, match="ValueError: .*`a` .*'state'"):
            ranks.run(call)
    # A wrapper, and a name
    ranks.run("ddip.dist_state(nn.Sequential(a)).save(2); ddip.dist_state(b, name='b').save(1)")
    ranks.run("get_ipython().user_ns['Out'][0] = get_ipython().user_ns['_'] = a, sa; weight = a.weight")
    with pytest.raises(ddip.CellError, match="planted"):
        ranks.run("sa.save(3)\nmodel = a\ndef use(model): fail()\ndel model; use(a)")
    ranks.run(cell + "assert sa.restore() == 3 and torch.equal(a.weight, weight)")
    ranks.run("ddip.sharded.state._kept.clear(); get_ipython().user_ns['Out'].pop(0); del _")


def test_models_trained_one_after_another_need_names(ranks: ddip.Group) -> None:
    ranks.run("""
        def train_one(seed, **options):
            torch.manual_seed(seed)
            model = nn.Linear(2, 2)
            state, begin = ddip.dist_state(model, **options), model.weight.clone()
            for number in range(state.restore(default=0), 3): state.save(number + 1)
            assert torch.equal(model.weight, begin)
    """)
    with pytest.raises(ddip.CellError, match="ValueError: .*this cell .*'state'"):
        ranks.run("for seed in range(2): train_one(seed)")
    ranks.run("for seed in range(2): train_one(seed, name=f'seed {seed}')")


@pytest.mark.grid(in_ci=True)
def test_a_resized_group_omits_and_names_per_rank_state(tmp_path: Path) -> None:
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run(CODE)
        group.run(
            """
            make(replicas)
            opt.param_groups[0] |= {"lr": 0.05, "initial_lr": 0.05}
            scheduler.step_size, scheduler.base_lrs = 2, [0.05]
            train(0, 4)
            model.module.norm(torch.ones(2, 4) * rank)  # DDP sends rank 0's in the next step
            state.save(4)
            torch.save((outcome()[0], opt.state_dict()), f"{tmp_path}/{rank}")
        """.replace("{tmp_path}", str(tmp_path))
        )
        group.change(ddip.Request(n=3))
        group.run(f"if rank == 2:\n    exec({CODE!r})")
        group.run(f"""
            import contextlib, io
            make(replicas)
            with contextlib.redirect_stdout(io.StringIO()) as told: assert state.restore() == 4
            texts = told.getvalue().splitlines()
            assert len(texts) == (rank == 0) and all("2 ranks saved, and there are 3 now" in text for text in texts)
            for name in ("others.1", "others.2", "others.3", "generators.torch", "generators.random"):
                assert all(name in text for text in texts), texts
            assert not any("model" in text or "optimizer" in text for text in texts), texts
            values, kept = torch.load("{tmp_path}/0")
            assert all(map(torch.equal, outcome()[0][: len(model.state_dict())], values))
            for number, entries in opt.state_dict()["state"].items():
                assert all(torch.equal(entries[key], value) for key, value in kept["state"][number].items())
            train(4, 8)
        """)
        group.run("state.forget(); make(ensemble); train(0, 2)")
        group.change(ddip.Request(n=2))
        with pytest.raises(ddip.CellError, match="LookupError: .*own model"):
            group.run("make(ensemble); state.restore()")


def test_tensors_and_objects_of_all_kinds_are_restored(ranks: ddip.Group) -> None:
    ranks.run("""
        import numpy as np
        class Tensors(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(3))
                values = torch.randn(3, dtype=torch.complex64).conj(), torch.tensor([True, False]), torch.empty(0)
                values += torch.randn(5).bfloat16(), torch.eye(3).to_sparse() * rank, torch.randn(4, 3).t()
                for number, value in enumerate(values): self.register_buffer(f"value{number}", value)
        def build(seed):
            torch.manual_seed(seed)
            model = Tensors()
            opt = torch.optim.SGD(model.parameters(), torch.tensor(seed + 0.5))
            numpys = np.random.default_rng(seed), np.random.RandomState(seed)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
            plateau.step(float(seed))
            sampler = torch.utils.data.RandomSampler(range(9), generator=torch.Generator().manual_seed(seed))
            return model, opt, [plateau, torch.amp.GradScaler("cpu"), sampler, random.Random(seed), *numpys]
        def drawn(model, opt, others):
            plateau, scaler, sampler, rng, *numpys = others
            values = [value.to_dense() for value in model.state_dict().values()], opt.param_groups[0]["lr"]
            return repr((values, plateau.state_dict(), list(sampler), rng.random(), [one.normal() for one in numpys],
                         random.random(), np.random.rand(), torch.rand(1)))
        model, opt, others = build(rank)
        state = ddip.dist_state(model, opt, *others)
        state.save(1)
        before = drawn(model, opt, others)
        if rank == 1: ddip.sharded.state._kept.clear()
        model, opt, others = build(5 + rank)
        state = ddip.dist_state(model, opt, *others, name="state")
        assert state.restore() == 1 and drawn(model, opt, others) == before
        assert {one.parts["model.value5"].values.stride() for one in state._copies.copies} == {(1, 3)}
    """)


REFUSED = {
    "a lambda": ("counting.count = lambda: 0", r"model.1._extra_state \(.*ickl"),
    "a partial sum": ("counting.count = partial_sum()", "model.1._extra_state.* reduced"),
    "a DTensor in an object": ("counting.count = {Box(sharded_weight())}", "DTensor"),
}


@pytest.mark.grid
@pytest.mark.parametrize("case", REFUSED)
def test_save_refuses_state_that_could_not_be_restored(ranks: ddip.Group, case: str) -> None:
    """All ranks refuse if one rank's state cannot be restored; the former save stays."""
    line, message = REFUSED[case]
    ranks.run("""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial as Sum
        mesh = init_device_mesh("cpu", (2,))
        def partial_sum(): return DTensor.from_local(torch.ones(2), mesh, [Sum()])
        def sharded_weight(): return DTensor.from_local(torch.ones(2), mesh)
        class Box:
            def __init__(self, value): self.value = value
        class Counting(nn.Linear):
            count = 0
            def get_extra_state(self): return self.count
            def set_extra_state(self, count): self.count = count
        model = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
        counting, state = model[1], ddip.dist_state(model)
        counting.count = 7 + rank
        state.save(1)
    """)
    with pytest.raises(ddip.CellError, match=f"ranks 0, 1: ValueError: .*{message}.*rank 1"):
        ranks.run(f"if rank == 1: {line}\nstate.save(2)")
    ranks.run("counting.count = 0\nassert state.restore() == 1 and counting.count == 7 + rank")


@pytest.mark.grid
def test_ranks_without_a_state_are_refused_at_once(ranks: ddip.Group) -> None:
    for other, message in {
        "torch.utils.data.DataLoader([1])": "DataLoader .*sampler",
        "{'a': 1}": "dict ",
    }.items():
        with pytest.raises(ddip.CellError, match=f"TypeError: .* a {message}"):
            ranks.run(f"ddip.dist_state(nn.Linear(1, 1), None, {other})")


def test_a_replica_is_stored_once_and_ranks_that_differ_twice(ranks: ddip.Group) -> None:
    """Check each of the last two saves; values may differ in order or sign only."""
    ranks.run("""
        def kept(model):
            state = ddip.dist_state(model, name="kept")
            for number in range(3): state.save(number)
            memory = {part.values.data_ptr(): part.values.nbytes for one in state._copies.copies
                      for name, part in one.parts.items() if name.startswith("model.")}
            for pair in state._copies.pairs:
                assert pair.spare.rank == 1 - rank and pair.spare.parts.keys() == pair.own.parts.keys()
            return round(sum(memory.values()) / sum(value.nbytes for value in model.state_dict().values()))
        class Tensors(nn.Module):
            def __init__(self, value):
                super().__init__()
                self.register_buffer("value", value)
        same = torch.arange(5000.0)
        assert kept(Tensors(same)) == 2
        assert kept(Tensors(same.flip(0) if rank else same)) == 4
        assert kept(Tensors(-same.double() if rank else same.double())) == 4
        assert kept(Tensors(torch.tensor([1.0, -1.0]) * (-1) ** rank)) == 4
        assert kept(Tensors(same)) == 2
    """)


ORDERS = """
def orders(first, last):
    'Train, and return the parameters in the order of the sums of each step.'
    seen, numbers = [], {id(parameter): number for number, parameter in enumerate(model.parameters())}
    def look(*_):
        buckets = model.reducer._get_zeros_like_grad_buckets()
        seen.append([numbers[id(parameter)] for bucket in buckets for parameter in bucket.parameters()])
    hook = model.module.register_forward_pre_hook(look)
    train(first, last)
    hook.remove()
    return seen
"""
ALONE = "if rank == 1: fail()\ndist.barrier()"
RECREATE = "make(replicas)\nassert state.restore() == {step}"
FAULTS = {
    "before the second step": (1, ALONE, RECREATE),
    "later": (3, ALONE, RECREATE),
    "with the same wrapper": (3, ALONE, ""),
    "with the same wrapper and group": (3, "step()\nfail()", ""),
}


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("case", few(FAULTS, "before the second step", "with the same wrapper"))
def test_ddp_adds_gradients_in_the_same_order_after_a_fault(ranks: ddip.Group, case: str) -> None:
    """Another order would change the last digit with three ranks or more."""
    step, fault, then = FAULTS[case]
    ranks.run(f"{ORDERS}\nmake(replicas)\nexpected = orders(0, 5)\nassert expected[0] != expected[1]")
    ranks.run(f"state.forget()\nmake(replicas)\nassert orders(0, {step}) == expected[:{step}]")
    with pytest.raises(ddip.CellError, match="planted"):
        ranks.run(fault)
    ranks.run(then.format(step=step))
    ranks.run(f"assert orders({step}, 5) == expected[{step}:]")


PAIR = """
def make_pair():
    global gen, disc, gen_opt, disc_opt, scale, state
    torch.manual_seed(0)
    gen, disc = DDP(nn.Linear(2, 3)), DDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    scale = nn.Parameter(torch.ones(()))
    gen_opt, disc_opt = torch.optim.Adam(gen.parameters(), 0.05), torch.optim.Adam([*disc.parameters(), scale], 0.05)
    state = ddip.dist_state(gen, gen_opt, disc, disc_opt)
def train_pair(first, last):
    losses = []
    for number in range(first, last):
        for sign, opt in ((1, gen_opt), (-1, disc_opt)):
            batch = torch.randn(4, 2, generator=torch.Generator().manual_seed(2 * number + rank))
            loss = sign * (scale * disc(gen(batch))).square().mean()
            loss.backward()
            dist.all_reduce(scale.grad)
            if number % 2: opt.step(); opt.zero_grad()
            losses.append(loss.item())
        state.save(number + 1)
    return losses
def values():
    tensors = [*gen.state_dict().values(), *disc.state_dict().values(), scale.detach()]
    for opt in (gen_opt, disc_opt): tensors += [item for one in opt.state.values() for item in one.values()]
    return [tensor.clone() for tensor in tensors]
"""


@pytest.mark.grid(in_ci=True)
def test_two_models_in_one_state_continue_after_a_death(tmp_path: Path) -> None:
    """Save between micro-batches, compare ten steps with an undisturbed run, and add a rank."""
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run(CODE + PAIR)
        group.run(f"make_pair(); torch.save(train_pair(0, 15), f'{tmp_path}/{{rank}}')")
        group.run("state.forget(); make_pair(); train_pair(0, 5)")
        kill_and_repair(group, 1)
        group.run(f"if rank == 1:\n    exec({PAIR!r})")
        group.run(f"""
            make_pair()
            assert state.restore() == 5
            losses, expected = train_pair(5, 15), torch.load(f"{tmp_path}/{{rank}}")[10:]
            assert losses == expected, (losses, expected)
            train_pair(15, 16)
            torch.save(values(), f"{tmp_path}/values {{rank}}")
        """)
        group.change(ddip.Request(n=3))
        group.run(f"if rank == 2:\n    exec({CODE + PAIR!r})")
        group.run(f"""
            import contextlib, io
            make_pair()
            with contextlib.redirect_stdout(io.StringIO()) as told: assert state.restore() == 16
            assert "others" not in told.getvalue(), told.getvalue()
            assert all(map(torch.equal, values(), torch.load(f"{tmp_path}/values 0")))
            train_pair(16, 18)
        """)
