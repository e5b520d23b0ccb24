"""Objects that share parts, and functions of ``__main__``, on their way between notebook and ranks."""

from __future__ import annotations

import enum
import os
import signal
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ddip
from ddip.group import session
from ddip.protocol.objects import pickling
from tests import object_graphs

from .leftovers import wait_until
from .notebook import Notebook

Main = Callable[[str], dict[str, Any]]

MODEL = """
    import torch
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    net[2].weight = torch.nn.Parameter(net[0].weight.detach().T.clone())
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
    data = torch.arange(32.0).reshape(8, 4) / 32
"""
TEN_STEPS = """
    losses = []
    for step in range(10):
        loss = (net(data) - data.roll(1, 1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        losses.append(loss.item())
    moments = [opt.state[p]["exp_avg"] for p in net.parameters()]
    trained = [losses, [p.detach() for p in net.parameters()], moments, sched.get_last_lr()]
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Main]:
    """Yield a function that runs code in a notebook's ``__main__``, which also receives pulled variables.

    The function returns the variables of ``__main__``.
    """
    module = types.ModuleType("__main__")

    def run_in_main(code: str) -> dict[str, Any]:
        exec(compile(textwrap.dedent(code), "<a cell>", "exec", dont_inherit=True), vars(module))
        return vars(module)

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__main__", module)
        yield run_in_main


def push_names(cells: ddip.Group, variables: dict[str, Any], *names: str) -> None:
    cells.push({name: variables[name] for name in names})


def pull_from_all(cells: ddip.Group, name: str) -> list[Any]:
    return [values[name] for values in cells.pull_all([name], range(cells.world_size))[0]]


def assert_same_training(on_ranks: list[Any], in_notebook: list[Any]) -> None:
    torch.testing.assert_close(on_ranks, in_notebook)


def replace_rank(cells: ddip.Group, rank: int, *names: str) -> None:
    """Kill a rank, and repair it with copies of `names` from rank 0."""
    os.kill(cells.info()[rank].pid, signal.SIGKILL)
    wait_until(lambda: rank in cells.ranks.ended)
    assert cells.repair(names, 0) == [rank]


# -- names that share objects


def test_a_pushed_model_trains_with_its_optimizer_and_scheduler(cells: ddip.Group, main: Main) -> None:
    variables = main(MODEL)
    push_names(cells, variables, "net", "opt", "sched", "data")
    cells.run(TEN_STEPS)
    main(TEN_STEPS)
    for on_ranks in pull_from_all(cells, "trained"):
        assert_same_training(on_ranks, variables["trained"])


def test_a_repaired_rank_trains_like_the_others(cells: ddip.Group, main: Main) -> None:
    variables = main(MODEL)
    main(TEN_STEPS)
    cells.run(MODEL)
    cells.run(TEN_STEPS)
    replace_rank(cells, 1, "net", "opt", "sched", "data")
    cells.run(TEN_STEPS)
    main(TEN_STEPS)
    for on_ranks in pull_from_all(cells, "trained"):
        assert_same_training(on_ranks, variables["trained"])


def test_a_repair_names_copies_with_the_rank_of_another(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run(f"""{MODEL}
    class Mine(torch.utils.data.Sampler):
        def __init__(self): self.rank, self.num_replicas = rank, world_size
        def __iter__(self): return iter(range(self.rank, 12, self.num_replicas))
    mine, sampler = Mine(), torch.utils.data.DistributedSampler(range(12), shuffle=False)
    """)
    replace_rank(cells, 1, "net", "opt", "sched", "mine", "sampler")
    shown = capsys.readouterr().err
    assert "copied with the number of rank 0: mine.rank; set them to `rank` on rank 1, or " in shown


AGAIN = "opt = torch.optim.Adam(net.parameters(), lr=0.1)\nsched = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)"


@pytest.mark.slow
def test_a_new_optimizer_on_a_repaired_rank_is_named_and_synced(
    cells: ddip.Group, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new rank has an optimizer without moments: the models would diverge."""
    variables = main(MODEL)
    main(TEN_STEPS)
    cells.run(f"{MODEL}\n    old = torch.optim.SGD(net.parameters(), 1.0)")  # which the new rank never has
    cells.run(TEN_STEPS)
    replace_rank(cells, 1, "net", "data")
    cells.run("import torch")
    cells.run(AGAIN, ranks=[1])
    assert "differ" not in capsys.readouterr().err
    cells.run("pass")
    shown = capsys.readouterr().err
    assert "the new ranks differ from the others:\n" in shown
    assert "sched.last_epoch is 10 on rank 0, 0 on rank 1" in shown
    assert "opt.state: its length is 4 on rank 0, 0 on rank 1" in shown
    cells.sync()
    cells.run(TEN_STEPS)
    main(TEN_STEPS)
    for on_ranks in pull_from_all(cells, "trained"):
        assert_same_training(on_ranks, variables["trained"])
    cells.run("pass")
    assert "differ" not in capsys.readouterr().err


