"""fastai on ranks is safe: learners survive any cell, files are fetched once, and fastai is restored.

The last part runs plain fastai and shows each fault that ddip fixes. If one of these tests fails, fastai has fixed the
fault, and ddip's fix can be removed.
"""

from __future__ import annotations

import functools
import http.server
import io
import os
import re
import tarfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddip
from ddip.errors import CellError, CellInterrupted, RequestFailed

from .fastai_source import DATA
from .meanwhile import meanwhile, press_stop
from .rank_errors import raises_on_ranks
from .test_fastai import on_all_ranks, same_on_all_ranks

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


CHECK = """
state = (type(learn.model).__name__, [type(cb).__name__ for cb in learn.cbs], type(learn.loss_func).__name__,
         learn.logger is print, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())
"""
BAD = """
class Bad(Callback):
    def __init__(self, where): self.where = where
    def after_pred(self):
        if self.training and self.learn.train_iter == 2 and rank in self.where: raise ValueError("no more")
"""


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("[0, 1]", id="all ranks"),
        pytest.param("[1]", id="rank 1", marks=pytest.mark.grid),
        pytest.param("[0]", id="rank 0", marks=pytest.mark.grid),
    ],
)
def test_an_error_in_fit_leaves_the_learner_usable_everywhere(group: ddip.Group, where: str, tmp_path: Path) -> None:
    group.run(f"{BAD}\nlearn = learner(path={str(tmp_path)!r}, metrics=accuracy, cbs=MixUp()).to_fp16()")
    group.run(f"{CHECK}\nbefore = state")
    with pytest.raises(CellError, match="(?s)ValueError: .*no more"):
        group.run(f"learn.fit(1, cbs=[Bad({where}), CSVLogger()])")
    group.run(CHECK)
    assert on_all_ranks(group, "state == before") == [True, True], on_all_ranks(group, "[state, before]")
    group.run("learn.fit(1)\nlearn.validate()")
    assert len(same_on_all_ranks(group, "weights(learn)")) > 0


@pytest.mark.grid(in_ci=True)
def test_the_stop_button_in_fit_leaves_the_learner_usable(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"""
        from pathlib import Path
        learn = learner(loaders(n=4000))
        begun = lambda self: (Path({str(tmp_path)!r}) / str(rank)).touch() if self.train_iter > 3 else None
        {CHECK.strip()}
        before = state
    """)
    thread = meanwhile(lambda: len(list(tmp_path.iterdir())) == 2, press_stop)
    with pytest.raises(CellInterrupted):
        group.run("learn.fit(1000, cbs=Callback(after_batch=begun))")
    thread.join()
    group.run(CHECK)
    assert on_all_ranks(group, "state == before") == [True, True], on_all_ranks(group, "[state, before]")
    group.run("learn.fit(1)")
    assert len(same_on_all_ranks(group, "weights(learn)")) > 0


FAULTY = """
class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls, self.fails_at = model(), 0, 0
    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails_at: raise ValueError("no more")
        return self.net(x)
"""


@pytest.mark.grid
def test_an_error_in_lr_find_puts_the_model_back(group: ddip.Group) -> None:
    group.run(f"{FAULTY}\nlearn = Learner(loaders(), Faulty(), loss_func=CrossEntropyLossFlat())\nlearn.fit(1)")
    group.run("before = weights(learn)\nlearn.model.fails_at = learn.model.calls + 5")
    with raises_on_ranks(dict.fromkeys((0, 1), "ValueError")):
        group.run("learn.lr_find(show_plot=False)")
    assert on_all_ranks(group, "all(torch.equal(*pair) for pair in zip(before, weights(learn)))") == [True, True]


