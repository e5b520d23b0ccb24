"""fastai on ranks gives the results of a single process, the same on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ddip
from ddip.group.members.placement import Request

from .fastai_source import DATA

pytest.importorskip("fastai")
pytest.importorskip("accelerate")

SIZES = [pytest.param(4, marks=pytest.mark.grid), 3, pytest.param(2, marks=pytest.mark.grid)]
"""With three ranks, no division is even."""


@pytest.fixture(scope="module")
def group_with_app(warmed_up: None) -> Iterator[ddip.Group]:
    with ddip.Group(3, app="fastai", timeout=120) as group:
        yield group


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, group_with_app: ddip.Group) -> ddip.Group:
    """Return a group of each size in which the data is defined."""
    group_with_app.change(Request(n=request.param))
    group_with_app.run(DATA)
    return group_with_app


two_ranks = pytest.mark.parametrize("ranks", [2], indirect=True)
"""For tests in which the size makes no difference."""


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    """Define the same names in this process: plain fastai."""
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's own warnings
        exec(DATA, names)
    return names


def on_all_ranks(group: ddip.Group, expression: str) -> list[Any]:
    """Return the value of `expression` on each rank."""
    group.run(f"_value = {expression}")
    return [group.pull(["_value"], rank)["_value"] for rank in range(group.world_size)]


def same_on_all_ranks(group: ddip.Group, expression: str) -> Any:
    """Return the value of `expression`, which must be the same on every rank."""
    first, *others = on_all_ranks(group, expression)
    for other in others:
        assert _are_equal(first, other), (expression, first, other)
    return first


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)


def run_in_one_process(one_process: dict[str, Any], group: ddip.Group, code: str, **names: Any) -> dict[str, Any]:
    """Run `code` in this process, with a `learn` that has the ranks' model, and with `names`."""
    namespace = {**one_process, **names}
    exec("learn = learner()", namespace)
    namespace["learn"].model.load_state_dict(group.pull(["state"])["state"])
    exec(f"with learn.no_bar(), learn.no_logging():\n    {code}", namespace)
    return namespace


def assert_same_weights(group: ddip.Group, namespace: dict[str, Any]) -> None:
    """Fail unless each rank's learner has the weights of the one in this process."""
    for theirs, ours in zip(
        same_on_all_ranks(group, "weights(learn)"), namespace["weights"](namespace["learn"]), strict=True
    ):
        assert torch.allclose(theirs, ours, atol=1e-4), (theirs - ours).abs().max()


STATE = "state = {name: value.clone() for name, value in learn.model.state_dict().items()}"


# -- training


