"""DDP wrappers when the group is rebuilt: they continue, or say why they do not."""

from __future__ import annotations

import pytest

import ddip
from ddip.errors import RequestFailed

from .leftovers import collection_counts, wait_until
from .variants import few

pytestmark = pytest.mark.native("sockets")  # the group is rebuilt because ranks were blocked
CODE = """
import copy, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

def step(wrapper, opt, batch, raises=()):
    opt.zero_grad()
    loss = wrapper(torch.randn(4, 2, generator=torch.Generator().manual_seed(100 * batch + rank))).square().sum()
    if rank in raises: raise ValueError(f"in batch {batch}")
    loss.backward()
    opt.step()
    return loss.item()

def same(*modules):
    mine = [value.tolist() for module in modules for value in module.parameters()]
    found = [None] * world_size
    dist.all_gather_object(found, mine)
    return all(one == found[0] for one in found)
"""
GOES_ON = "the group was rebuilt; the DDP wrapper was rebuilt, with rank 0's parameters and buffers on every rank"
LOST = "the wrapper in wrapper (DDP, FSDP) that was made before must be recreated"
REFUSES = "RuntimeError: this DistributedDataParallel "


@pytest.fixture(autouse=True)
def define_training(cells: ddip.Group) -> None:
    cells.options.failure_grace = 0.1
    cells.run(CODE)


def fail_on_one_rank(group: ddip.Group, code: str = "if rank == 1: raise ValueError\ndist.barrier()") -> None:
    """Run a cell in which a rank fails while the other waits for it."""
    with pytest.raises(ddip.CellError):
        group.run(code)


def test_training_continues_after_each_fault_as_if_undisturbed(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ddip.CellError):  # now ddip names the objects of earlier tests that must be recreated
        cells.run("if rank == 1: raise ValueError\ndist.barrier()")
    cells.run("pass")
    capsys.readouterr()
    cells.run("""
        wrapper, other = DDP(network(0)), DDP(network(0))
        opt, twin = [torch.optim.Adam(one.parameters(), 0.05) for one in (wrapper, other)]
        expected = [step(other, twin, batch) for batch in range(6)]
        losses = [step(wrapper, opt, batch) for batch in range(2)]
        del other
    """)
    for batch in (2, 4):
        state = "kept = copy.deepcopy([wrapper.state_dict(), opt.state_dict()])\n"
        fail_on_one_rank(cells, f"{state}step(wrapper, opt, {batch}, raises=[1])")
        cells.run(f"""
            wrapper.load_state_dict(kept[0]); opt.load_state_dict(kept[1])  # batch norm has seen the batch twice
            losses += [step(wrapper, opt, batch) for batch in range({batch}, {batch} + 2)]
        """)
    cells.run("assert losses == expected, (losses, expected)\nassert same(wrapper)")
    stderr = capsys.readouterr().err
    assert stderr.count(GOES_ON) == 2 and "differs" not in stderr and "recreated" not in stderr


@pytest.mark.grid
def test_loader_workers_left_by_a_failed_cell_delay_no_group(cells: ddip.Group) -> None:
    """The loader is in a reference cycle; its workers check only once per hour whether it still exists."""
    cells.run("""
        import gc
        from torch.utils.data import DataLoader, _utils
        wrapper, usual = DDP(network(0)), _utils.MP_STATUS_CHECK_INTERVAL
        _utils.MP_STATUS_CHECK_INTERVAL = 3600.0
        gc.disable()  # a collection within the cell would wait, as in plain torch
        class Bar: pass
    """)
    fail_on_one_rank(
        cells,
        """
        bar = Bar()
        bar.itself, bar.iterator = bar, iter(DataLoader(torch.arange(8), num_workers=1))
        first = next(bar.iterator)
        del bar
        if rank == 1: raise ValueError
        dist.barrier()
    """,
    )
    cells.run("gc.enable()\n_utils.MP_STATUS_CHECK_INTERVAL = usual\nwrapper(torch.ones(2, 2))", timeout=60)