@pytest.mark.grid
def test_an_error_in_validate_leaves_no_autocast(group: ddip.Group) -> None:
    group.run(f"{FAULTY}\nlearn = Learner(loaders(), Faulty(), loss_func=CrossEntropyLossFlat()).to_fp16()")
    group.run("learn.fit(1)\nlearn.model.fails_at = learn.model.calls + 2")
    with pytest.raises(CellError, match="no more"):
        group.run("learn.validate()")
    group.run("""
        told = [torch.is_autocast_enabled("cpu")]
        for _ in range(2):
            learn.fit(1, 0.1)
            told.append(learn.recorder.values[0][0])
    """)
    autocast, first, second = same_on_all_ranks(group, "told")
    assert not autocast and first != second


@pytest.mark.grid(in_ci=True)
def test_a_fit_that_is_cancelled_leaves_the_ranks_the_same(group: ddip.Group) -> None:
    group.run("""
        class Enough(Callback):
            order = 70
            def after_batch(self):
                if self.training and self.train_iter == 3: raise CancelFitException
        learn = learner(norm=True, metrics=accuracy)
        learn.fit(2, cbs=Enough())
    """)
    same_on_all_ranks(group, "weights(learn)")
    same_on_all_ranks(group, "list(learn.validate())")


@pytest.mark.grid(in_ci=True)
def test_trainable_parameters_may_change_during_a_fit(group: ddip.Group) -> None:
    group.run("""
        def switch(self):
            late = self.train_iter % 4 > 1
            self.model[0].requires_grad_(late); self.model[-1].requires_grad_(not late)
        learn = learner(loaders(shuffle=True), metrics=accuracy)
        learn.fit(2, 0.1, cbs=Callback(before_batch=switch))
    """)
    same_on_all_ranks(group, "weights(learn)")


@pytest.mark.grid
def test_different_data_are_refused_on_all_ranks(group: ddip.Group) -> None:
    for loaders, words in (
        ("loaders(n=100 + rank)", "items: 100 on rank 0, 101 on rank 1"),
        ("loaders(bs=8 + rank)", "batch size: 8 on rank 0, 9 on rank 1"),
    ):
        with pytest.raises(CellError, match=f"ranks 0, 1: ValueError: .*{words}"):
            group.run(f"learner({loaders}).fit(1)")
    with pytest.raises(CellError, match="items differ"):
        group.run("""
            dls = loaders()
            dls.train.dataset.items[0] = rank
            learner(dls).fit(1)
        """)
    with pytest.raises(CellError, match="ranks 0, 1: .*samplers"):
        group.run("""
            shuffled = torch.utils.data.DataLoader(
                loaders().train.dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(rank)
            )
            learner(DataLoaders(shuffled, loaders().valid)).fit(1)
        """)
    with pytest.raises(CellError, match="epochs: 1 .* 2 on rank 1"):
        group.run("learner().fit(1 + rank)")
    with pytest.raises(CellError, match="DataLoader has no length"):
        group.run("""
            class Endless(torch.utils.data.IterableDataset):
                def __iter__(self):
                    while True: yield torch.zeros(6), torch.tensor(1)
            learner(DataLoaders(DataLoader(Endless(), bs=4), loaders().valid)).fit(1)
        """)
    with pytest.raises(CellError, match="cannot be divided"):
        group.run("""
            Endless.__len__ = lambda self: 40
            learner(DataLoaders(torch.utils.data.DataLoader(Endless(), 4), loaders().valid)).fit(1)
        """)


@pytest.mark.grid(in_ci=True)
def test_after_one_rank_trains_alone_fit_makes_ranks_equal(group: ddip.Group) -> None:
    group.run("learn = learner()\nlearn.fit(1)")
    group.run("learn.fit(1)", ranks=[1])
    mine, theirs = on_all_ranks(group, "float(learn.model[0].weight.sum())")
    assert mine != theirs
    group.run("learn.fit(1)")
    same_on_all_ranks(group, "weights(learn)")
    same_on_all_ranks(group, "[float(s['grad_avg'].sum()) for s in learn.opt.state_dict()['state']]")


