"""Every loss counts as in a single process: any kind of sum or mean, and batches that a callback shortens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ddip

from .fastai_source import DATA
from .test_fastai import STATE, assert_same_weights, on_all_ranks, one_process, run_in_one_process, same_on_all_ranks  # noqa: F401
from .variants import few

pytest.importorskip("fastai")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def with_app(warmed_up: None) -> Iterator[ddip.Group]:
    with ddip.Group(2, app="fastai", timeout=120) as group:
        yield group


@pytest.fixture
def group(with_app: ddip.Group) -> ddip.Group:
    """Return two ranks in which the data is defined."""
    with_app.run(DATA)
    return with_app


FUNCTIONS = {
    "a function that adds": "def loss(pred, y): return F.cross_entropy(pred, y, reduction='sum')",
    "a lambda over a sum": "_sum = nn.CrossEntropyLoss(reduction='sum'); loss = lambda pred, y: _sum(pred, y)",
    "a sum by partial": "loss = partial(F.cross_entropy, reduction='sum')",
    "a sum with no gradient at first": """
def loss(pred, y):
    loss.calls = getattr(loss, "calls", 0) + 1
    return F.cross_entropy(pred, y, reduction="sum") * (loss.calls > 2)
""",
    "a module that adds": """
class Adds(nn.Module):
    def forward(self, pred, y): return -pred.log_softmax(1)[range(len(y)), y].sum()
loss = Adds()
""",
    "a sum by half": "def loss(pred, y): return _added(pred.bfloat16().log_softmax(1).float(), y)\n"
    "_added = partial(F.nll_loss, reduction='sum')",
    "a function that takes the mean": "def loss(pred, y): return F.cross_entropy(pred, y)",
    "a mean and a penalty": "def loss(pred, y): return F.cross_entropy(pred, y) + 3 + sum(p.pow(2).sum() for p in net)",
}
RUN = "learn.fit(2, 0.01)"
SOME = ("a sum with no gradient at first", "a mean and a penalty")


@pytest.mark.grid
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=[] if name in SOME else pytest.mark.grid)
        for name, source in FUNCTIONS.items()
    ],
)
def test_a_loss_with_unknown_reduction_counts_as_in_one_process(
    group: ddip.Group,
    one_process: dict[str, Any],  # noqa: F811
    source: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    group.run(
        f"{source}\nlearn = learner(opt_func=SGD, loss_func=loss)\nnet = list(learn.model.parameters())\n{STATE}\n{RUN}"
    )
    assert "cannot be told" not in capsys.readouterr().out
    here = {**one_process, "size": 2}
    exec(source, here)
    code = "learn.dls = loaders(bs=8 * size); learn.opt_func = SGD; learn.loss_func = loss; "
    # A function's globals are those of the namespace that defined it.
    here["net"] = net = []
    exec("def learner(_make=learner):\n    made = _make(); net.extend(made.model.parameters()); return made", here)
    done = run_in_one_process(here, group, code + RUN)
    here["learn"] = done["learn"]
    assert len(net) > 0
    assert_same_weights(group, done)
    theirs, ours = (
        same_on_all_ranks(group, "[float(loss) for loss in learn.recorder.losses]"),
        done["learn"].recorder.losses,
    )
    assert theirs == pytest.approx([float(loss) for loss in ours], rel=1e-4, abs=1e-4)


STATEFUL = """
class Meter:
    def __init__(self): self.n = 0
    def add(self): self.n += 1
meter, calls, running, number = Meter(), [], torch.zeros(3), 0
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.seen, self.scale = nn.BatchNorm1d(3), 0, nn.Parameter(torch.ones(1))
    def forward(self, pred, y):
        global number
        number += 1; self.seen += 1; meter.add(); calls.append(len(y)); running.add_(pred.detach().mean(0))
        torch.rand(1); random.random(); np.random.rand()
        return F.cross_entropy(self.norm(pred) * self.scale, y)
first = {}
def note(self):
    if self.training and not first:
        first.update(draw=(torch.rand(1).item(), random.random(), np.random.rand()), calls=list(calls), n=meter.n,
                     seen=self.learn.loss_func.seen, running=running.clone(), number=number,
                     counted=int(self.learn.loss_func.norm.num_batches_tracked),
                     mean=self.learn.loss_func.norm.running_mean.clone(), grad=self.learn.loss_func.scale.grad)
def once(stated):
    global number
    calls.clear(); running.zero_(); first.clear(); meter.n = number = 0
    torch.manual_seed(3)
    learn = learner(loss_func=Noisy())
    if stated: learn.loss_func.reduction = "mean"
    set_seed(5)
    learn.fit(1, 0.05, cbs=Callback(after_loss=note))
    return dict(first), weights(learn)
"""


@pytest.mark.grid
def test_the_trial_of_a_loss_leaves_nothing_behind(group: ddip.Group) -> None:
    group.run(f"""{STATEFUL}
import warnings
torch.set_warn_always(True)
with warnings.catch_warnings(record=True) as caught:
    (tried, learned), (stated, same) = once(False), once(True)