@pytest.mark.grid(in_ci=True)
def test_a_new_optimizer_on_an_added_rank_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Name no optimizer that all ranks create again, or that differs only in its settings."""
    with ddip.Group(1) as group:
        group.run(MODEL)
        group.run(TEN_STEPS)
        group.change(ddip.Request(n=2))
        group.run(MODEL, ranks=[1])
        group.run(TEN_STEPS, ranks=[1], quiet=True)
        group.run("loss.item()")
        assert "differ" not in capsys.readouterr().err
        group.change(ddip.Request(n=3))
        group.run(f"{MODEL}\n    opt.param_groups[0]['lr'] = rank")
        group.run("pass")
        assert "differ" not in capsys.readouterr().err
        group.run(TEN_STEPS)
        group.change(ddip.Request(n=4))
        group.run(f"{MODEL}\n    if rank == 3: {AGAIN.partition(chr(10))[0]}", ranks=[3])
        group.run("pass")
        assert "opt.state: its length is 4 on ranks 0-2, 0 on rank 3" in capsys.readouterr().err


def test_aliases_views_and_cells_of_closures_stay_shared(cells: ddip.Group, main: Main) -> None:
    variables = main(
        """
        import torch
        data = [1]; alias = data
        whole = torch.zeros(100_000); part = whole[5:7]
        def counter():
            n = 0
            def count():
                nonlocal n
                n += 1
                return n
            def now(): return n
            return count, now
        count, now = counter()
        """
    )
    names = ("alias", "data", "part", "whole", "now", "count")
    push_names(cells, variables, *names)
    code = "count(); data.append(2); whole[5] = 7; told = (alias is data, alias, part.tolist(), now())"
    cells.run(code)
    assert pull_from_all(cells, "told") == [(True, [1, 2], [7, 0], 1)] * 2
    replace_rank(cells, 1, *names)
    cells.run(code)
    assert pull_from_all(cells, "told") == [(True, [1, 2, 2], [7, 0], 2)] * 2
    for found in (cells.pull(names, 1), cells.peek(names, 1)):
        assert found["alias"] == found["data"] == [1, 2, 2] and found["count"]() == found["now"]() == 3
        assert found["part"].data_ptr() == found["whole"][5:].data_ptr()
    assert cells.pull(names, 1)["alias"] is not cells.pull(names, 1)["alias"]


def test_parameters_without_their_model_are_named_in_one_line(
    cells: ddip.Group, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = main(MODEL)
    push_names(cells, variables, "opt")
    assert "ddip: opt holds parameters of net, which was not pushed\n" in capsys.readouterr().err
    push_names(cells, variables, "net", "opt", "data")
    assert "holds" not in capsys.readouterr().err
    push_names(cells, variables, "net", "sched")
    assert "ddip: sched holds opt, which was not pushed\n" in capsys.readouterr().err
    variables["weights"] = {"of the net": list(variables["net"].parameters())}
    push_names(cells, variables, "weights", "data")
    assert "ddip: weights holds parameters of net, which was not pushed\n" in capsys.readouterr().err
    push_names(cells, variables, "weights", "net")
    assert "weights holds" not in capsys.readouterr().err


def test_parts_that_are_sent_apart_are_named_in_both_directions(
    cells: ddip.Group, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = main("""
        import torch
        w = torch.zeros(3, requires_grad=True); opt = torch.optim.SGD([w], lr=0.1)
    """)
    push_names(cells, variables, "w")
    assert "holds" not in capsys.readouterr().err
    push_names(cells, variables, "opt")
    assert "ddip: opt holds w, which was not pushed\n" in capsys.readouterr().err
    for pull in (cells.pull, cells.peek):
        pull(["w"])
        assert "holds" not in capsys.readouterr().err
        cells.run("import torch; w = torch.zeros(3, requires_grad=True); opt = torch.optim.SGD([w], lr=0.1)")
        pull(["opt"])
        assert "ddip: opt holds w, which was not pulled\n" in capsys.readouterr().err


def test_variables_that_hold_a_replaced_model_are_named(
    cells: ddip.Group, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not named: copies, loop variables with parts of the former model, and variables of the same push."""
    variables = main(MODEL)
    push_names(cells, variables, "net", "opt", "data")
    cells.run("""
        import torch
        before = {name: value.clone() for name, value in net.state_dict().items()}
        state = net.state_dict()
        for layer in net: pass
        for parameter in net.parameters(): pass
    """)
    push_names(cells, variables, "net", "opt", "data")
    assert "former" not in capsys.readouterr().err
    push_names(cells, main("def infer(): return net(data)"), "infer")
    assert "former" not in capsys.readouterr().err
    cells.run("from torch.nn.parallel import DistributedDataParallel as DDP; ddp = DDP(net)")
    push_names(cells, variables, "net", "data")
    assert capsys.readouterr().err.splitlines()[-1] == (
        "ddip: ddp, opt still hold the former net: create them again, or push them with net on one line"
    )
    cells.run("ddp = DDP(net); opt = torch.optim.Adam(net.parameters(), lr=0.1)")
    cells.run(f"sched = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5){textwrap.dedent(TEN_STEPS)}")
    main(TEN_STEPS)
    for on_ranks in pull_from_all(cells, "trained"):
        assert_same_training(on_ranks, variables["trained"])
    push_names(cells, variables, "net", "opt")
    assert (
        "ddip: sched still holds the former opt: create it again, or push it with opt on one line\n"
        in capsys.readouterr().err
    )