@pytest.mark.grid(in_ci=True)
def test_torch_loaders_and_loaders_with_workers_are_also_divided(group: ddip.Group) -> None:
    group.run("""
        from torch.utils.data import DataLoader as TorchLoader
        train = TorchLoader(Items(40, 1), batch_size=4, shuffle=True)
        dls = DataLoaders(train, TorchLoader(Items(10, 2), batch_size=4))
        learn = learner(dls, metrics=accuracy)
        learn.fit(1)
        asked = list(dls.train.dataset.asked)
        items = Items(101, 1)
        data = torch.utils.data.TensorDataset(items.x, items.y)  # workers find its class, even if they are not forked
        learn2 = learner(DataLoaders(DataLoader(data, bs=8, shuffle=True, num_workers=1), loaders().valid))
        learn2.fit(1)
    """)
    mine, theirs = on_all_ranks(group, "asked")
    assert sorted(mine + theirs) == list(range(40))
    same_on_all_ranks(group, "weights(learn) + weights(learn2)")


# -- distribution code in the user's cell


@pytest.mark.grid(in_ci=True)
def test_distrib_ctx_and_its_parts_are_harmless(group: ddip.Group) -> None:
    group.run("""
        from fastai.distributed import *
        learn = learner(norm=True)
        with learn.distrib_ctx(): learn.fit(1)
        with learn.distrib_ctx(sync_bn=False, cpu=True) as same: same.fit(1)
        assert same is learn and learn.to_distributed() is learn and learn.detach_distributed() is learn
        learn.fit(1)
        told = rank0_first(lambda: 5)
    """)
    assert same_on_all_ranks(group, "[told, type(learn.model).__name__]") == [5, "Sequential"]
    with raises_on_ranks({0: "OSError", 1: "RuntimeError"}) as caught:
        group.run("def fetch(): raise OSError('no disk')\nrank0_first(fetch)")
    assert re.search("rank 0 .*fetch: OSError: no disk", caught.value.by_rank[1].message)


@pytest.mark.grid(in_ci=True)
def test_code_for_accelerate_works_as_usual(group: ddip.Group) -> None:
    group.run("""
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        net = model(); opt = torch.optim.SGD(net.parameters(), 0.1)
        net, opt, dl = accelerator.prepare(net, opt, torch.utils.data.DataLoader(Items(40, 1), batch_size=4))
        for x, y in dl:
            accelerator.backward(nn.functional.cross_entropy(net(x), y)); opt.step(); opt.zero_grad()
        told = [p.detach().clone() for p in net.parameters()], accelerator.num_processes, accelerator.process_index
    """)
    same_on_all_ranks(group, "told[0]")
    assert [one[1:] for one in on_all_ranks(group, "told")] == [(2, 0), (2, 1)]


@pytest.mark.grid(in_ci=True)
def test_subword_tokenizers_are_trained_once_and_equal_on_ranks(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"""
        from fastai.text.core import SubwordTokenizer
        words = "the ranks of a group train one network together and keep their variables".split()
        texts = [" ".join(words[(i * j) % len(words)] for j in range(1, 12)) for i in range(1, 300)]
        told = []
        for vocab_sz in (40, 48):
            tokenizer = SubwordTokenizer(vocab_sz=vocab_sz, cache_dir={str(tmp_path / "pieces")!r} + str(vocab_sz))
            tokenizer.setup(texts)
            told.append([list(tokens) for tokens in tokenizer(texts[:9])])
    """)
    assert all(len(tokens) > 5 for told in same_on_all_ranks(group, "told") for tokens in told)


@pytest.mark.grid(in_ci=True)
def test_notebook_launcher_calls_the_function_on_each_rank(group: ddip.Group) -> None:
    group.run("""
        from accelerate import notebook_launcher
        told = []
        def train(lr): told.append((lr, rank, os.environ.get("ACCELERATE_MIXED_PRECISION")))
        import os
        notebook_launcher(train, (0.1,), num_processes=2)
        notebook_launcher(train, (0.2,), mixed_precision="bf16")
    """)
    assert on_all_ranks(group, "told") == [[(0.1, rank, "no"), (0.2, rank, "bf16")] for rank in (0, 1)]
    with pytest.raises(CellError, match="num_processes=8.* 2 ranks"):
        group.run("notebook_launcher(train, (0.1,), 8)")


