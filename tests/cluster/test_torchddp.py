"""in_torchddp: run a function of the notebook on every rank, and return rank 0's result."""

from __future__ import annotations

import linecache
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython
import pytest
import torch

import ddip
from ddip.call import torchddp
from ddip.errors import BadInput, CellError, TransferError
from ddip.group import session

from .apps import installed_app
from .leftovers import controllers_of, processes_of, wait_until
from .notebook import ANSI, Notebook
from .rank_errors import raises_on_ranks

Main = Callable[[str], dict[str, Any]]


@pytest.fixture
def main(cells: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> Main:
    """Return a function that runs code in a ``__main__`` with two ranks, and returns its variables."""
    monkeypatch.setattr(session, "_session", SimpleNamespace(group=cells, settings=dict))
    monkeypatch.setattr(cells.options, "failure_grace", 0.1)
    return bare_main()


def bare_main() -> Main:
    """Return a function that runs code in a ``__main__`` without a group, and returns its variables."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec("from ddip import in_torchddp", variables)

    def run_in_main(code: str) -> dict[str, Any]:
        exec(textwrap.dedent(code), variables)
        return variables

    return run_in_main


NET = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.layer = torch.nn.Linear(size, 1)
        def forward(self, x):
            return scaled(self.layer(x))
    def scaled(x):
        return factor * x
    factor = 2.0
"""
TRAIN = """
    def train(steps, lr=0.1, *, net=Net, wrap=lambda model: model, parts=1, part=0):
        torch.manual_seed(1)
        model = net(data.shape[1])
        wrapped = wrap(model)
        for _ in range(steps):
            wrapped(data[part::parts]).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
                    parameter.grad = None
        return model
    def train_ddp(*args, **kwargs):
        return train(*args, wrap=DistributedDataParallel, parts=world_size, part=rank, **kwargs)
    data = torch.arange(24.0).reshape(8, 3) / 24
"""
DDP = "from torch.nn.parallel import DistributedDataParallel"


def test_two_ranks_train_to_the_parameters_of_one_process(main: Main) -> None:
    main(NET)
    main(TRAIN)
    main("here = train(5, 0.2)")
    found = main(f"there = in_torchddp(2, train_ddp, 5, lr=0.2, net=Net, imports='{DDP}', need='data')")
    assert isinstance(found["there"], found["Net"])
    for there, here in zip(found["there"].parameters(), found["here"].parameters(), strict=True):
        torch.testing.assert_close(there, here)


def test_redefined_classes_are_used_and_results_have_that_class(main: Main) -> None:
    main(NET)
    found = main("first = in_torchddp(2, lambda cls: cls(2), Net)")
    former = found["Net"]
    found = main(
        """
        class Net(Net):
            def forward(self, x):
                return super().forward(x) + 1
        def ones(net):
            import pickle
            assert type(pickle.loads(pickle.dumps(net))) is Net   # ranks know it by its name
            with torch.no_grad():
                return net, net(torch.zeros(1, 2)) - net.layer.bias * 2, scaled
        second, difference, function = in_torchddp(2, ones, Net(2))
        """
    )
    assert type(found["first"]) is former and type(found["second"]) is found["Net"]
    assert found["difference"].item() == pytest.approx(1)
    assert found["function"] is found["scaled"]
    main("def scaled(x): return 0 * x")  # the returned function uses the notebook's current definition
    assert found["second"](torch.ones(1, 2)).item() == 1
    assert main("again = in_torchddp(2, lambda net: net(torch.ones(1, 2)).item(), second)")["again"] == 1


def test_names_are_resolved_in_the_documented_order(
    main: Main, cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("a = b = c = d = large = same = 'rank'; only, same = rank, [1.5, 'same']")
    main(
        """
        a = c = d = e = 'notebook'
        same, large, device = [1.5, 'same'], bytes(2_000_000), 'notebook'
        def b(): return 'code'
        def dirname(): return 'code'
        basename = 'data'
        def names():
            rest = dirname(), basename is os.path.basename, splitext is not None, (rank, world_size), only, str(device)
            return a, b(), c, d, e, large, same, *rest
        """
    )
    found = main("told = in_torchddp(2, names, need='a', imports='import os\\nfrom os.path import *')")["told"]
    assert found == (
        *("notebook", "code", "notebook", "notebook", "notebook", "rank", [1.5, "same"]),
        *("code", True, True, (0, 2), 0, "cpu"),
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if "reads" in line or "used" in line]
    assert sorted(lines) == sorted(
        [
            "ddip: names reads device: ddip sets it on each rank, so the notebook's value was not sent",
            *(f"ddip: in_torchddp used the notebook's {name}; ranks 0, 1 had another value" for name in "abcd"),
            "ddip: in_torchddp used large of ranks 0, 1, not the notebook's: "
            "it is larger than 1 MB; add large to need=",
        ]
    )


def test_a_model_and_its_optimizer_stay_connected_in_functions(main: Main) -> None:
    code = """
        import torch
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        def train():
            losses = []
            for _ in range(10):
                loss = (model(torch.ones(1, 2)) - 3).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses.append(loss.item())
            return losses, model.weight.detach(), opt.state[model.weight]["exp_avg"]
    """
    main(code)
    found = main("there = in_torchddp(2, train); here = train()")
    torch.testing.assert_close(found["there"], found["here"])


def test_nothing_stays_on_the_ranks(main: Main, cells: ddip.Group) -> None:
    cells.run("kept = [1]; before = sorted(globals())")
    main(
        """
        mine = 'mine'
        def fn():
            global mine, left
            mine = left = mine + '!'
            kept.append(rank)
            return mine
        """
    )
    assert main("told = in_torchddp(None, fn, imports='import json')")["told"] == "mine!"
    cells.run("new = {n for n in globals() if not n.startswith('_')} - {*before, 'before'}")
    assert [v["new"] for v in cells.pull_all(["new"], [0, 1])[0]] == [set(), set()]
    cells.run("hidden = '_in_torchddp' in globals(), __name__, __import__('__main__').__dict__ is globals()")
    assert [v["hidden"] for v in cells.pull_all(["hidden"], [0, 1])[0]] == [(False, "__main__", True)] * 2
    assert cells.pull(["kept"], 1) == {"kept": [1, 1]}


def test_all_other_arguments_go_to_the_function(main: Main) -> None:
    main("def fn(*args, **kwargs): return args, kwargs")
    found = main("told = in_torchddp(2, fn, 1, None, nprocs=3, fn=4, app=5, timeout=6)")["told"]
    assert found == ((1, None), {"nprocs": 3, "fn": 4, "app": 5, "timeout": 6})


def test_local_variables_and_nested_functions_can_be_sent(main: Main) -> None:
    found = main(
        """
        def table_of(): return table
        def outer(shift):
            table = {'x': 1}
            def inner(x): return x + shift + table_of()['x']
            return in_torchddp(2, inner, 10, need='table')
        told = outer(5)
        """
    )
    assert found["told"] == 16


def test_a_function_nested_in_a_module_sees_its_imports(main: Main) -> None:
    def dump_rank() -> object:
        return dumps({"rank": rank})  # type: ignore[name-defined] # noqa: F821

    assert ddip.in_torchddp(2, dump_rank, imports="from json import dumps") == '{"rank": 0}'


def test_objects_not_requested_are_missing_with_a_clear_error(main: Main) -> None:
    main(
        """
        import threading
        lock, large = threading.Lock(), bytearray(2_000_000)
        def use_lock(really): return lock if really else 'fine'
        def use_large(): return len(large)
        """
    )
    assert main("told = in_torchddp(2, use_lock, False)")["told"] == "fine"
    with pytest.raises(CellError, match="'lock' .*cannot pickle"):
        main("in_torchddp(2, use_lock, True)")
    with pytest.raises(CellError, match="'large' .*1 MB.*need="):
        main("in_torchddp(2, use_large)")
    for need in ("'large'", "['large']"):
        assert main(f"told = in_torchddp(2, use_large, need={need})")["told"] == 2_000_000


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("2, fn, need=[fn]", BadInput, "type the names of the variables"),
        ("2, fn, need='fn pth nowhere'", BadInput, "need='fn pth nowhere': .* pth, nowhere"),
        ("2, fn, imports='import os\\nimprt x'", BadInput, "imports=: 'imprt x' in line 2"),
        ("0, fn", BadInput, r"in_torchddp\(0, ...\): "),
        ("2, fn, 1, lock, x=lock", TransferError, "argument 2 .*lock.* argument x="),
        (
            "2, lambda: threading.Lock()",
            TransferError,
            "<lambda> .*rank 0 .*state_dict",
        ),
        ("2, fn, imports='import no_such'", CellError, "ranks 0, 1: ModuleNotFoundError: .*no_such"),
    ],
)
def test_impossible_arguments_are_named(main: Main, call: str, error: type[Exception], message: str) -> None:
    main("import threading\nlock = threading.Lock()\ndef fn(*args, **kwargs): return args")
    with pytest.raises(error, match=message):
        main(f"in_torchddp({call})")
    assert main("told = in_torchddp(2, fn, 1)")["told"] == (1,)