# -- functions and classes of __main__


def test_a_pushed_function_sees_the_ranks_variables(cells: ddip.Group, main: Main) -> None:
    variables = main(
        """
        import torch
        lr = 1
        def f(): return rank, lr
        def again():
            global count
            count = count + 1
        def helper(): return "old"
        def calls_helper(): return helper()
        class Net(torch.nn.Module):
            def forward(self, x): return x * rank + lr
        net, count = Net(), 0
        """
    )
    push_names(cells, variables, "f", "lr", "again", "calls_helper", "count", "net")
    cells.run("again(); told = [f(), count, calls_helper(), net(10)]")
    assert pull_from_all(cells, "told") == [[(rank, 1), 1, "old", 10 * rank + 1] for rank in range(2)]
    main("lr = 7\ndef helper(): return 'new'")
    push_names(cells, variables, "lr", "helper")
    cells.run("again(); told = [f(), count, calls_helper(), net(10)]")
    assert pull_from_all(cells, "told") == [[(rank, 7), 2, "new", 10 * rank + 7] for rank in range(2)]
    cells.run("lr = rank; told = f()")
    assert pull_from_all(cells, "told") == [(0, 0), (1, 1)]


KINDS = {
    "function": "def thing(): return value",
    "closure": """
        def made(by):
            def inner(): return by * value
            return inner
        thing = made(1)
    """,
    "decorator": """
        import functools
        def plain(f):
            @functools.wraps(f)
            def wrapper(): return f() + 0 * value
            return wrapper
        @plain
        def thing(): return value
    """,
    "property": """
        class A:
            @property
            def it(self): return value
        obj = A()
        def thing(): return obj.it
    """,
    "methods": """
        class A:
            @classmethod
            def c(cls): return value
            @staticmethod
            def s(): return value
            def m(self): return self.c() + self.s() - value
        thing = A().m
    """,
    "dataclass": """
        import dataclasses
        @dataclasses.dataclass
        class D:
            x: int = 0
            y: int = dataclasses.field(default_factory=lambda: value)
            def it(self): return self.x + D().y
        thing = D().it
    """,
    "super": """
        class A:
            def it(self): return value
        class B(A):
            def it(self): return super().it()
        class C(B):
            def it(self): return super(C, self).it()
        thing = C().it
    """,
    "nested": """
        def thing():
            def inner(): return value
            return inner()
    """,
    "class in a function": """
        def thing():
            class A:
                x = value
            return A.x
    """,
    "lambda in a module": """
        import torch
        net = torch.nn.Linear(1, 1)
        net.act = lambda: value
        thing = lambda: net.act()
    """,
    "partial": """
        import functools
        def plain(x): return x + value
        thing = functools.partial(plain, 0)
    """,
    "generator": """
        def made(): yield value
        thing = lambda: next(made())
    """,
    "comprehension": "def thing(): return [value for _ in range(1)][0]",
    "coroutine": """
        async def made(): return value
        def thing():
            try: made().send(None)
            except StopIteration as end: return end.value
    """,
    "recursion": """
        def again(n): return again(n - 1) if n else value
        def thing(): return again(3)
    """,
    "context manager": """
        import contextlib
        @contextlib.contextmanager
        def made(): yield value
        def thing():
            with made() as it: return it
    """,
    "cached": """
        import functools
        class A:
            @functools.cached_property
            def it(self): return fib(3) - 2
        @functools.lru_cache(5)
        def fib(n): return fib(n - 1) + fib(n - 2) if n > 1 else value
        def thing():
            fib.cache_clear()
            return A().it if value == 1 else A().it - 2
    """,
}


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_every_kind_have_the_globals_of_the_receiver(kind: str, main: Main) -> None:
    main("value = 1")
    variables = main(KINDS[kind])
    graph = pickling.dump_all({"thing": variables["thing"]}, list, variables)
    assert "value" in graph.along
    for name in [*variables]:
        if not name.startswith("__"):
            del variables[name]
    loader = pickling.Loader(graph.pickled)
    values = {name: loader.load(name) for name in graph.pickled}
    thing = values.pop("thing")
    pickling.set_missing_variables(variables, values)
    assert thing() == 1
    main("value = 2")
    assert thing() == 2


