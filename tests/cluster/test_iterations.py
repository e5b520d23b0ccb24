"""A cell that ends within a training iteration leaves no trace of it: training continues from before it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddip
from ddip.errors import RequestFailed
from ddip.group.members import ranks

from .meanwhile import meanwhile, press_stop
from .variants import few

CODE = """
import contextlib, copy, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))

def inputs(batch):
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(100 * batch + rank))

def loss_of(model, batch):
    return model(inputs(batch)).square().sum()

def adam(model):
    return torch.optim.Adam(model.parameters(), 0.05)

def step(model, opt, batch):
    opt.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    opt.step()
    return loss.item()

def state(model, opt):
    values = [*model.parameters(), *model.buffers()]
    states = opt.state_dict()["state"]
    values += [states[number][key] for number in sorted(states) for key in sorted(states[number])]
    return [getattr(value, "_local_tensor", value).tolist() for value in values]

class Fault(nn.Module):
    on = False
    def forward(self, x): return Raises.apply(x)

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if Fault.on: raise MemoryError("planted")
        return gradient

@contextlib.contextmanager
def fault():
    Fault.on = True
    try: yield
    finally: Fault.on = False

def check(model, opt, twin, its, batches, step=step):
    losses = [step(model, opt, batch) for batch in batches]
    expected = [step(twin, its, batch) for batch in batches]
    assert losses == expected, (losses, expected)
    assert state(model, opt) == state(twin, its)