@pytest.mark.native("sockets")
def test_a_rank_raises_while_the_other_waits_for_it(main: Main, cells: ddip.Group) -> None:
    cells.run("kept = 'kept'")
    code = textwrap.dedent(
        """
        import torch, torch.distributed as dist
        def fn(fails):
            if rank == fails: raise ValueError('only here')
            x = torch.ones(1)
            dist.all_reduce(x)
            return x.item(), kept
        """
    )
    linecache.cache["<a cell>"] = (len(code), None, code.splitlines(True), "<a cell>")
    found = main("")
    exec(compile(code, "<a cell>", "exec"), found)
    with raises_on_ranks({1: "ValueError"}, {0: ""}) as raised:
        main("in_torchddp(2, fn, 1)")
    assert "raise ValueError('only here')" in ANSI.sub("", raised.value.by_rank[1].traceback)
    assert main("told = in_torchddp(2, fn, 2)")["told"] == (2, "kept")


def test_a_call_without_a_group_prepares_the_app(
    main: Main, cells: ddip.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "here = []\ndef prepare(): here.append('prepared')\ndef release(): here.clear()\n"
    monkeypatch.setattr(torchddp, "FASTAI", "toy")
    (tmp_path / "toy.py").write_text("import toy_app\ndef state(): return list(toy_app.here)\n")
    with installed_app(tmp_path, code):
        cells.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
        assert main("told = in_torchddp(2, lambda: state(), imports='from toy import *')")["told"] == ["prepared"]
        cells.run("import toy; after = toy.state(); sys.path.pop(0); del sys.modules['toy'], sys.modules['toy_app']")
        assert cells.pull(["after"], 1) == {"after": []}


def test_a_rank_starts_no_group(cells: ddip.Group) -> None:
    with raises_on_ranks({0: "BadInput"}):
        cells.run("from ddip import in_torchddp\nin_torchddp(2, len)", [0])


def test_a_call_without_a_group_starts_one(capsys: pytest.CaptureFixture[str]) -> None:
    before = {p.pid for p in processes_of(os.getpid())}
    main = bare_main()
    main("def fn(fails):\n    if fails: 1 / 0\n    print('hello'); return rank, world_size")
    assert main("told = in_torchddp(1, fn, False)")["told"] == (0, 1)
    assert capsys.readouterr().out.startswith("ddip: 1 rank on the CPU, gloo, ")
    with pytest.raises(CellError, match="ZeroDivisionError"):
        main("in_torchddp(1, fn, True)")
    wait_until(lambda: {p.pid for p in processes_of(os.getpid())} <= before, what="the end of the groups")


@pytest.mark.grid(in_ci=True)
def test_a_group_of_fitting_size_is_used_and_kept(notebook: Notebook) -> None:
    notebook.ok("%%dip\nkept = rank")
    notebook.ok("import ddip\nfrom ddip import in_torchddp")
    notebook.ok("""
        def sizes():
            print('hello')
            return world_size, kept
    """)
    same = notebook.ok("print(in_torchddp(3, sizes), in_torchddp(None, sizes), ddip.current_group().world_size)")
    assert same.stdout == "hello\nhello\n(3, 0) (3, 0) 3\n"
    other = notebook.ok("kept = 'mine'\nprint(in_torchddp(2, sizes))")
    assert other.stdout.endswith("hello\n(2, 'mine')\n") and "2 ranks on the CPU" in other.text
    assert len(controllers_of(notebook.pid)) == 1
    assert notebook.ok("%dipull -r all kept\nkept").text.endswith("[0, 1, 2]")


def test_an_error_names_the_notebooks_cell_and_line(notebook: Notebook) -> None:
    code = "from ddip import in_torchddp\ndef fn():\n    if rank == 2:\n        raise ValueError('why')"
    defined = notebook.ok(code).number
    shown = notebook.run("in_torchddp(3, fn)")
    assert shown.message == "rank 2: ValueError: why"
    assert f"Cell In[{defined}], line 4, in fn()" in shown.traceback or IPython.version_info < (8,)
    assert "raise ValueError('why')" in shown.traceback and "call_runner.py" not in shown.traceback


@pytest.mark.grid
def test_the_stop_button_ends_the_call_and_its_group(bare_notebook: Notebook) -> None:
    bare_notebook.ok("""
        from ddip import in_torchddp
        import time
        def fn():
            print('begun', flush=True)
            time.sleep(60)
    """)
    cell = bare_notebook.begin("in_torchddp(2, fn)")
    bare_notebook.finish(cell, until="begun")
    bare_notebook.interrupt()
    shown = bare_notebook.finish(cell)
    assert shown.error == "CellInterrupted"
    assert not controllers_of(bare_notebook.pid)


FASTAI = """
    from fastai.collab import *
    from fastai.tabular.all import *
    items = [f'm{i % 15}' for i in range(200)]
    users, stars = [i * 7 % 20 for i in range(200)], [i % 5 + 1 for i in range(200)]
    ratings = pd.DataFrame({'user': users, 'title': items, 'rating': stars})
    class DotProduct(Module):
        def __init__(self, n_users, n_movies, n_factors):
            self.user_factors = Embedding(n_users, n_factors)
            self.movie_factors = Embedding(n_movies, n_factors)
        def forward(self, x):
            return (self.user_factors(x[:, 0]) * self.movie_factors(x[:, 1])).sum(dim=1)
    def train(epochs, *args, dp=DotProduct, **kwargs):
        dls = CollabDataLoaders.from_df(ratings, item_name='title', bs=16)
        learn = Learner(dls, dp(len(dls.classes['user']), len(dls.classes['title']), 5), loss_func=MSELossFlat())
        with learn.distrib_ctx():
            learn.fit_one_cycle(epochs, *args, **kwargs)
        return learn
    imports = '''
        from fastai.collab import *
        from fastai.tabular.all import *
        from fastai.distributed import *
    '''
"""


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore")
def test_a_lesson_of_fastai_trains_and_its_learner_comes_back() -> None:
    pytest.importorskip("fastai")
    main = bare_main()
    found = main(FASTAI)
    found = main("learn = in_torchddp(2, train, 1, 5e-3, wd=0.1, dp=DotProduct, imports=imports, need='ratings')")
    assert type(found["learn"]) is found["Learner"] and type(found["learn"].model) is found["DotProduct"]
    assert found["learn"].validate()[0] < 20