@pytest.mark.grid(in_ci=True)
def test_ranks_begin_and_end_with_the_same_model(ranks: ddip.Group) -> None:
    ranks.run("learn = learner(norm=True)")
    same_on_all_ranks(ranks, "weights(learn)")
    for fit in ("fit(1)", "fit_one_cycle(1, 1e-2)", "fit_flat_cos(1)", "fine_tune(1)"):
        splitter = "splitter=lambda m: [list(m[0].parameters()), list(m[1:].parameters())]"
        ranks.run(f"learn = learner(norm=True, {splitter})\nbefore = weights(learn)\nlearn.{fit}")
        same_on_all_ranks(ranks, "weights(learn)")
        assert not _are_equal(*same_on_all_ranks(ranks, "[before, weights(learn)]"))
        assert same_on_all_ranks(ranks, "type(learn.model).__name__") == "Sequential"


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "opt",
    [
        "Adam",
        pytest.param("SGD", marks=pytest.mark.grid),
        pytest.param("partial(OptimWrapper, opt=torch.optim.AdamW)", marks=pytest.mark.grid),
    ],
)
@pytest.mark.parametrize(
    "drop_last",
    [pytest.param(True, id="drop_last"), pytest.param(False, id="all items", marks=pytest.mark.grid)],
)
def test_seeded_epochs_equal_one_process_with_the_larger_batch(
    ranks: ddip.Group, one_process: dict[str, Any], opt: str, drop_last: bool
) -> None:
    seeded = (
        f"set_seed(3)\nlearn = learner(loaders(109, bs={{bs}}, shuffle=True, drop_last={drop_last}), opt_func={opt})"
    )
    fit = "with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, 0.05)"
    ranks.run(f"{seeded.format(bs=8)}\n{fit}")
    namespace = dict(one_process)
    exec(f"{seeded.format(bs=8 * ranks.world_size)}\n{fit}", namespace)
    assert_same_weights(ranks, namespace)
    states = "getattr(learn.opt, 'opt', learn.opt).state.values()"
    state = f"[value for known in {states} for value in known.values() if isinstance(value, Tensor)]"
    ours = eval(state, namespace)
    assert ours or opt == "SGD"
    for mine, theirs in zip(ours, same_on_all_ranks(ranks, state), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
    for values in ("[float(loss) for loss in learn.recorder.losses]", "sum(map(list, learn.recorder.values), [])"):
        assert same_on_all_ranks(ranks, values) == pytest.approx(eval(values, namespace), abs=1e-4)


@pytest.mark.grid(in_ci=True)
def test_losses_of_steps_equal_the_larger_batch(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    ranks.run(f"learn = learner(opt_func=SGD)\n{STATE}\nlearn.fit(1, 0.05)")
    namespace = run_in_one_process(
        one_process,
        ranks,
        "learn.dls = loaders(bs=8 * size); learn.opt_func = SGD; learn.fit(1, 0.05)",
        size=ranks.world_size,
    )
    theirs = [float(loss) for loss in namespace["learn"].recorder.losses]
    assert same_on_all_ranks(ranks, "[float(loss) for loss in learn.recorder.losses]") == pytest.approx(
        theirs, abs=1e-5
    )


@pytest.mark.grid(in_ci=True)
def test_each_item_is_seen_once_and_in_one_shuffled_order(ranks: ddip.Group) -> None:
    ranks.run("learn = learner(loaders(n=96, shuffle=True))")
    orders = []
    for _ in range(2):
        ranks.run("learn.dls.train.dataset.asked.clear()\nlearn.fit(1)")
        asked = on_all_ranks(ranks, "learn.dls.train.dataset.asked")
        steps = len(asked[0]) // 8
        whole = [item for step in range(steps) for one in asked for item in one[step * 8 : step * 8 + 8]]
        assert sorted(whole) == list(range(96))
        orders.append(whole)
    assert orders[0] != sorted(orders[0]) and orders[0] != orders[1]


@pytest.mark.grid
def test_gradients_are_accumulated_in_step(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    cbs = "cbs=GradientAccumulation({n})"
    ranks.run(f"learn = learner(opt_func=SGD)\n{STATE}\nlearn.fit(2, 0.05, {cbs.format(n=24)})")
    code = f"learn.dls = loaders(bs=8 * size); learn.opt_func = SGD; learn.fit(2, 0.05, {cbs.format(n='24 * size')})"
    namespace = run_in_one_process(one_process, ranks, code, size=ranks.world_size)
    assert_same_weights(ranks, namespace)


@pytest.mark.grid
def test_a_summed_loss_is_summed_over_all_ranks(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    loss = "loss_func = CrossEntropyLossFlat(reduction='sum')"
    ranks.run(f"learn = learner(opt_func=SGD)\nlearn.{loss}\n{STATE}\nlearn.fit(1, 0.01)")
    code = f"learn.dls = loaders(bs=8 * size); learn.opt_func = SGD; learn.{loss}; learn.fit(1, 0.01)"
    namespace = run_in_one_process(one_process, ranks, code, size=ranks.world_size)
    assert_same_weights(ranks, namespace)
    losses = [
        [float(loss) for loss in one]
        for one in (same_on_all_ranks(ranks, "learn.recorder.losses"), namespace["learn"].recorder.losses)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.grid(in_ci=True)
def test_torch_loaders_train_as_in_one_process(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    code = """
def by_torch(bs):
    from torch.utils.data import DataLoader as TorchLoader
    dls = DataLoaders(TorchLoader(Items(45, 1), batch_size=bs), TorchLoader(Items(11, 2), batch_size=4))
    return learner(dls, metrics=accuracy, opt_func=SGD)
"""
    ranks.run(f"{code}\nlearn = by_torch(4)\n{STATE}\nlearn.fit(2, 0.05, cbs=GradientAccumulation(8))")
    namespace = {**one_process, "size": ranks.world_size}
    exec(f"{code}\nlearn = by_torch(4 * size)", namespace)
    namespace["learn"].model.load_state_dict(ranks.pull(["state"])["state"])
    exec("with learn.no_bar(), learn.no_logging(): learn.fit(2, 0.05, cbs=GradientAccumulation(8 * size))", namespace)
    assert_same_weights(ranks, namespace)


@pytest.mark.grid(in_ci=True)
def test_a_stateful_model_validates_as_in_one_process(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    code = """
class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.past = nn.Linear(6, 3), 0
    def reset(self): self.past = 0
    def forward(self, x):
        out = self.net(x) + 0.5 * self.past
        self.past = out.detach().mean()
        return out
from fastai.callback.rnn import ModelResetter
learn = Learner(loaders(), Remembers(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=ModelResetter())
"""
    ranks.run(f"{code}\nlearn.fit(1)\n{STATE}\ntold = list(learn.validate())")
    namespace = dict(one_process)
    exec(code, namespace)
    namespace["learn"].model.load_state_dict(ranks.pull(["state"])["state"])
    exec("with learn.no_bar(), learn.no_logging(): told = list(learn.validate())", namespace)
    assert same_on_all_ranks(ranks, "told") == pytest.approx(namespace["told"], abs=1e-5)


@pytest.mark.grid
@two_ranks
def test_a_penalty_is_part_of_the_loss(ranks: ddip.Group) -> None:
    ranks.run("""
        def penalty(self):
            self.learn.loss_grad = self.learn.loss_grad + 10
            self.learn.loss = self.learn.loss_grad.clone()
        learn = learner(metrics=accuracy)
        learn.fit(1, cbs=Callback(after_loss=penalty))
    """)
    assert min(same_on_all_ranks(ranks, "[float(loss) for loss in learn.recorder.losses]")) > 10


@pytest.mark.grid(in_ci=True)
@two_ranks
def test_a_callback_may_validate_in_the_middle_of_a_fit(ranks: ddip.Group) -> None:
    ranks.run("""
        learn, told = learner(metrics=accuracy), []
        middle = Callback(after_train=lambda self: told.append(self.learn.get_preds(inner=True)[0].sum().item()))
        other = learner(metrics=accuracy)
        end = Callback(after_epoch=lambda self: told.append(list(other.validate())))
        fetch = FetchPredsCallback()
        learn.fit(2, cbs=[middle, end])
        numbers = torch.rand(3).tolist()
        learn.fit(1, cbs=fetch)
        fetched = fetch.preds[1].tolist()
    """)
    assert len(same_on_all_ranks(ranks, "told")) == 4
    assert same_on_all_ranks(ranks, "fetched == Items(37, 2).y.tolist()") is True
    same_on_all_ranks(ranks, "numbers")
    same_on_all_ranks(ranks, "weights(learn)")


@pytest.mark.grid(in_ci=True)
@two_ranks
def test_a_model_with_parameters_that_nothing_uses_trains(ranks: ddip.Group) -> None:
    ranks.run("""
        class Spare(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)
            def forward(self, x):
                return self.used(x)
        learn = Learner(loaders(), Spare(), loss_func=CrossEntropyLossFlat())
        spare = learn.model.spare.weight.detach().clone()
        learn.fit(2)
    """)
    assert same_on_all_ranks(ranks, "torch.equal(spare, learn.model.spare.weight)")
    same_on_all_ranks(ranks, "weights(learn)")


@pytest.mark.grid(in_ci=True)
@two_ranks
def test_ranks_draw_equal_random_numbers_except_during_training(ranks: ddip.Group) -> None:
    ranks.run("""
        noise = []
        learn = learner()
        learn.add_cb(Callback(after_pred=lambda self: noise.append(torch.rand(()))))
    """)
    ranks.run("learn.fit(1)")
    mine, theirs = on_all_ranks(ranks, "[float(n) for n in noise]")
    assert mine != theirs
    draw = "(float(torch.rand(())), random.random(), float(np.random.rand()), list(RandomSplitter()(range(20))[1]))"
    first = same_on_all_ranks(ranks, draw)
    assert same_on_all_ranks(ranks, draw) != first
    ranks.run("random.random(), torch.rand(3), np.random.rand(3)", ranks=[1])
    same_on_all_ranks(ranks, draw)
    with pytest.raises(ddip.CellError):
        ranks.run("torch.rand(3 + rank)\n1 / 0")
    same_on_all_ranks(ranks, draw)


@pytest.mark.grid(in_ci=True)
@two_ranks
def test_a_seed_makes_training_reproducible(ranks: ddip.Group) -> None:
    runs = []
    for _ in range(2):
        ranks.run("""
            set_seed(7)
            learn = learner(loaders(shuffle=True))
            learn.fit(1)
        """)
        runs.append(same_on_all_ranks(ranks, "weights(learn)"))
    assert _are_equal(*runs)


TEXTS = """
from fastai.text.all import *
def language_learner(bs=2):
    texts = [(torch.tensor(np.random.RandomState(i).randint(0, 20, 30 + i)),) for i in range(20)]
    loaders = LMDataLoader(texts[:14], bs=bs, seq_len=10, shuffle=True), LMDataLoader(texts[14:], bs=bs, seq_len=10)
    config = dict(awd_lstm_lm_config, n_hid=8, emb_sz=6, n_layers=2)
    net = get_language_model(AWD_LSTM, 20, config=config)
    dls = DataLoaders(*loaders, device=torch.device("cpu"))
    return LMLearner(dls, net, loss_func=CrossEntropyLossFlat(), metrics=[accuracy, Perplexity()])
"""


@pytest.mark.grid
def test_a_language_model_reads_consecutive_text(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    ranks.run(TEXTS)
    ranks.run("""
        read = []
        learn = language_learner()
        learn.fit_one_cycle(1, 1e-2, cbs=Callback(after_pred=lambda self: read.append(self.x) if self.training else 0))
        told = list(learn.validate())
        state = {name: value.clone() for name, value in learn.model.state_dict().items()}
    """)
    same_on_all_ranks(ranks, "weights(learn)")
    steps = [[step.tolist() for step in one] for one in on_all_ranks(ranks, "read")]
    assert len({len(one) for one in steps}) == 1
    # In the order of a shuffle that all ranks share
    texts = same_on_all_ranks(ranks, "learn.dls.train.chunks[:].tolist()")
    rows = [sum((step[row] for step in one), []) for one in steps for row in range(2)]
    row = " ".join(map(str, texts))
    assert sum(" ".join(map(str, row_[:40])) in row for row_ in rows) == len(rows)
    namespace = dict(one_process)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(TEXTS, namespace)
    namespace["learn"] = namespace["language_learner"]()
    namespace["learn"].model.load_state_dict(ranks.pull(["state"])["state"])
    exec("with learn.no_bar(), learn.no_logging(): told = list(learn.validate())", namespace)
    assert same_on_all_ranks(ranks, "told") == pytest.approx(namespace["told"], abs=1e-5)


# -- evaluation


@pytest.mark.grid(in_ci=True)
def test_validate_gives_the_result_of_one_process(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    ranks.run(f"learn = learner()\n{STATE}\ntold = list(learn.validate()), list(learn.validate(ds_idx=0))")
    namespace = run_in_one_process(one_process, ranks, "told = list(learn.validate()), list(learn.validate(ds_idx=0))")
    for mine, theirs in zip(same_on_all_ranks(ranks, "told"), namespace["told"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.grid(in_ci=True)
def test_get_preds_gives_ordered_predictions_of_one_process(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    calls = [
        "learn.get_preds()",
        "learn.get_preds(ds_idx=0)",
        "learn.get_preds(with_input=True, with_loss=True, with_decoded=True)",
        "learn.get_preds(dl=learn.dls.train.new(shuffle=True))",
        "learn.get_preds(dl=DataLoader(Items(3, 5), bs=2))",
        "learn.get_preds(with_preds=False, with_targs=False, with_loss=True)",
    ]
    ranks.run(f"learn = learner()\n{STATE}\ntold = [{', '.join(calls)}]")
    namespace = run_in_one_process(one_process, ranks, f"told = [{', '.join(calls)}]")
    for mine, theirs in zip(same_on_all_ranks(ranks, "told"), namespace["told"], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is other is None or torch.allclose(one, other, atol=1e-5)


@pytest.mark.grid(in_ci=True)
def test_metrics_of_the_training_set_count_each_item_once(ranks: ddip.Group, one_process: dict[str, Any]) -> None:
    record = "[cb for cb in learn.cbs if isinstance(cb, Recorder)][0].train_metrics = True"
    ranks.run(f"learn = learner(lr=0.)\n{record}\n{STATE}\nlearn.fit(1, 0.)")
    namespace = run_in_one_process(one_process, ranks, f"{record}; learn.fit(1, 0.)")
    mine, theirs = (
        same_on_all_ranks(ranks, "list(learn.recorder.values[0])"),
        list(namespace["learn"].recorder.values[0]),
    )
    assert mine[1:] == pytest.approx(theirs[1:], abs=1e-5)


@pytest.mark.grid(in_ci=True)
@two_ranks
def test_ranks_with_their_own_data_or_models_evaluate_independently(ranks: ddip.Group) -> None:
    ranks.run("""
        learn = learner()
        own = DataLoader(Items(9 + rank, 5 + rank), bs=2)
        told = len(learn.get_preds(dl=own)[0])
    """)
    assert on_all_ranks(ranks, "told") == [9, 10]
    ranks.run("with torch.no_grad(): learn.model[0].bias += rank\ntold = list(learn.validate())[0]")
    mine, theirs = on_all_ranks(ranks, "told")
    assert abs(mine - theirs) > 1e-3


@pytest.mark.grid(in_ci=True)
@two_ranks
def test_one_rank_may_predict_alone(ranks: ddip.Group) -> None:
    ranks.run("""
        from fastai.tabular.all import *
        df = pd.DataFrame({"a": np.arange(40.) % 7, "b": np.arange(40) % 2})
        kinds = dict(cont_names=["a"], y_names="b", y_block=CategoryBlock)
        tab = TabularDataLoaders.from_df(df, procs=[Normalize], bs=8, **kinds)
        learn = tabular_learner(tab, layers=[4])
        learn.fit(1)
        if rank == 1:
            told = learn.predict(df.iloc[0])[2].tolist()
            learn.show_results()
    """)
    ranks.run("told = learn.predict(df.iloc[0])[2].tolist()", ranks=[0])
    same_on_all_ranks(ranks, "told")


# -- decisions


@pytest.mark.grid(in_ci=True)
def test_lr_find_ends_and_changes_nothing(ranks: ddip.Group) -> None:
    ranks.run("""
        import matplotlib; matplotlib.use("agg")
        learn = learner(norm=True); learn.fit(1)
        state = lambda: (weights(learn), [[v.clone() if isinstance(v, Tensor) else v for v in s.values()]
                         for s in learn.opt.state_dict()["state"]], [dict(h) for h in learn.opt.hypers])
        before = state(); found = learn.lr_find(num_it=40); after = state()
    """)
    assert 1e-7 < same_on_all_ranks(ranks, "found.valley") < 10
    assert same_on_all_ranks(ranks, "len(learn.recorder.lrs)") >= 6
    before, after = same_on_all_ranks(ranks, "[before, after]")
    assert _are_equal(before, after)


@pytest.mark.grid(in_ci=True)
def test_callbacks_decide_equally_on_all_ranks(ranks: ddip.Group, tmp_path: Path) -> None:
    ranks.run(f"""
        learn = learner(path={str(tmp_path)!r}, lr=0.5)
        learn.fit(6, cbs=[SaveModelCallback(), EarlyStoppingCallback(monitor="accuracy", patience=2),
                          ReduceLROnPlateau(patience=1), CSVLogger(), TerminateOnNaNCallback()])
    """)
    epochs = same_on_all_ranks(ranks, "len(learn.recorder.values)")
    same_on_all_ranks(ranks, "weights(learn)")
    assert len((tmp_path / "history.csv").read_text().splitlines()) == epochs + 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["model.pth"]
    ranks.run("""
        learn = learner()
        bad = Callback(after_pred=lambda self: setattr(self.learn, "pred", self.pred * (float("nan") if rank else 1)))
        learn.fit(2, cbs=[bad, TerminateOnNaNCallback()])
    """)
    assert same_on_all_ranks(ranks, "learn.train_iter") == 1


@pytest.mark.grid(in_ci=True)
@two_ranks
def test_mixed_precision_and_mixup_train(ranks: ddip.Group) -> None:
    ranks.run("learn = learner(metrics=accuracy, cbs=MixUp()).to_fp16()\nkinds = set()")
    ranks.run("learn.add_cb(Callback(after_pred=lambda self: kinds.add(torch.is_autocast_enabled('cpu'))))")
    ranks.run("learn.fit(1)")
    assert same_on_all_ranks(ranks, "sorted(kinds)")[-1] is True
    assert same_on_all_ranks(ranks, "torch.is_autocast_enabled('cpu')") is False
    same_on_all_ranks(ranks, "weights(learn)")