"""
PAIR = """
def with_fault():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), Fault(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
"""
CLEARED = "the cell ended inside a training iteration: gradients of `net` were cleared on all ranks"
UNCHANGED = "; parameters and optimizers are as the cell left them"


@pytest.fixture(autouse=True)
def define_training(cells: ddip.Group) -> None:
    cells.options.failure_grace = 5.0  # all ranks fail, and a slow one must not cause an abort
    cells.run(CODE + PAIR)


def assert_fails(group: ddip.Group, code: str, match: str = "planted") -> None:
    with pytest.raises(ddip.CellError, match=match):
        group.run(code)


def make_pair(group: ddip.Group, model: str, then: str = "", opt: str = "adam") -> None:
    """Create `net` with `opt`, and an undisturbed `twin` with `its`; train both for three steps."""
    group.run(f"""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power
        def make():
            net = {model}
            {then}
            return net
        (net, twin) = make(), make()
        opt, its = {opt}(net), {opt}(twin)
        for batch in range(3): step(net, opt, batch), step(twin, its, batch)
    """)


DDPS = {
    "plain": ("DDP(with_fault())", ""),
    "a static graph": ("DDP(with_fault(), static_graph=True)", ""),
    "unused parameters": ("DDP(with_fault(), find_unused_parameters=True)", ""),
    "gradients in buckets": ("DDP(with_fault(), gradient_as_bucket_view=True)", ""),
    "several buckets": ("DDP(with_fault(), bucket_cap_mb=1e-5)", ""),
    "a hook": ("DDP(with_fault())", "net.register_comm_hook(None, default_hooks.fp16_compress_hook)"),
    "torch's own hook": ("DDP(with_fault())", "net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)"),
    "a subgroup": ("DDP(with_fault(), process_group=dist.new_group([0, 1]))", ""),
    "a device mesh": ("DDP(with_fault(), device_mesh=dist.device_mesh.init_device_mesh('cpu', (world_size,)))", ""),
    "compiled": ("torch.compile(DDP(with_fault()), backend='eager')", ""),
    "compiled inside": ("DDP(torch.compile(with_fault(), backend='eager'))", ""),
    "compiled in place": ("DDP(with_fault())", "net.compile(backend='eager')"),
}


@pytest.mark.parametrize("kind", few(DDPS, "plain"))
def test_a_wrapper_continues_after_an_error_in_backward_everywhere(
    cells: ddip.Group, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pair(cells, *DDPS[kind])
    assert_fails(cells, "with fault(): step(net, opt, 3)")
    cells.run("assert not any(one.grad is not None for one in net.parameters())")
    assert CLEARED + UNCHANGED in capsys.readouterr().err
    cells.run("check(net, opt, twin, its, range(3, 13))")
    assert "iteration" not in capsys.readouterr().err


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("thread", few(["no thread", "a thread"], "a thread"))
def test_collectives_begun_by_one_rank_never_meet_later_steps(
    cells: ddip.Group, thread: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fail on one rank while no rank waits.

    ddip cannot know whether a user's thread will begin a collective, but this one never has.
    """
    make_pair(cells, "DDP(with_fault(), bucket_cap_mb=1e-5)")
    if thread == "a thread":
        cells.run("""
            import threading
            ends = threading.Event()
            def watch(): ends.wait()
            threading.Thread(target=watch).start()
        """)
    assert_fails(cells, "if rank == 1: raise MemoryError('planted')\nwith fault(): step(net, opt, 3)")
    cells.run("check(net, opt, twin, its, range(3, 13))")
    assert "the group was rebuilt" in capsys.readouterr().err
    if thread == "a thread":
        cells.run("ends.set()")


POWERSGD = (
    "net.state = power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1); "
    "net.register_comm_hook(net.state, power.powerSGD_hook)"
)


@pytest.mark.grid(in_ci=True)
def test_powersgd_goes_on_after_a_failure_between_iterations(cells: ddip.Group) -> None:
    """The fault resets all models alike, so the undisturbed run comes first."""
    make_pair(cells, "DDP(with_fault())", POWERSGD)
    cells.run("expected = [step(twin, its, batch) for batch in range(3, 15)]")
    assert_fails(cells, "losses = [step(net, opt, batch) for batch in (3, 4)]; raise MemoryError('planted')")
    cells.run("""
        assert net.state.iter == 5 and net.state.error_dict
        losses += [step(net, opt, batch) for batch in range(5, 15)]
        assert losses == expected, (losses, expected)
        assert state(net, opt) == state(twin, its)
    """)


@pytest.mark.grid
def test_powersgd_restarts_with_equal_states(cells: ddip.Group) -> None:
    make_pair(cells, "DDP(with_fault())", POWERSGD)
    assert_fails(cells, "with fault(): step(net, opt, 3)")
    cells.run("""
        assert net.state.iter == 0 and not net.state.error_dict
        twin = make(); twin.load_state_dict(net.state_dict())
        its = adam(twin); its.load_state_dict(copy.deepcopy(opt.state_dict()))
        check(net, opt, twin, its, range(3, 13))
        assert net.state.iter == 10 and net.state.error_dict
    """)


@pytest.mark.parametrize("kept_in", few(["a closure", "a state", "nothing"], "a closure"))
def test_a_users_communication_hook_with_values_of_the_iteration_is_named(
    cells: ddip.Group, kept_in: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let the hook add its rounding error to the next gradients; reset it as ddip says."""
    cells.run("""
        def compress(errors, bucket):
            number = bucket.index(), bucket.buffer().numel()
            whole = bucket.buffer() + errors.get(number, 0)
            rounded = (whole * 4).round() / 4
            errors[number] = whole - rounded
            return dist.all_reduce(rounded / world_size, async_op=True).get_future().then(lambda done: done.value()[0])
        def closed_over(errors): return lambda state, bucket: compress(errors, bucket)
        def plain(state, bucket): return compress({}, bucket)
    """)
    hook = {
        "a closure": "net.register_comm_hook(None, closed_over(net.errors))",
        "a state": "net.register_comm_hook(net.errors, compress)",
        "nothing": "net.register_comm_hook(None, plain)",
    }
    make_pair(cells, "DDP(with_fault(), bucket_cap_mb=1e-5)", f"net.errors = {{}}; {hook[kept_in]}")
    assert_fails(cells, "with fault(): step(net, opt, 3)")
    cells.run("net.errors.clear(); twin.errors.clear(); check(net, opt, twin, its, range(3, 13))")
    named = "your communication hook of `net` may keep values of the unfinished iteration"
    assert (named in capsys.readouterr().err) == (kept_in != "nothing")


def test_the_end_of_a_cell_inside_a_step_is_reported(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """LBFGS calls the closure several times within a step, and updates the parameters in between."""
    make_pair(cells, "DDP(with_fault())")
    cells.run("opt = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=4)")
    assert_fails(
        cells,
        """
        calls = []
        def closure():
            calls.append(1)
            opt.zero_grad()
            loss = loss_of(net, 3)
            loss.backward()
            if len(calls) == 2: raise MemoryError("planted")
            return loss
        opt.step(closure)
        """,
    )
    shown = capsys.readouterr().err
    assert (
        "the failed cell ended inside an optimizer's step on ranks 0, 1: parameters and the optimizer's state" in shown
    )
    cells.run("pass")
    assert UNCHANGED not in shown + capsys.readouterr().err


@pytest.mark.slow
def test_optimizers_that_step_within_a_failed_backward_pass_are_reported(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        def make_fused():
            net = with_fault()
            opts = {one: torch.optim.Adam([one], 0.05) for one in net.parameters()}
            def update(one):
                dist.all_reduce(one.grad)
                opts[one].step(); opts[one].zero_grad()
            for one in net.parameters(): one.register_post_accumulate_grad_hook(update)
            return net
        net, twin = make_fused(), make_fused()
        def train(net, batches): return [loss.backward() or loss.item() for b in batches for loss in [loss_of(net, b)]]
        assert train(net, range(3)) == train(twin, range(3))
    """)
    within = "ended inside an optimizer's step on ranks 0, 1"
    assert_fails(cells, "Fault.on = True; train(net, [3])")
    assert f"the failed cell {within}" in capsys.readouterr().err
    cells.run("""
        Fault.on = False
        assert any(not torch.equal(*pair) for pair in zip(net.parameters(), twin.parameters()))
        twin.load_state_dict(net.state_dict())
    """)
    assert UNCHANGED not in capsys.readouterr().err
    assert_fails(cells, "train(net, [4]); raise MemoryError('planted')")  # the backward pass is complete
    cells.run("pass")
    assert within not in capsys.readouterr().err


def test_an_error_in_a_forward_pass_clears_earlier_micro_batches(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pair(cells, "DDP(with_fault())")
    assert_fails(
        cells,
        """
        opt.zero_grad()
        with net.no_sync():
            for batch in (3, 4): loss_of(net, batch).backward()
        loss_of(net, 5)
        raise MemoryError("planted")
    """,
    )
    cells.run("check(net, opt, twin, its, range(3, 13))")
    assert CLEARED + UNCHANGED in capsys.readouterr().err


def test_micro_batches_that_were_not_reduced_are_cleared(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail after the last backward pass has ended on all ranks."""
    make_pair(cells, "DDP(with_fault())")
    assert_fails(
        cells,
        """
        opt.zero_grad()
        stack = contextlib.ExitStack()
        stack.enter_context(net.no_sync())  # left open
        for batch in (3, 4): loss_of(net, batch).backward()
        raise MemoryError("planted")
    """,
    )
    cells.run("""
        assert net.require_backward_grad_sync and all(one.grad is None for one in net.parameters())
        check(net, opt, twin, its, range(3, 13))
    """)
    assert CLEARED + UNCHANGED in capsys.readouterr().err


@pytest.mark.grid
def test_a_stop_in_backward_of_micro_batches_hangs_no_cell(cells: ddip.Group) -> None:
    """Run two micro-batches under no_sync, and time out in the third on one rank."""
    make_pair(cells, "DDP(with_fault())")
    cells.run("""
        def accumulated(net, opt, batch):
            opt.zero_grad()
            with net.no_sync():
                for part in (0, 1): loss_of(net, 10 * batch + part).backward()
            loss = loss_of(net, 10 * batch + 2)
            loss.backward()
            opt.step()
            return loss.item()
        import time
        def sleeps(gradient): time.sleep(60)
    """)
    with pytest.raises(ddip.CellTimeout):
        cells.run(
            """
            opt.zero_grad()
            with net.no_sync():
                for part in (0, 1): loss_of(net, part).backward()
            handle = net.module[0].weight.register_hook(sleeps)
            loss_of(net, 2).backward()
        """,
            timeout=0.5,
        )
    cells.run("handle.remove(); check(net, opt, twin, its, range(3, 13), accumulated)", timeout=60)


@pytest.mark.grid
def test_a_rebuild_ends_no_sync_left_open_by_one_rank(cells: ddip.Group) -> None:
    make_pair(cells, "DDP(with_fault())")
    cells.options.failure_grace = 0.1
    assert_fails(
        cells,
        """
        if rank == 1:
            stack = contextlib.ExitStack()
            stack.enter_context(net.no_sync())
            loss_of(net, 3).backward()
            raise MemoryError("planted")
        step(net, opt, 3)
    """,
    )
    cells.run("check(net, opt, twin, its, range(3, 13))", timeout=60)


def test_a_rebuild_leaves_no_stale_gradients(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Clear gradients at the end of a step; fail on one rank between its backward pass and that."""
    cells.run("""
        net, twin = [DDP(nn.Linear(1, 1)) for _ in range(2)]
        twin.load_state_dict(net.state_dict())
        opt, its = [torch.optim.SGD(one.parameters(), 1.0) for one in (net, twin)]
        def late(net, opt, size, raises=()):
            net(torch.full((1, 1), float(size))).sum().backward()
            if rank in raises: raise MemoryError("planted")
            opt.step(); opt.zero_grad()
            return [one.tolist() for one in net.parameters()]
    """)
    assert_fails(cells, "late(net, opt, 100, raises=[1])")
    cells.run("""
        assert all(one.grad is None for one in net.parameters())
        twin.load_state_dict(net.state_dict())
        check(net, opt, twin, its, range(10), late)
    """)
    assert CLEARED in capsys.readouterr().err


@pytest.mark.grid
def test_gradients_stay_when_a_cell_fails_outside_an_iteration(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pair(cells, "DDP(with_fault(), gradient_as_bucket_view=True)")
    assert_fails(
        cells, "opt.zero_grad(); loss = loss_of(net, 3); loss.backward(); loss.item(); raise MemoryError('planted')"
    )
    assert_fails(cells, "raise MemoryError('planted')")
    cells.run("""
        opt.step()
        step(twin, its, 3)
        assert state(net, opt) == state(twin, its)
    """)
    assert_fails(cells, "step(net, opt, 4); step(twin, its, 4); raise MemoryError('planted')")
    cells.run("""
        assert all(one.grad is not None for one in net.parameters())
        check(net, opt, twin, its, range(5, 15))
    """)
    assert "iteration" not in capsys.readouterr().err


@pytest.mark.grid
def test_only_models_in_the_failed_iteration_are_cleared(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    make_pair(cells, "with_fault()")
    cells.run("other = network(1); other_opt = adam(other); loss_of(other, 0).backward()")
    assert_fails(
        cells,
        """
        opt.zero_grad()
        net[0].requires_grad_(False)
        loss_of(net, 3).backward()
        with fault(): net[0].requires_grad_(True); loss_of(net, 4).backward()
    """,
    )
    cells.run("""
        assert all(one.grad is None for one in net.parameters())
        assert all(one.grad is not None for one in other.parameters())
        check(net, opt, twin, its, range(3, 13))
    """)
    assert_fails(cells, "loss_of(net, 13); raise MemoryError('planted')")  # changes no gradient
    cells.run("""
        assert all(one.grad is not None for one in other.parameters())
        check(net, opt, twin, its, range(13, 23))
    """)
    stderr = capsys.readouterr().err
    assert CLEARED + UNCHANGED in stderr and "`other`" not in stderr


@pytest.mark.grid
def test_models_in_objects_and_on_some_ranks_only_are_named(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        class Learner: pass
        learn = Learner(); learn.model = with_fault(); learn.opt = adam(learn.model)
    """)
    with pytest.raises(ddip.CellError, match="planted"):
        cells.run("with fault(): step(learn.model, learn.opt, 0)", ranks=[0])
    cells.run("assert all(one.grad is None for one in learn.model.parameters())")
    assert "gradients of `learn.model` were cleared" in capsys.readouterr().err


@pytest.mark.grid
def test_an_interrupt_that_a_cell_has_caught_is_not_forgotten(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catch the error in the cell, as Trainers that end gracefully do."""
    make_pair(cells, "DDP(with_fault())")
    cells.run("""
        try:
            with fault(): step(net, opt, 3)
        except MemoryError: pass
    """)
    cells.run("check(net, opt, twin, its, range(3, 13))")
    assert CLEARED + UNCHANGED in capsys.readouterr().err


@pytest.mark.parametrize("failing", few(["one rank", "all ranks"], "one rank"))
def test_a_caught_error_in_the_last_step_is_told_and_compared(
    cells: ddip.Group, failing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let SGD fail at its third parameter on rank 1, and train on."""
    cells.run("""
        class Half(torch.optim.SGD):
            fails = False
            def step(self, closure=None):
                with torch.no_grad():
                    for number, one in enumerate(self.param_groups[0]["params"]):
                        if self.fails and number == 2: raise MemoryError("planted")
                        one.add_(one.grad, alpha=-0.05)
        def careful(net, opt, batch):
            opt.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            try: opt.step()
            except MemoryError: pass
            return loss.item()
    """)
    make_pair(cells, "DDP(with_fault())", opt="(lambda net: Half(net.parameters(), 0.05))")
    everywhere = failing == "all ranks"
    cells.run(f"opt.fails = {everywhere} or rank == 1; careful(net, opt, 3); opt.fails = False; steps = rank")
    shown = capsys.readouterr().err
    where = "ranks 0, 1" if everywhere else "rank 1"
    assert f"this cell ended inside an optimizer's step on {where}: parameters and the optimizer's state" in shown
    cells.run("""
        both = [None, None]
        dist.all_gather_object(both, [one.tolist() for one in net.parameters()])
        assert both[0] == both[1]
        twin.load_state_dict(net.state_dict())
        check(net, opt, twin, its, range(4, 14), careful)
    """)
    assert ("rebuilt, with rank 0's parameters" in capsys.readouterr().err) != everywhere


@pytest.mark.grid
def test_ranks_busy_with_another_cell_are_reset_when_free(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pair(cells, "with_fault()")
    cells.run("import threading; go_on = threading.Event()")
    background = cells.start("loss_of(net, 3).backward(); go_on.wait()", ranks=[1])
    with pytest.raises(ddip.CellError, match="planted"):
        cells.run("with fault(): step(net, opt, 3)", ranks=[0])
    cells.run("assert all(one.grad is None for one in net.parameters())", ranks=[0])
    background.stop()
    with pytest.raises(ddip.CellInterrupted):
        background.wait()
    cells.run("""
        assert all(one.grad is None for one in net.parameters())
        check(net, opt, twin, its, range(3, 13))
    """)
    assert capsys.readouterr().err.count(CLEARED) == 2


@pytest.mark.grid
def test_a_rank_dying_in_an_iteration_leaves_no_gradients(cells: ddip.Group) -> None:
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run(CODE + PAIR)
        make_pair(group, "with_fault()")
        with pytest.raises(ddip.CellError):
            group.run("loss_of(net, 3).backward()\nif rank == 1: import os; os._exit(1)\ndist.barrier()")
        group.repair()
        group.run("if rank == 0: assert all(one.grad is None for one in net.parameters())")


@pytest.mark.grid
def test_a_wrapper_that_cannot_be_reset_says_what_to_type(cells: ddip.Group) -> None:
    make_pair(cells, "DDP(with_fault())")
    assert_fails(cells, "net._ddp_init_helper = None\nwith fault(): step(net, opt, 3)")
    assert_fails(cells, "step(net, opt, 3)", r"RuntimeError: a failed cell .*DDP\(model")
    cells.run("""
        net = DDP(net.module)
        check(net, opt, twin, its, range(3, 13))
    """)


@pytest.mark.grid
def test_a_scaler_that_has_unscaled_is_reset(cells: ddip.Group) -> None:
    make_pair(cells, "DDP(with_fault())")
    cells.run("""
        scaler, other = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        def scaled(net, opt, batch):
            mine = scaler if opt is globals()["opt"] else other
            opt.zero_grad()
            loss = loss_of(net, batch)
            mine.scale(loss).backward()
            mine.unscale_(opt)
            if Fault.on: raise MemoryError("planted")
            mine.step(opt); mine.update()
            return loss.item()
    """)
    assert_fails(cells, "Fault.on = True; scaled(net, opt, 3)")
    cells.run("Fault.on = False; check(net, opt, twin, its, range(3, 13), scaled)")


@pytest.mark.grid
def test_an_accelerator_counts_micro_batches_from_the_first(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        from accelerate import Accelerator
        def prepared():
            net = with_fault()
            return accelerator.prepare(net, adam(net))
        def micro_batches(net, opt, batch):
            for part in range(4):
                with accelerator.accumulate(net):
                    loss = loss_of(net, 10 * batch + part)
                    accelerator.backward(loss)
                    opt.step(); opt.zero_grad()
            return loss.item()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        (net, opt), (twin, its) = prepared(), prepared()
        for batch in range(3): micro_batches(net, opt, batch), micro_batches(twin, its, batch)
    """)
    assert_fails(
        cells,
        """
        for part in range(2):
            with accelerator.accumulate(net): accelerator.backward(loss_of(net, part))
        with fault(), accelerator.accumulate(net): accelerator.backward(loss_of(net, 2))
    """,
    )
    cells.run("check(net, opt, twin, its, range(3, 13), micro_batches)")
    assert CLEARED + UNCHANGED in capsys.readouterr().err


@pytest.mark.grid
def test_a_training_thread_is_not_disturbed(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail in another cell while the thread is in the middle of an accumulation."""
    make_pair(cells, "with_fault()")
    cells.run("""
        import threading
        begins, goes_on, ends = [threading.Event() for _ in range(3)]
        def train():
            begins.wait()
            opt.zero_grad(); loss_of(net, 3).backward(); ends.set()
            goes_on.wait()
            opt.step()
        thread = threading.Thread(target=train); thread.start()
    """)
    assert_fails(cells, "begins.set(); ends.wait(); raise MemoryError('planted')")
    cells.run("""
        goes_on.set(); thread.join()
        step(twin, its, 3)
        check(net, opt, twin, its, range(4, 14))
    """)
    stderr = capsys.readouterr().err
    assert "iteration" not in stderr
    assert (
        "a thread is still training on ranks 0, 1, so ddip has not reset models and gradients after the failed"
        in stderr
    )


@pytest.mark.grid
def test_a_thread_that_trained_and_ended_hides_no_broken_iteration(cells: ddip.Group) -> None:
    """The system reuses the ident of an ended thread for later threads."""
    make_pair(cells, "with_fault()")
    cells.run("import threading; other = network(1); ends = threading.Event()")
    assert_fails(
        cells,
        """
        idents = []
        def train():
            idents.append(threading.get_ident())
            loss_of(other, 0).backward()
        thread = threading.Thread(target=train); thread.start(); thread.join()
        while True:  # until one has its number
            others = [threading.Thread(target=ends.wait) for _ in range(20)]
            for one in others: one.start()
            if idents[0] in [one.ident for one in others]: break
        opt.zero_grad()
        with fault(): step(net, opt, 3)
        """,
    )
    cells.run("""
        ends.set()
        assert all(one.grad is None for one in net.parameters())
        check(net, opt, twin, its, range(3, 13))
    """)


@pytest.mark.grid
def test_a_new_gradient_that_reuses_an_address_is_cleared(cells: ddip.Group) -> None:
    cells.run("""
        def single(seed=0):
            torch.manual_seed(seed)
            return nn.Linear(2, 1, bias=False)
    """)
    make_pair(cells, "single()")
    cells.run("other = network(1)")
    assert_fails(
        cells,
        """
        before, spare = id(net.weight.grad), []
        opt.zero_grad()
        loss_of(net, 3).backward()
        while id(net.weight.grad) != before:
            spare.append(net.weight.grad)
            net.weight.grad = net.weight.grad.clone()
            assert len(spare) < 100_000
        loss_of(other, 3).backward()
        kept = loss_of(net, 4)
        raise MemoryError("planted")
        """,
    )
    cells.run("assert net.weight.grad is None; check(net, opt, twin, its, range(3, 13))")


UNCHECKED = (
    "objects.iteration.report_position",
    "objects.iteration.begin_cell",
    "process_group.aborted_tensors.take_reports",
    "runtime.process_settings.end_cell",
)


@pytest.mark.parametrize("part", few(UNCHECKED, "objects.iteration.report_position"))
def test_state_that_ddip_could_not_inspect_is_reported(
    cells: ddip.Group, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pair(cells, "DDP(with_fault())")
    module, _, function = part.rpartition(".")
    cells.run(f"""
        import ddip.rank.{module} as broken
        def raises(*_, own=broken.{function}):
            broken.{function} = own
            raise OSError("no")
        opt.zero_grad()
    """)
    begins = function == "begin_cell"
    cells.run(f"broken.{function} = raises" if begins else "pass")
    assert_fails(
        cells,
        f"""
        {"pass" if begins else f"broken.{function} = raises"}
        with net.no_sync(): loss_of(net, 3).backward()
        raise MemoryError("planted")
        """,
    )
    expected = f"ddip could not check the state of ranks 0, 1 after this cell ({part}: OSError: no); %dipcheck compares"
    assert expected in capsys.readouterr().err
    cells.run("check(net, opt, twin, its, range(3, 13))")


@pytest.mark.grid
def test_join_ends_with_the_cell_that_fails_in_it(cells: ddip.Group) -> None:
    make_pair(cells, "DDP(with_fault())")
    assert_fails(cells, "with fault(), net.join(): step(net, opt, 3)")
    cells.run("""
        assert not net._join_config.enable
        check(net, opt, twin, its, range(3, 13))
        with net.join(): step(net, opt, 13)
        step(twin, its, 13)
        assert state(net, opt) == state(twin, its)
    """)


SHARDED = """
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

def sharded(policy=None, **options):
    net = with_fault()
    for part in net:
        if isinstance(part, nn.Linear): fully_shard(part, **options)
    return fully_shard(net, **options)

def accumulated(net, opt, batch):
    opt.zero_grad()
    net.set_requires_gradient_sync(False)
    loss_of(net, batch).backward()
    net.set_requires_gradient_sync(True)
    loss = loss_of(net, batch + 20)
    loss.backward()
    opt.step()
    return loss.item()
"""
FSDP1_CODE = """
from torch.distributed.fsdp import FullyShardedDataParallel

def fsdp1(net, **options):
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)

def nested(net):
    net[0], net[3] = fsdp1(net[0]), fsdp1(net[3])
    return net

def micro_batch(net):
    if isinstance(net, FullyShardedDataParallel):
        with net.no_sync(): loss_of(net, 3).backward()
    else:
        net.set_requires_gradient_sync(False)
        loss_of(net, 3).backward()
        net.set_requires_gradient_sync(True)
"""
FSDP2 = {
    "plain": ("sharded()", "step"),
    "not resharded after forward": ("sharded(reshard_after_forward=False)", "step"),
    "mixed precision": ("sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))", "accumulated"),
    "accumulation": ("sharded()", "accumulated"),
}


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("kind", few(FSDP2, "plain"))
@pytest.mark.parametrize("reset", few(["torch", "hand"], "torch"))
def test_fully_shard_continues_after_an_error_in_backward(
    cells: ddip.Group, kind: str, reset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, step = FSDP2[kind]
    cells.run(SHARDED)
    make_pair(cells, model)
    if reset == "hand":  # as with torch before 2.14
        cells.run("from ddip.rank.objects import sharded_training\nsharded_training.BY_TORCH = ''")
    assert_fails(cells, f"with fault(): {step}(net, opt, 3)")
    cells.run("""
        assert {type(one).__name__ for one in net.parameters()} == {"DTensor"}
        assert all(one.grad is None for one in net.parameters())
    """)
    assert CLEARED + UNCHANGED in capsys.readouterr().err
    cells.run(f"check(net, opt, twin, its, range(3, 13), {step})")
    if reset == "hand":
        cells.run("sharded_training.BY_TORCH = '_reset_iter_state'")


UNREDUCED = {
    "fully_shard": ("sharded()", "micro_batch(net); raise MemoryError('planted')"),
    "another dtype, in forward": (
        "fully_shard(with_fault(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))",
        "micro_batch(net); kept = loss_of(net, 4); raise MemoryError('planted')",
    ),
    "fsdp1": ("fsdp1(with_fault(), use_orig_params=True)", "micro_batch(net); raise MemoryError('planted')"),
    "fsdp1, in backward": ("fsdp1(nested(with_fault()))", "with fault(): loss_of(net, 3).backward()"),
}
"""Sharded models, with code that fails and leaves gradients that are in no parameter's ``.grad``."""


@pytest.mark.grid
@pytest.mark.parametrize("kind", few(UNREDUCED, "fully_shard"))
def test_unreduced_gradients_are_cleared_beside_another_model(
    cells: ddip.Group, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, ends = UNREDUCED[kind]
    cells.run(SHARDED + FSDP1_CODE)
    make_pair(cells, model)
    cells.run("other = network(1); opt.zero_grad()")
    assert_fails(
        cells,
        f"""
        loss_of(other, 3).backward()
        {ends}
        """,
    )
    cells.run("check(net, opt, twin, its, range(3, 13))")
    assert re.search("gradients of `(net` and `other|other` and `net)` were cleared", capsys.readouterr().err)


UNEQUAL = {
    "fully_shard, fused": ("sharded()", "(lambda net: torch.optim.AdamW(net.parameters(), 0.05, fused=True))"),
    "fsdp1, original parameters": ("fsdp1(with_fault(), use_orig_params=True)", "adam"),
}
"""Sharded models with optimizers that write to parameters whose versions torch or FSDP1 hides."""


@pytest.mark.slow
@pytest.mark.parametrize("fails", few(["fails()", "opt.register_step_pre_hook(fails)"], "fails()"))
@pytest.mark.parametrize("kind", few(UNEQUAL, "fully_shard, fused"))
def test_shards_of_different_steps_refuse_use(cells: ddip.Group, kind: str, fails: str) -> None:
    model, opt = UNEQUAL[kind]
    cells.run(SHARDED + FSDP1_CODE)
    make_pair(cells, model, opt=opt)
    cells.run("""
        def fails(*_): raise MemoryError("planted")
        opt.zero_grad(); loss_of(net, 3).backward()
    """)
    assert_fails(cells, f"if rank == 1: {fails}\nopt.step()")
    with pytest.raises(ddip.CellError, match="may have left them at different steps: recreate"):
        cells.run("step(net, opt, 4)")


@pytest.mark.grid
def test_a_caught_stop_leaves_no_unreduced_gradients(cells: ddip.Group, tmp_path: Path) -> None:
    """Catch the stop in the cell, as loops that end gracefully do."""
    cells.run(SHARDED + FSDP1_CODE)
    make_pair(cells, "sharded()")
    cells.run("opt.zero_grad(); import threading")
    waits = meanwhile(lambda: len(list(tmp_path.iterdir())) == 2, press_stop)
    with pytest.raises(ddip.CellInterrupted):
        cells.run(f"""
            try:
                micro_batch(net)
                open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
                threading.Event().wait()
            except KeyboardInterrupt: pass
        """)
    waits.join()
    cells.run("check(net, opt, twin, its, range(3, 13))")


@pytest.mark.grid
def test_models_that_the_program_has_frozen_are_reset(cells: ddip.Group) -> None:
    """Freeze all objects, as loops do to shorten collections; also keep a class without a hash."""
    cells.run(SHARDED + FSDP1_CODE)
    make_pair(cells, "sharded()")
    cells.run("""
        class Kind(type):
            def __eq__(self, other): return self is other
        odd = Kind("Odd", (), {})()
        opt.zero_grad()
        import gc; gc.freeze()
    """)
    assert_fails(cells, "micro_batch(net); raise MemoryError('planted')")
    cells.run("check(net, opt, twin, its, range(3, 13))")


@pytest.mark.grid
def test_a_sharded_model_that_cannot_be_inspected_refuses_use(cells: ddip.Group) -> None:
    """A model that cannot be inspected does not hide another model's gradients."""
    cells.run(SHARDED + FSDP1_CODE)
    make_pair(cells, "sharded()")
    cells.run("other = sharded(); loss_of(other, 0).backward(); opt.zero_grad()")
    assert_fails(
        cells,
        """
        micro_batch(net)
        del other._get_fsdp_state()._state_ctx
        raise MemoryError("planted")
        """,
    )
    cells.run("check(net, opt, twin, its, range(3, 13))")
    assert_fails(cells, "other(inputs(0))", "a failed cell .*FSDPSequential")


FSDP1 = {
    "plain": "fsdp1(with_fault())",
    "original parameters": "fsdp1(with_fault(), use_orig_params=True)",
    "nested": "fsdp1(nested(with_fault()))",
}


@pytest.mark.grid
@pytest.mark.parametrize("kind", few(FSDP1, "nested"))
def test_fsdp1_continues_after_an_error_in_backward(cells: ddip.Group, kind: str) -> None:
    cells.run(FSDP1_CODE)
    make_pair(cells, FSDP1[kind])
    assert_fails(cells, "with fault(): step(net, opt, 3)")
    cells.run("check(net, opt, twin, its, range(3, 13))")


@pytest.mark.grid
def test_an_endless_finalizer_delays_the_reset_for_limited_time(
    cells: ddip.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ASK_SECONDS", 3.0)
    cells.run(CODE + "net = network()")
    assert_fails(
        cells,
        """
        import threading, weakref
        loss_of(net, 3).backward()
        if rank == 1: weakref.finalize(net[0].weight.grad, threading.Event().wait)
        kept = loss_of(net, 4)
        raise ValueError
        """,
        "ValueError",
    )
    with pytest.raises(RequestFailed, match="iteration .*3 s") as failed:
        cells.run("pass")
    assert failed.value.late == [1]
    cells.run("assert all(one.grad is None for one in net.parameters())")