@pytest.mark.grid
def test_a_step_taken_by_one_rank_leaves_no_difference(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """No rank waits for another one here."""
    cells.run("wrapper = DDP(network(0)); opt = torch.optim.Adam(wrapper.parameters(), 0.05); step(wrapper, opt, 0)")
    fail_on_one_rank(cells, "opt.step = opt.step if rank == 0 else None\nstep(wrapper, opt, 1)")
    cells.run("assert same(wrapper)")
    assert GOES_ON in capsys.readouterr().err
    fail_on_one_rank(
        cells, "opt = torch.optim.Adam(wrapper.parameters(), 0.05); step(wrapper, opt, 1); raise ValueError"
    )
    cells.run("assert same(wrapper)")
    assert "rebuilt" not in capsys.readouterr().err  # both ranks are at the same step


WAYS = {
    "a static graph": ("DDP(network(0), static_graph=True)", ""),
    "unused parameters": ("DDP(network(0), find_unused_parameters=True)", ""),
    "gradients in buckets": ("DDP(network(0), gradient_as_bucket_view=True)", ""),
    "several buckets": ("DDP(network(0), bucket_cap_mb=1e-5)", ""),
    "no buffers": ("DDP(network(0), broadcast_buffers=False)", ""),
    "a hook": ("DDP(network(0))", "wrapper.register_comm_hook(None, hooks.fp16_compress_hook)"),
    "a hook of the group": ("DDP(network(0))", "wrapper.register_comm_hook(dist.group.WORLD, hooks.allreduce_hook)"),
    "accumulation": ("DDP(network(0))", "with wrapper.no_sync(): wrapper(torch.ones(2, 2)).sum().backward()"),
    "torch's own hook": ("DDP(network(0))", "wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)"),
    "a hook with torch's own state": (
        "DDP(network(0))",
        "wrapper.register_comm_hook(power.PowerSGDState(dist.group.WORLD), power.powerSGD_hook)",
    ),
    "compiled": ("torch.compile(DDP(network(0)), backend='eager')", ""),
    "compiled in place": ("DDP(network(0))", "wrapper.compile(backend='eager')"),
    "compiled inside": ("DDP(torch.compile(network(0), backend='eager'))", ""),
}


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("way", few(WAYS, "a static graph"))
def test_a_wrapper_keeps_its_configuration(cells: ddip.Group, way: str) -> None:
    make, then = WAYS[way]
    cells.run("from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks, powerSGD_hook as power")
    cells.run(f"wrapper = {make}\n{then}\nopt = torch.optim.SGD(wrapper.parameters(), 0.1)")
    before = """
inner = getattr(wrapper, '_orig_mod', wrapper).module
getattr(inner, '_orig_mod', inner).load_state_dict(network(0).state_dict())
"""
    losses = f"{before}losses = [step(wrapper, opt, batch) for batch in range(4)]\nassert same(wrapper)"
    cells.run(f"{losses}\nexpected = losses")
    fail_on_one_rank(cells, "step(wrapper, opt, 0, raises=[0])")
    cells.run(f"{losses}\nassert losses == expected, (losses, expected)")


@pytest.mark.grid
def test_each_wrapper_gets_its_own_parameters_from_rank_0(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        first, gone, second = [DDP(network(seed)) for seed in range(3)]
        gone = None
        with torch.no_grad():
            for wrapper, value in ((first, 1.0), (second, 2.0)):
                for parameter in wrapper.parameters(): parameter.fill_(value + 10 * rank)
    """)
    fail_on_one_rank(cells)
    cells.run("""
        assert [{value.item() for value in next(one.parameters()).flatten()} for one in (first, second)] == [{1}, {2}]
        opt = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
        for batch in range(2): step(first, opt, batch); step(second, opt, batch)
        assert same(first, second)
    """)
    assert "2 DDP wrappers were rebuilt, with rank 0's parameters" in capsys.readouterr().err


@pytest.mark.grid
def test_wrappers_match_even_if_a_rank_has_fewer(cells: ddip.Group) -> None:
    cells.run("first = DDP(network(0))")
    fail_on_one_rank(cells, "if rank == 1: raise ValueError\nsecond = DDP(network(1))")
    cells.run("third = DDP(network(2))\nopt = torch.optim.SGD(third.parameters(), 0.1)")
    fail_on_one_rank(cells)
    cells.run("step(third, opt, 0); first(torch.ones(2, 2))\nassert same(first, third)")


@pytest.mark.grid
def test_a_wrapper_that_failed_to_form_is_not_counted(cells: ddip.Group) -> None:
    before = collection_counts(cells)
    fail_on_one_rank(cells, "if rank == 1: raise ValueError\nDDP(network(1))")
    wait_until(lambda: all(now > then for now, then in zip(collection_counts(cells), before, strict=True)))
    cells.run("wrapper = DDP(network(0))\nopt = torch.optim.SGD(wrapper.parameters(), 0.1)")
    fail_on_one_rank(cells)
    cells.run("step(wrapper, opt, 0)\nassert same(wrapper)")


@pytest.mark.grid
def test_parameters_frozen_during_a_rebuild_are_averaged_later(cells: ddip.Group) -> None:
    cells.run("""
        first, second = DDP(network(0)), DDP(network(1))
        opts = [torch.optim.SGD(one.parameters(), 0.1) for one in (first, second)]
        first.requires_grad_(False)  # all of one, and a part of the other
        second.module[0].requires_grad_(False)
    """)
    fail_on_one_rank(cells)
    cells.run("""
        assert [parameter.requires_grad for parameter in second.parameters()] == 2 * [False] + 4 * [True]
        first.requires_grad_(True); second.requires_grad_(True)
        for batch in range(3): step(first, opts[0], batch); step(second, opts[1], batch)
        assert same(first, second)
    """)


@pytest.mark.grid
def test_wrappers_that_cannot_be_matched_do_not_continue(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 creates a wrapper without the others, and no rank waits for it."""
    cells.run("""
        alone = DDP(network(0), init_sync=False) if rank == 0 else None
        twins, other = [DDP(network(seed)) for seed in (1, 2)], DDP(nn.Linear(2, 1))
        before = [parameter.tolist() for twin in twins for parameter in twin.parameters()]
    """)
    fail_on_one_rank(cells)
    cells.run("""
        other(torch.ones(1, 2)).sum().backward()
        assert before == [parameter.tolist() for twin in twins for parameter in twin.parameters()]
    """)
    stderr = capsys.readouterr().err
    assert (
        "the DDP wrapper was rebuilt" in stderr
        and "other wrappers in alone (DDP, FSDP) that were made before must be" in stderr
    )
    with pytest.raises(ddip.CellError, match=REFUSES):
        cells.run("twins[1](torch.ones(2, 2))")


@pytest.mark.grid(in_ci=True)
def test_an_optimizer_with_a_different_step_count_is_named(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        wrapper = DDP(network(0))
        opt = torch.optim.Adam(wrapper.parameters())
        step(wrapper, opt, 0)
    """)
    fail_on_one_rank(cells, "if rank == 1: raise ValueError\nopt.step(); dist.barrier()")
    cells.run("state = [opt.state_dict()]\ndist.broadcast_object_list(state)\nopt.load_state_dict(state[0])")
    stderr = capsys.readouterr().err
    assert "opt: state (" in stderr and "%dipsync copies rank 0's values" in stderr
    fail_on_one_rank(cells)
    cells.run("step(wrapper, opt, 1)\nassert same(wrapper)")
    assert "differs" not in capsys.readouterr().err


REFUSED = {
    "of a subgroup": "wrapper = DDP(network(0), process_group=dist.new_group([0, 1]))",
    "whose hook has a state": """
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        wrapper = DDP(network(0))
        wrapper.register_comm_hook([], lambda state, bucket: allreduce_hook(None, bucket))
    """,
    "that one rank has no more": "wrapper = DDP(network(0))\nif rank == 1: del wrapper",
    "that is another on each rank": "wrapper = DDP(network(0))\nwrapper.gradient_as_bucket_view = rank == 1",
}


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("kind", few(REFUSED, "that one rank has no more"))
def test_a_wrapper_that_cannot_continue_must_be_recreated(
    cells: ddip.Group, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run(REFUSED[kind])
    fail_on_one_rank(cells)
    with pytest.raises(ddip.CellError, match=REFUSES):
        cells.run("wrapper(torch.ones(2, 2))")
    stderr = capsys.readouterr().err
    assert "made before must be recreated" in stderr and GOES_ON not in stderr
    cells.run("""
        wrapper = DDP(wrapper.module if "wrapper" in globals() else network(0))
        step(wrapper, torch.optim.SGD(wrapper.parameters(), 0.1), 0)
        assert same(wrapper)
    """)
    fail_on_one_rank(cells)
    cells.run("step(wrapper, torch.optim.SGD(wrapper.parameters(), 0.1), 0)\nassert same(wrapper)")


@pytest.mark.grid(in_ci=True)
def test_a_wrapper_with_another_memory_format_on_one_rank_does_not_continue(cells: ddip.Group) -> None:
    """DDP's reducer would add gradients in the order of their memory."""
    cells.run("""
        wrapper = DDP(torch.nn.Conv2d(2, 2, 2))
        if rank == 1: wrapper.to(memory_format=torch.channels_last)
    """)
    fail_on_one_rank(cells)
    with pytest.raises(ddip.CellError, match=REFUSES):
        cells.run("wrapper(torch.ones(1, 2, 2, 2))")


@pytest.mark.grid
def test_a_new_rank_has_no_wrappers_but_smaller_groups_continue(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("wrapper = DDP(network(0))\nopt = torch.optim.SGD(wrapper.parameters(), 0.1)")
    with ddip.Group(3, failure_grace=0.1) as group:
        group.run(CODE + "wrapper = DDP(network(0))\nopt = torch.optim.SGD(wrapper.parameters(), 0.1)")
        group.change(ddip.Request(n=2))
        group.run("step(wrapper, opt, 0)\nassert same(wrapper)")
        assert GOES_ON in capsys.readouterr().err
        group.change(ddip.Request(n=3))
        assert LOST in capsys.readouterr().err
        with pytest.raises(ddip.CellError, match=REFUSES):
            group.run("wrapper(torch.ones(2, 2))")


@pytest.mark.grid
def test_an_interrupted_revival_is_repeated(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("wrappers = [DDP(network(seed)) for seed in (0, 1)]")
    fail_on_one_rank(
        cells,
        """
        from ddip.rank.runtime import c10d
        shares, calls = c10d.share_state, []
        def is_interrupted(*args):
            calls.append(args)
            if len(calls) == 2: raise KeyboardInterrupt
            shares(*args)
        c10d.share_state = is_interrupted
        if rank == 1: raise ValueError
        dist.barrier()
    """,
    )
    with pytest.raises(RequestFailed, match="KeyboardInterrupt"):
        cells.run("pass")
    cells.run("c10d.share_state = shares\nfor wrapper in wrappers: wrapper(torch.ones(2, 2))\nassert same(*wrappers)")
    stderr = capsys.readouterr().err
    assert "2 DDP wrappers were rebuilt" in stderr and "recreated" not in stderr


@pytest.mark.grid
def test_an_error_in_a_revival_fails_one_cell_only(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("wrapper = DDP(network(0))\nopt = torch.optim.SGD(wrapper.parameters(), 0.1)")
    fail_on_one_rank(
        cells,
        """
        from ddip.rank.runtime import c10d
        shares = c10d.share_state
        def breaks(*_): raise MemoryError("no room")
        if rank == 1: c10d.share_state = breaks
        if rank == 1: raise ValueError
        dist.barrier()
    """,
    )
    with pytest.raises(RequestFailed, match="rank 1: MemoryError"):
        cells.run("pass")
    cells.run("""
        c10d.share_state = shares
        wrapper = DDP(wrapper.module)
        step(wrapper, torch.optim.SGD(wrapper.parameters(), 0.1), 0)
        assert same(wrapper)
    """)


@pytest.mark.grid
def test_failed_revivals_do_not_stop_later_cells(cells: ddip.Group) -> None:
    cells.run("""
        from ddip.rank.objects import wrappers
        def fails_at_once(): raise ValueError("planted")
        wrappers.share_also = fails_at_once
        wrapper = DDP(network(0))
    """)
    fail_on_one_rank(cells)
    with pytest.raises(RequestFailed, match="planted"):
        cells.run("here = 1")
    cells.run("here = 1\nwrappers.share_also = None")
    with pytest.raises(ddip.CellError, match=REFUSES):
        cells.run("wrapper(torch.ones(4, 2))")