# -- files


class Counting(http.server.SimpleHTTPRequestHandler):
    request_counts: Counter[str] = Counter()

    def do_GET(self) -> None:
        self.request_counts[self.path] += 1
        super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve the files in ``tmp_path/web``, and count the requests."""
    (tmp_path / "web").mkdir()
    Counting.request_counts.clear()
    handler = functools.partial(Counting, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.grid(in_ci=True)
def test_data_and_weights_are_fetched_once(group: ddip.Group, tmp_path: Path, address: str) -> None:
    with tarfile.open(tmp_path / "web" / "tiny.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("tiny/data.csv")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"a,b\n"))
    (tmp_path / "web" / "model.pth").write_bytes(b"weights")
    group.run(f"""
        import os; os.environ["FASTAI_HOME"] = {str(tmp_path / "home")!r}
        from fastai.data.external import *
        path = untar_data({address!r} + "/tiny.tgz")
        told = (path / "data.csv").read_text()
        file = {str(tmp_path / "model.pth")!r}
        if not os.path.exists(file): torch.hub.download_url_to_file({address!r} + "/model.pth", file, progress=False)
        told += Path(file).read_text()
    """)
    assert same_on_all_ranks(group, "told") == "a,b\nweights"
    assert dict(Counting.request_counts) == {"/tiny.tgz": 1, "/model.pth": 1}
    with pytest.raises(CellError, match="rank 0: .*404") as caught:
        group.run(f"untar_data({address!r} + '/none.tgz')")
    assert caught.value.by_rank[1].name == "RuntimeError"
    assert re.search("none.tgz: .*404", caught.value.by_rank[1].message)
    assert Counting.request_counts["/none.tgz"] == 1
    group.run(f"if rank == 0: untar_data({address!r} + '/tiny.tgz', data={str(tmp_path / 'other')!r})")


@pytest.mark.grid(in_ci=True)
def test_settings_written_by_one_rank_are_complete_for_others(group: ddip.Group, tmp_path: Path) -> None:
    """Read fastai's settings in a home folder that has none yet.

    Without ddip's fix, another rank found an empty file in one of five runs.
    """
    group.run(f"""
        import os, torch.distributed as dist
        from fastai.data import external
        for i in range(100):
            external.fastai_cfg.cache_clear()
            os.environ["FASTAI_HOME"] = {str(tmp_path)!r} + f"/home{{i}}"
            dist.barrier()
            assert external.fastai_cfg().path("archive") is not None, i
        external.fastai_cfg.cache_clear()
    """)


@pytest.mark.grid(in_ci=True)
def test_a_cell_on_one_rank_saves_the_requested_files(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"learn = learner(path={str(tmp_path)!r}, metrics=accuracy)\nlearn.fit(1)")
    group.run("learn.save('mine'); learn.load('mine'); learn.export('mine.pkl')", ranks=[1])
    assert (tmp_path / "models" / "mine.pth").exists() and (tmp_path / "mine.pkl").exists()
    group.run("learn.save('ours'); learn.load('ours'); learn.export('ours.pkl')")
    group.run("again = load_learner(learn.path / 'ours.pkl')")
    same_on_all_ranks(group, "weights(again)")


@pytest.mark.grid(in_ci=True)
def test_a_learner_is_loaded_on_one_rank_after_the_other(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"""
        from fastai.distributed import rank0_first
        learn = learner(path={str(tmp_path)!r}, metrics=accuracy); learn.fit(1); learn.save("ours"); learn.export()
        rank0_first(lambda: learn.load("ours")); rank0_first(lambda: load_learner(learn.path / "export.pkl"))
    """)
    same_on_all_ranks(group, "weights(learn)")


@pytest.mark.grid
def test_pictures_are_fetched_once(group: ddip.Group, tmp_path: Path, address: str) -> None:
    pytest.importorskip("fastai.vision.utils", exc_type=ImportError)
    (tmp_path / "web" / "one.jpg").write_bytes(b"a picture")
    group.run(f"""
        from fastai.vision.utils import download_images
        download_images({str(tmp_path / "got")!r}, urls=[{address!r} + "/one.jpg"] * 3)
        told = len(list(Path({str(tmp_path / "got")!r}).iterdir()))
    """)
    assert same_on_all_ranks(group, "told") == Counting.request_counts["/one.jpg"] == 3


@pytest.mark.grid(in_ci=True)
def test_an_exported_learner_needs_no_ddip(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"learn = learner(path={str(tmp_path)!r}, metrics=accuracy)")
    group.run("learn.fit(1, cbs=Callback(after_epoch=lambda self: self.learn.export('within.pkl')))")
    group.run("learn.export('after.pkl')")
    for name in ("within.pkl", "after.pkl"):
        assert b"ddip.apps" not in (tmp_path / name).read_bytes()


# -- output


@pytest.mark.grid(in_ci=True)
def test_one_bar_and_one_table_are_shown(group: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    group.run("learn = learner()\nlearn.fit(2)\nlearn.validate()\nlearn.get_preds()", show_ranks=[0, 1])
    shown = capsys.readouterr().out
    assert shown.count("train_loss") == 1
    assert not re.search(r"\[rank 1\].*(Epoch|%)", shown)


# -- start and end of the app


@pytest.mark.grid(in_ci=True)
def test_a_learner_brings_its_records_to_the_notebook(group: ddip.Group) -> None:
    group.run("""
        learn = learner(metrics=accuracy)
        learn.fit(2)
        recorder = learn.recorder
    """)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's own warnings
        recorder = group.pull(["recorder"])["recorder"]
    assert (len(recorder.values), len(recorder.losses), len(recorder.lrs)) == (2, 14, 14)


@pytest.mark.grid(in_ci=True)
def test_removing_the_app_leaves_fastai_unchanged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fastai.vision.all  # noqa: F401

        from ddip.apps import fastai as app
        from ddip.apps import patches

    def snapshot_of_modules() -> dict[str, dict[str, Any]]:
        import sys

        modules = {
            name: module for name, module in sys.modules.items() if name.startswith(("fastai.", "fastdownload."))
        }
        found = {name: dict(vars(module)) for name, module in modules.items()}
        for module in modules.values():
            for name, kind in vars(module).items():
                if isinstance(kind, type) and kind.__module__.startswith(("fastai", "fastdownload")):
                    found[f"{module.__name__}.{name}"] = dict(vars(kind))
        return found

    before = snapshot_of_modules()
    for module in app.MENDS:
        module.apply_patches()
    changed = {name for name, names in snapshot_of_modules().items() if names != before[name]}
    assert {"fastai.learner.Learner", "fastai.torch_core", "fastai.callback.schedule.LRFinder"} <= changed
    patches.undo_all()
    after = snapshot_of_modules()
    assert {name for name in before if after[name] != before[name]} == set()


@pytest.mark.grid(in_ci=True)
def test_a_command_lists_the_changes_in_fastai(group: ddip.Group) -> None:
    assert "Mends, in fastai 2.8.12" in (group.command("patches") or "")
    with pytest.raises(RequestFailed, match="%%dip -a patches.* men$"):
        group.command("men")


@pytest.mark.grid(in_ci=True)
def test_ranks_draw_their_own_numbers_without_the_app(group: ddip.Group) -> None:
    group.run("from ddip.apps import fastai as app\napp.release()")
    mine, theirs = on_all_ranks(group, "(float(torch.rand(())), random.random(), float(np.random.rand()))")
    assert all(one != other for one, other in zip(mine, theirs, strict=True))
    group.run("app.prepare()")
    same_on_all_ranks(group, "float(torch.rand(()))")


# -- plain fastai


@pytest.fixture(scope="module")
def plain_fastai(warmed_up: None) -> Iterator[ddip.Group]:
    """Start two ranks without the app.

    Code that only works on GPUs is fixed, so that the other faults show.
    """
    with ddip.Group(2, timeout=120) as group:
        group.run(DATA + "\nfrom fastai.distributed import *\nimport warnings; warnings.simplefilter('ignore')")
        yield group


FORGET = "from accelerate.state import AcceleratorState; AcceleratorState._reset_state(True)"
"""accelerate remembers the configuration of its first use."""


@pytest.mark.grid
def test_plain_fastai_fails_on_the_cpu_leaving_the_learner_wrapped(plain_fastai: ddip.Group) -> None:
    with pytest.raises(CellError):
        plain_fastai.run("learn = learner()\nwith learn.distrib_ctx(): learn.fit(1)")
    with pytest.raises(CellError):
        plain_fastai.run(f"{FORGET}\nlearn = learner()\nwith learn.distrib_ctx(cpu=True): learn.fit(1)")
    assert same_on_all_ranks(plain_fastai, "type(learn.model).__name__") == "DistributedDataParallel"


@pytest.mark.grid
def test_plain_fastai_permutes_predictions_and_counts_padding(plain_fastai: ddip.Group) -> None:
    plain_fastai.run(FORGET)
    plain_fastai.run("""
        Tensor.cuda = lambda self: self  # DistributedDL calls it whatever the device
        learn = learner(metrics=accuracy)
        with learn.distrib_ctx(cpu=True, sync_bn=False):
            learn.fit(1)
            preds, targets = learn.get_preds()
            loss = learn.validate()[0]
        right = Items(37, 2).y
        with torch.no_grad(): true = learn.loss_func(learn.model(Items(37, 2).x), right).item()
    """)
    assert same_on_all_ranks(plain_fastai, "targets.tolist() != right.tolist()")
    assert same_on_all_ranks(plain_fastai, "abs(loss - true) > 1e-5")


@pytest.mark.grid
def test_plain_fastai_hangs_in_lr_find(plain_fastai: ddip.Group, tmp_path: Path) -> None:
    plain_fastai.run(f"learn = learner(path={str(tmp_path)!r})\nthrough = False")

    def is_waiting() -> bool:
        stack = plain_fastai.stacks()[0]
        return stack is not None and "after_fit" in stack.threads["main"] and "barrier" in stack.threads["main"]

    thread = meanwhile(is_waiting, press_stop)
    with pytest.raises(CellInterrupted):
        plain_fastai.run("learn.lr_find(num_it=6, show_plot=False)\nthrough = True")
    thread.join()
    assert plain_fastai.pull(["through"]) == {"through": False}


@pytest.mark.grid
def test_plain_fastai_strands_the_others_when_rank_0_fails(plain_fastai: ddip.Group) -> None:
    with raises_on_ranks({0: "OSError"}, {1: ""}):
        plain_fastai.run("""
            import accelerate; whole = Learner.distrib_ctx
            Learner.distrib_ctx = lambda self, **kwargs: whole(self, cpu=True)
            def fetch(): raise OSError("no disk")
            rank0_first(fetch)
        """)


@pytest.mark.grid
def test_plain_fastai_neither_casts_nor_saves_on_rank_1(plain_fastai: ddip.Group, tmp_path: Path) -> None:
    plain_fastai.run("learn = learner(metrics=accuracy).to_fp16()\nkinds = set()", ranks=[1])
    plain_fastai.run(
        "learn.add_cb(Callback(after_pred=lambda self: kinds.add(torch.is_autocast_enabled('cpu'))))", ranks=[1]
    )
    plain_fastai.run("os.environ['WORLD_SIZE'] = '1'\nlearn.fit(1)", ranks=[1])
    plain_fastai.run(
        f"learn.path = Path({str(tmp_path)!r})\nlearn.save('mine')\nos.environ['WORLD_SIZE'] = '2'", ranks=[1]
    )
    assert plain_fastai.pull(["kinds"], 1)["kinds"] == {False}
    assert not os.path.exists(tmp_path / "models" / "mine.pth")