@pytest.mark.slow
def test_code_that_runs_during_unpickling_has_its_globals(
    cells: ddip.Group, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_session", types.SimpleNamespace(group=cells, settings=dict))
    variables = main(
        """
        import math
        from ddip import in_torchddp
        made = []
        def rounded(x): return math.floor(x)
        class Base:
            def __init_subclass__(cls): made.append(cls.__name__)
            def __setstate__(self, state): self.x = rounded(state["x"]) + len(table)
            def __hash__(self): return rounded(1.5)
        class Kind(Base): pass
        kind, table = Kind(), [0]
        kind.x = 1.5
        keys = {kind: 1}
        """
    )
    push_names(cells, variables, "kind", "keys", "table")
    cells.run("told = kind.x, keys[kind], [*keys][0] is kind, 'Kind' in made; made_here = made")
    assert pull_from_all(cells, "told") == [(2, 1, True, True)] * 2
    replace_rank(cells, 1, "kind", "keys")
    cells.run("told = kind.x, keys[kind]")
    assert pull_from_all(cells, "told") == [(2, 1), (3, 1)]
    for name in ("rounded", "table", "made", "math"):
        variables.pop(name)
    assert cells.pull(["kind"], 1)["kind"].x == 4
    cells.run("del math, rounded, table, made, kind, keys", quiet=True)
    main("table = [0]; import math\ndef rounded(x): return math.floor(x)\nmade = []")
    assert main("told = in_torchddp(2, lambda it: (it.x, rank), kind)")["told"] == (2, 0)


def test_pulled_functions_bring_objects_missing_in_the_notebook(
    cells: ddip.Group, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_session", types.SimpleNamespace(group=cells, settings=dict))
    cells.run("import math\nscale = 3\ndef f(x): return math.floor(x) * scale + lr")
    variables = main(
        """
        from ddip import in_torchddp
        lr = 10
        def make():
            def inner(x): return sqrt(x) + lr
            return inner, [inner], f
        """
    )
    variables["f"] = cells.peek(["f"], 1)["f"]
    assert variables["f"](1.5) == 13 and variables["scale"] == 3
    made, held, again = main("told = in_torchddp(2, make, imports='from math import sqrt')")["told"]
    assert held[0] is made and made(4) == 12 and again is variables["f"]


def test_functions_of_rank_0_use_variables_of_the_receiver(cells: ddip.Group, main: Main) -> None:
    cells.run("""
        import torch, torch.distributed as dist
        data = torch.arange(10)
        def mine(): return data[rank::world_size].sum().item()
        class Net(torch.nn.Module):
            def forward(self): return mine() + rank
        net = Net()
    """)
    replace_rank(cells, 1, "net")
    cells.run("told = net()")
    assert pull_from_all(cells, "told") == [20, 26]
    variables = main("data = 'not the ranks'; rank = 5")
    variables.update(cells.pull(["net"], 1))
    assert variables["data"] == "not the ranks" and "world_size" not in variables
    variables |= {"data": torch.arange(4), "world_size": 2, "rank": 1}
    assert variables["net"]() == 5


def test_ddips_names_do_not_travel_and_the_notebooks_are_named(
    cells: ddip.Group, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = main("rank, world_size = 7, 9\ndef where(): return rank, world_size")
    push_names(cells, variables, "where")
    stderr = capsys.readouterr().err
    assert "ddip: where reads rank: ddip sets it on each rank, so the notebook's value was not pushed\n" in stderr
    cells.run("told = where()")
    assert pull_from_all(cells, "told") == [(0, 2), (1, 2)]


@pytest.mark.grid(in_ci=True)
def test_additional_objects_are_named_and_updated_until_ranks_assign_them(notebook: Notebook) -> None:
    notebook.ok("%makedip -n 2\nlr, setting = 1, {'a': 1}\ndef f(): return lr, setting['a']")
    assert "ddip: pushed f, with lr, setting, which functions of it read: " in notebook.ok("%dipush f").text
    notebook.ok("lr, setting = 2, {'a': 2}\n%dipush f")
    assert "(2, 2)" in notebook.ok("%%dip\nprint(f())").text
    notebook.ok("%%dip\nlr = 5")
    shown = notebook.ok("lr, setting = 3, {'a': 3}\n%dipush f").text
    assert "ddip: pushed f, with setting, which" in shown
    assert "(5, 3)" in notebook.ok("%%dip\nprint(f())").text
    notebook.ok("%%dip\nscale = 4\ndef g(): return scale")
    assert "pulled g, with scale, which functions of it read: " in notebook.ok("%dipull g").text
    assert "4 4" in notebook.ok("print(g(), scale)").text


def test_trained_or_filled_additional_objects_are_not_replaced(cells: ddip.Group, main: Main) -> None:
    define = """
        def train():
            hist.append(1)
            with torch.no_grad(): net.weight.add_({step})
            return net.weight.item(), len(hist), limits['most']
    """
    main("import torch\nnet, hist, limits = torch.nn.Linear(1, 1), [], {'most': 1}\ntorch.nn.init.zeros_(net.weight)")
    cells.push({"train": main(define.format(step=1))["train"]})
    cells.run("assert train() == (1, 1, 1) and train() == (2, 2, 1)")
    cells.push({"train": main("limits['most'] = 5\n" + textwrap.dedent(define.format(step=10)))["train"]})
    cells.run("assert train() == (12, 3, 5)")


def test_additional_code_that_ranks_have_changed_is_not_replaced(cells: ddip.Group, main: Main) -> None:
    define = """
        class Counter:
            n = 0
        def unchanged(): return {}
        def count():
            Counter.n += 1
            return Counter.n, unchanged()
    """
    cells.push({"count": main(define.format(1))["count"]})
    cells.run("assert count() == (1, 1) and count() == (2, 1)")
    cells.push({"count": main(define.format(2))["count"]})
    cells.run("assert count() == (3, 2)")


def test_a_list_that_contains_itself_arrives(cells: ddip.Group, main: Main) -> None:
    cells.push({"first": main("loop = []\nloop.append(loop)\ndef first(): return loop[0]")["first"]})
    cells.run("assert first() is loop")


def test_a_call_says_that_hooks_stay(main: Main, cells: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_session", types.SimpleNamespace(group=cells, settings=dict))
    messages: list[str] = []
    monkeypatch.setattr("ddip.call.torchddp.notify", messages.append)
    main("""
        import torch
        from ddip import in_torchddp
        net = torch.nn.Linear(1, 1)
        net.weight.register_hook(lambda gradient: gradient)
        in_torchddp(2, lambda: len(list(net.parameters())))
    """)
    assert messages == ["in_torchddp: hooks of parameters and optimizers were not sent; register them in the function"]


def test_a_model_in_a_holder_that_stays_behind_is_named(
    cells: ddip.Group, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """A holder that is pushed along is not named; a hook without an optimizer is named."""
    variables = main("""
        import torch
        net = torch.nn.Linear(1, 1)
        net.weight.register_hook(lambda gradient: gradient)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        class Trainer:
            def __init__(self): self.model, self.optimizer = net, opt
            def step(self): return net(torch.ones(1)), opt
        holder, trainer = {"model": net}, Trainer()
    """)
    cells.push({"holder": variables["holder"]})
    stderr = capsys.readouterr().err
    assert "ddip: holder holds net, which was not pushed\n" in stderr and "holder has a hook of a parameter" in stderr
    cells.push({"trainer": variables["trainer"]})
    assert "holds" not in capsys.readouterr().err
    for pull in (cells.pull, cells.peek):
        cells.run("import torch; net = torch.nn.Linear(1, 1); holder = [net]")
        pull(["holder"])
        assert "ddip: holder holds net, which was not pulled\n" in capsys.readouterr().err


def test_a_function_from_a_run_script_uses_rank_variables(cells: ddip.Group, main: Main) -> None:
    """After ``%run``, the function's globals have no ``__name__``."""
    variables = main("rank = 0\ndef mine(): return rank")
    del variables["__name__"]
    cells.push({"mine": variables["mine"]})
    cells.run("assert mine() == rank")


def test_hooks_that_stay_behind_are_named(cells: ddip.Group, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    variables = main("""
        import torch
        net, plain = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        net.weight.register_hook(lambda gradient: 0 * gradient)
        opt, after = torch.optim.SGD(plain.parameters()), torch.optim.SGD(plain.parameters())
        after.register_step_post_hook(lambda *_: None)
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_post_accumulate_grad_hook(lambda *_: None)
    """)
    cells.push({name: variables[name] for name in ("net", "plain", "opt", "after", "leaf")})
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "hook" in line] == [
        f"ddip: {name} has a hook of a parameter or optimizer, which was not pushed"
        for name in ("net", "after", "leaf")
    ]


def test_a_class_defined_alike_on_both_sides_is_one_class(cells: ddip.Group, main: Main) -> None:
    define = """
        import dataclasses, enum, torch
        class Net(torch.nn.Module):
            def forward(self, x): return x + value
        class Big(Net):
            def forward(self, x): return super(Big, self).forward(x)
        @dataclasses.dataclass
        class D:
            x: int = 0
            y: list[int] = dataclasses.field(default_factory=list)
        class Kind(enum.Enum):
            A = 1
    """
    variables = main(define)
    cells.run(f"{textwrap.dedent(define)}value = rank")
    main("things = [Big(), D(), Kind.A, Net]")
    push_names(cells, variables, "things")
    cells.run(
        "told = type(things[0]) is Big, type(things[1]) is D, things[2] is Kind.A, things[3] is Net, things[0](1)"
    )
    assert pull_from_all(cells, "told") == [(True, True, True, True, 1 + rank) for rank in range(2)]
    back = cells.pull(["things"], 1)["things"]
    assert [type(back[0]), type(back[1]), back[2], back[3]] == [variables[n] for n in ("Big", "D")] + [
        variables["Kind"].A,
        variables["Net"],
    ]
    cells.run("class Net(torch.nn.Module):\n    def forward(self, x): return 'other'")
    push_names(cells, variables, "things")
    cells.run("told = isinstance(things[0], Net), things[0](1)")
    assert pull_from_all(cells, "told") == [(False, 1 + rank) for rank in range(2)]


# -- random graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Seems like:UserWarning")
@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 310, 10))])
def test_random_graphs_arrive_unchanged(
    cells: ddip.Group, monkeypatch: pytest.MonkeyPatch, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Send ten graphs in separate variables: notebook to ranks, back, and from rank 0 to a new rank."""
    cells.run("from tests import object_graphs")
    names: dict[int, list[str]] = {}
    for seed in range(first, first + 10):
        program = object_graphs.Program(1000 + seed)
        names[seed] = program.chosen()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
            alone = object_graphs.main_module(program.text)
            here = vars(object_graphs.main_module(program.text))
            push_names(cells, here, *names[seed])
            seen = sorted({*names[seed], *cells.transferred.along})
            cells.run(f"told = object_graphs.describe_names(globals(), {seen})")
            descriptions = pull_from_all(cells, "told")
            received_main = object_graphs.main_module()
            vars(received_main).update(cells.pull(names[seed], 1))
            if seed == first:
                replace_rank(cells, 1, *names[seed])
                cells.run("from tests import object_graphs", ranks=[1])
            cells.run(f"import torch\ntorch.manual_seed(1)\ntold = object_graphs.probe_names(globals(), {seen})")
            probed = pull_from_all(cells, "told")
            for how, found in ((object_graphs.describe_names, descriptions), (object_graphs.probe_names, probed)):
                expected, back = (object_graphs.apply_in_main(how, main, seen) for main in (alone, received_main))
                assert found == [expected] * 2 and back == expected, f"{program.text}\n{names[seed]}"
        cells.run(f"for name in {seen}: del globals()[name]")


# -- flag enums, and ddip's names


def test_flags_with_members_of_several_bits_arrive_whole(cells: ddip.Group, main: Main) -> None:
    variables = main(
        """
        import enum
        class F(enum.Flag):
            A = 1; B = 2; ALL = 3; HIGH = 389
        class I(enum.IntFlag):
            R = 4; W = 2; RW = 6; SAME = 4
        class K(enum.Flag, boundary=enum.KEEP):
            A = 1; AB = 3
        class P(enum.Enum):
            ONE = (1, 2); ALIAS = (1, 2)
            def __init__(self, x, y): self.sum = x + y
        flags = [F.ALL, F.HIGH, F.A | F.B, I.RW, I.SAME, ~I.R, K(8), P.ONE]
        """
    )
    names = ("flags", "F", "I", "K", "P")
    push_names(cells, variables, *names)
    cells.run(
        "told = [flags[0] is F.ALL, flags[0] == F.A | F.B, list(F.ALL), [*F.__members__], F.HIGH.value, "
        "flags[3] is I.RW, [*I.__members__], flags[4] is I.R, flags[5].value, flags[6].value, "
        "P.ALIAS is P.ONE, flags[7].sum]"
    )
    back = cells.pull(["told", "F", "flags"], 1)
    F, minus_r = variables["F"], (~variables["I"].R).value
    assert back["told"][1:2] + back["told"][3:] == [
        True,
        ["A", "B", "ALL", "HIGH"],
        389,
        True,
        ["R", "W", "RW", "SAME"],
        True,
        minus_r,
        8,
        True,
        3,
    ]
    assert back["F"] is F and back["told"][2] == [F.A, F.B] and isinstance(F.ALL, enum.Flag)


@pytest.mark.grid
def test_a_name_is_found_in_its_normalized_spelling(notebook: Notebook) -> None:
    notebook.ok("%makedip -n 2\nﬁx = 3\n%dipush ﬁx")
    notebook.ok("%%dip\nfix += 1")
    assert "4" in notebook.ok("%dipull ﬁx\nprint(fix)").text