torch.set_warn_always(False)
""")
    assert same_on_all_ranks(group, "[str(found.message) for found in caught if 'ddip' in found.filename]") == []
    for tried, stated in on_all_ranks(group, "[tried, stated]"):
        assert tried["calls"] == stated["calls"] == [8]
        assert tried.keys() == stated.keys()
        for name, value in stated.items():
            assert torch.equal(*map(torch.as_tensor, (tried[name], value))) if value is not None else True, name
        assert tried["grad"] is None
    learned, same = same_on_all_ranks(group, "[learned, same]")
    assert all(map(torch.equal, learned, same))


@pytest.mark.grid
def test_a_loss_with_unknown_reduction_is_named_once(group: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    group.run("""
        def contrast(pred, y): return F.cross_entropy(pred @ pred.T, torch.arange(len(pred)))
        learn = learner(loss_func=contrast, metrics=accuracy)
        learn.fit(2)
    """)
    shown = capsys.readouterr().out
    assert shown.count("fit: ddip cannot determine whether contrast is a mean or a sum") == 1
    group.run("contrast.reduction = 'mean'\nlearn.fit(1)")
    assert "cannot be told" not in capsys.readouterr().out
    with pytest.raises(ddip.CellError, match="no more"):
        group.run("def fails(pred, y): raise ValueError('no more')\nlearner(loss_func=fails).fit(1)")
    assert "cannot be told" not in capsys.readouterr().out


@pytest.mark.grid
def test_mixup_of_a_sum_stays_a_sum(group: ddip.Group, one_process: dict[str, Any]) -> None:  # noqa: F811
    same = "cbs=MixUp(); cbs.distrib = type('One', (), {'sample': lambda self, size: torch.ones(size)})()"
    loss = "CrossEntropyLossFlat(reduction='sum')"
    group.run(f"{same}\nlearn = learner(opt_func=SGD, loss_func={loss})\n{STATE}\nlearn.fit(1, 0.01, cbs=cbs)")
    code = f"learn.dls = loaders(bs=16); learn.opt_func = SGD; learn.loss_func = {loss}; {same}; "
    assert_same_weights(group, run_in_one_process(one_process, group, code + "learn.fit(1, 0.01, cbs=cbs)"))


DROPS = """
class Drops(Callback):
    run_valid = False
    def before_batch(self):
        keep = self.y != 2 if self.train_iter > 2 else self.x[:, 0] < 9
        self.learn.xb, self.learn.yb = (self.x[keep],), (self.y[keep],)
def after_pred(self):
    if self.training: self.learn.pred, self.learn.yb = self.pred[self.y > 0], (self.y[self.y > 0],)
class WholeBatch(Callback):
    def before_batch(self):
        if self.training and int(self.dls.train.dataset.asked[-1]) // 8 % 2:
            self.learn.xb, self.learn.yb = (self.x[:0],), (self.y[:0],)
"""
CALLBACKS = {
    "before_batch": "Drops()",
    "after_pred": "Callback(after_pred=after_pred)",
    "accumulated": "[Drops(), GradientAccumulation({n})]",
}


@pytest.mark.grid
@pytest.mark.parametrize("kind", few(CALLBACKS, "accumulated"))
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("CrossEntropyLossFlat()", id="mean"),
        pytest.param("partial(F.cross_entropy, reduction='sum')", id="sum", marks=pytest.mark.grid),
    ],
)
def test_a_batch_shortened_by_a_callback_counts_remaining_items(
    group: ddip.Group,
    one_process: dict[str, Any],  # noqa: F811
    kind: str,
    loss: str,
) -> None:
    """Drop items in a callback, and compare with a single process.

    `GradientAccumulation` steps at other batches than there if the remaining items cross its bound elsewhere.
    """
    cbs = CALLBACKS[kind]
    group.run(f"{DROPS}\nlearn = learner(opt_func=SGD, loss_func={loss})\n{STATE}")
    group.run(f"learn.fit(2, 0.01, cbs={cbs.format(n=12)})")
    here = dict(one_process)
    exec(DROPS, here)
    code = f"learn.dls = loaders(bs=16); learn.opt_func = SGD; learn.loss_func = {loss}; "
    done = run_in_one_process(here, group, code + f"learn.fit(2, 0.01, cbs={cbs.format(n=24)})")
    assert_same_weights(group, done)
    theirs, ours = (
        same_on_all_ranks(group, "[float(loss) for loss in learn.recorder.losses]"),
        done["learn"].recorder.losses,
    )
    assert theirs == pytest.approx([float(loss) for loss in ours], rel=1e-4, abs=1e-4)


@pytest.mark.grid
def test_a_rank_whose_items_are_all_dropped_counts_nothing(group: ddip.Group, one_process: dict[str, Any]) -> None:  # noqa: F811
    group.run(f"{DROPS}\nlearn = learner(loaders(n=96), opt_func=SGD)\n{STATE}\nlearn.fit(1, 0.05, cbs=WholeBatch())")
    here = dict(one_process)
    half = "lambda self: setattr(self.learn, 'xb', (self.x[:8],)) or setattr(self.learn, 'yb', (self.y[:8],))"
    code = (
        f"learn.dls = loaders(n=96, bs=16); learn.opt_func = SGD; learn.fit(1, 0.05, cbs=Callback(before_batch={half}))"
    )
    assert_same_weights(group, run_in_one_process(here, group, code))


@pytest.mark.grid
def test_activation_stats_belong_to_each_rank(group: ddip.Group) -> None:
    group.run("""
        stats = ActivationStats(with_hist=True)
        learn = learner(loaders(n=96))
        learn.fit(1, cbs=stats)
        means = [[float(mean) for mean in stats.layer_stats(i)[0]] for i in range(2)]
    """)
    mine, theirs = on_all_ranks(group, "means")
    assert [len(layer) for layer in mine] == [len(layer) for layer in theirs] == [6, 6]
    assert mine != theirs
