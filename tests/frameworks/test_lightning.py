"""The app lightning: Trainer() and Fabric() in a cell, what they refuse, and how they continue."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

import ddip
from ddip.errors import CellError, CellInterrupted

from ..cluster.meanwhile import meanwhile, press_stop

SET_UP = """
    import gc, os, pathlib, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.tuner import Tuner

    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    loader, evaluation = DataLoader(data, 4), DataLoader(data, 8)
    QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    NOTHING = {**QUIET, "enable_checkpointing": False}

    class Net(L.LightningModule):
        def __init__(self, lr=0.01):
            super().__init__()
            torch.manual_seed(0)
            self.lr, self.batch_size, self.losses = lr, 4, []
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        def loss(self, batch):
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        def training_step(self, batch, index):
            assert self.training and self.layers[2].training
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss
        def validation_step(self, batch, index):
            self.log("val", self.loss(batch), sync_dist=True)
        def test_step(self, batch, index):
            self.log("test", self.loss(batch), sync_dist=True)
        def predict_step(self, batch, index):
            return self.layers(batch[0])
        def train_dataloader(self):
            return DataLoader(data, self.batch_size)
        def val_dataloader(self):
            return evaluation
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    class Once(L.Callback):
        "Calls `do` once, at the step, in the hook of this name."
        def __init__(self, hook, do, step=5):
            self.hook, self.do, self.step = hook, do, step
            setattr(self, hook, self.call)
        def call(self, trainer, *_, **__):
            if self.do is not None and trainer.global_step == self.step and not trainer.sanity_checking:
                do, self.do = self.do, None
                do()

    def fail():
        raise ValueError("planted")

    def fail_on_1():
        if rank == 1: fail()

    def same(net):
        mine = torch.cat([part.detach().flatten() for part in net.parameters()])
        theirs = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(theirs, mine)
        return all(torch.equal(mine, other) for other in theirs)

    def of_all(value):
        values = [None] * world_size
        dist.all_gather_object(values, value)
        return values
"""


@pytest.fixture(scope="module")
def group(warmed_up: None) -> Iterator[ddip.Group]:
    with ddip.Group(2, app="lightning", failure_grace=0.1) as group:
        group.run(SET_UP)
        yield group


@pytest.fixture
def cells(group: ddip.Group, tmp_path: Path) -> ddip.Group:
    group.repair()
    group.run(f"os.chdir({str(tmp_path)!r})")
    return group


WAIT = """
def wait():
    pathlib.Path({folder!r}, f"waits-{{rank}}").touch()
    while True: time.sleep(0.01)
"""


def run_and_stop(cells: ddip.Group, code: str, folder: Path) -> None:
    """Run `code`, and press stop when both ranks have called its `wait`."""
    thread = meanwhile(lambda: len(list(folder.glob("waits-*"))) == 2, press_stop)
    with pytest.raises(CellInterrupted):
        cells.run(WAIT.format(folder=str(folder)) + dedent(code))
    thread.join()


# -- Trainer and Fabric in a cell


def test_a_trainer_without_arguments_is_ddp_over_the_ranks(cells: ddip.Group) -> None:
    cells.run("""
        trainer, net = L.Trainer(max_epochs=1, **QUIET), Net()
        trainer.fit(net, loader)
        assert isinstance(trainer.strategy, DDPStrategy) and trainer.world_size == 2 and trainer.num_nodes == 1
        assert type(trainer.accelerator).__name__ == "CPUAccelerator"
        assert len(net.losses) == 20 and len(set(of_all(net.losses[0]))) == 2  # 160 items: each has been seen once
        assert same(net)
        assert trainer.validate(net, evaluation) == trainer.validate(net, evaluation)
        assert len(trainer.predict(net, evaluation)) == 10 and trainer.test(net, evaluation)
    """)


def test_device_counts_may_stay_if_their_product_fits(cells: ddip.Group) -> None:
    cells.run("""
        for asked in ({"devices": 2}, {"devices": 1, "num_nodes": 2}, {"devices": -1}, {"devices": "2"}):
            trainer = L.Trainer(accelerator="cpu", **asked, **NOTHING)
            assert (trainer.num_devices, trainer.num_nodes, trainer.world_size) == (2, 1, 2)
    """)


def test_pytorch_lightning_and_a_fabric_also_use_the_ranks(cells: ddip.Group) -> None:
    cells.run("""
        import pytorch_lightning
        assert pytorch_lightning.Trainer(**NOTHING).world_size == 2
        fabric = L.Fabric()
        fabric.launch()
        module, optimizer = fabric.setup(model := nn.Linear(8, 1), torch.optim.SGD(model.parameters(), 0.1))
        batches = fabric.setup_dataloaders(loader)
        assert fabric.world_size == 2 and len(batches) == 20
        assert fabric.launch(lambda fabric, number: number + 1, 2) == 3
    """)


REFUSED = [
    ("L.Trainer(strategy='ddp_notebook')", r"use strategy='ddp'"),
    ("L.Trainer(strategy='ddp_spawn')", r"use strategy='ddp'"),
    ("L.Trainer(strategy='ddp_fork_find_unused_parameters_true')", r"use strategy='ddp_find_unused_parameters_true'"),
    ("L.Trainer(strategy=DDPStrategy(start_method='fork'))", r"DDPStrategy\(...\)\): .* use strategy='ddp'"),
    ("L.Fabric(strategy='ddp_notebook')", r"Fabric\(strategy='ddp_notebook'\): .* use strategy='ddp'"),
    ("L.Trainer(strategy='horovod')", r"removed .*use strategy='ddp'"),
    ("L.Trainer(strategy='fsdp')", r"%makedip -g all.*ModelParallelStrategy\(data_parallel_size=2"),
    ("L.Trainer(strategy=FSDPStrategy())", r"FSDP.*%makedip -g all"),
    ("L.Trainer(strategy='deepspeed')", r"%makedip -g all.* use strategy='ddp'"),
    ("L.Trainer(devices=1)", r"Trainer\(devices=1\): .*2 ranks.*%makedip -n 1"),
    ("L.Trainer(devices=2, num_nodes=2)", r"%makedip -n 4"),
    ("L.Trainer(accelerator='gpu')", r"accelerator=.*on the CPU; leave it out"),
    ("Tuner(L.Trainer(**NOTHING)).scale_batch_size(Net())", r"%%dip -r 0"),
]


@pytest.mark.parametrize(("code", "said"), REFUSED, ids=[code for code, _ in REFUSED])
def test_unsupported_options_are_refused_with_advice(cells: ddip.Group, code: str, said: str) -> None:
    with pytest.raises(CellError, match=said):
        cells.run(code)


def test_a_trainer_in_a_cell_on_one_rank_trains_alone(cells: ddip.Group) -> None:
    cells.run("""
        from torchmetrics import MeanMetric
        everybody = L.Trainer(max_epochs=1, **NOTHING)
        mean = MeanMetric()
        mean.update(float(rank))
        assert mean.compute() == 0.5
        mean.reset()
    """)
    cells.run(
        """
        mean.update(float(rank))
        assert mean.compute() == 1
        trainer, net = L.Trainer(max_epochs=1, **NOTHING), Net()
        trainer.fit(net, loader)
        assert trainer.world_size == 1 and len(net.losses) == 40
        trainer = L.Trainer(max_epochs=1, **NOTHING)
        assert Tuner(trainer).scale_batch_size(net, max_trials=2, steps_per_trial=1) >= 2
    """,
        ranks=[1],
    )
    with pytest.raises(CellError, match="Trainer .*2 ranks.*rank 1 only"):
        cells.run("everybody.fit(Net(), loader)", ranks=[1])
    with pytest.raises(CellError, match="strategy='ddp'.*2 ranks"):
        cells.run("L.Trainer(strategy='ddp')", ranks=[1])


def test_only_one_rank_shows_bars_and_writes_logs(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells.run("""
        L.seed_everything(1)
        net = Net()
        trainer = L.Trainer(max_epochs=1, callbacks=[L.pytorch.callbacks.TQDMProgressBar()])
        trainer.fit(net, loader)
        found = Tuner(trainer).lr_find(net)
        assert len(set(of_all(found.suggestion()))) == 1
    """)
    shown = capsys.readouterr()
    output = shown.out + shown.err
    # Once by fit, once by lr_find
    assert output.count("Seed set to 1") == 1 and output.count("`Trainer.fit` stopped: `max_epochs=1`") == 2
    assert "[rank 1]" not in output
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
    assert not list(tmp_path.glob(".lr_find*"))
    assert not [child for member in cells.members for child in psutil.Process(member.pid).children()]


# -- continuing after faults


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"])
def test_the_same_trainer_continues_after_a_rank_has_failed(cells: ddip.Group, hook: str) -> None:
    cells.run(f"""
        once, best = Once({hook!r}, fail_on_1), ModelCheckpoint(dirpath="best", monitor="val")
        trainer, net = L.Trainer(max_steps=30, callbacks=[once, best, EarlyStopping("val", patience=9)], **QUIET), Net()
    """)
    with pytest.raises(CellError, match="rank 1: .*planted"):
        cells.run("trainer.fit(net, loader, evaluation)")
    cells.run("""
        wrappers = [one for one in gc.get_objects() if type(one) is nn.parallel.DistributedDataParallel]
        assert not any(type(one.module) is Net for one in wrappers)
        trainer.fit(net, loader, evaluation)
        assert trainer.global_step == 30 and same(net)
        assert len(set(of_all((len(net.losses), best.best_model_path, trainer.current_epoch)))) <= 2
        assert len(set(of_all((best.best_model_path, trainer.current_epoch)))) == 1
        assert trainer.test(net, evaluation, ckpt_path="best", weights_only=False)
    """)


def test_the_same_trainer_continues_after_a_stop_in_validation(cells: ddip.Group, tmp_path: Path) -> None:
    code = """
        trainer = L.Trainer(max_epochs=2, callbacks=[Once("on_validation_batch_end", wait, 20)], **QUIET)
        net = Net()
        trainer.fit(net, loader, evaluation)
    """
    run_and_stop(cells, code, tmp_path)
    cells.run("""
        assert net.training and net.layers[2].training
        trainer.fit(net, loader, evaluation)
        assert trainer.current_epoch == 2 and same(net)
    """)


def test_a_stop_is_a_keyboard_interrupt_and_never_sys_exit(cells: ddip.Group, tmp_path: Path) -> None:
    code = """
        try:
            L.Trainer(max_epochs=1, callbacks=[Once("setup", wait, 0)], **NOTHING).fit(Net(), loader)
        except BaseException as error:
            caught = type(error)
            raise
    """
    run_and_stop(cells, code, tmp_path)
    cells.run("""
        import signal
        assert caught is KeyboardInterrupt and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        exits = Once("on_train_start", lambda: os.sys.exit(3), 0)
        try:
            L.Trainer(max_epochs=1, callbacks=[exits], **NOTHING).fit(Net(), loader)
        except SystemExit as error:
            assert error.code == 3
        else:
            assert False
    """)


def test_a_checkpoint_of_a_failed_run_is_written_without_waiting(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("""
        callbacks = [Once("on_train_batch_end", fail_on_1), OnExceptionCheckpoint("failed")]
        trainer, net = L.Trainer(max_epochs=1, callbacks=callbacks, **QUIET), Net()
    """)
    with pytest.raises(CellError, match="rank 1: .*planted"):
        cells.run("trainer.fit(net, loader)")
    assert (tmp_path / "failed" / "on_exception.ckpt").exists()
    cells.run("""
        trainer.fit(net, loader, ckpt_path="failed/on_exception.ckpt", weights_only=False)
        assert trainer.global_step == 20 and same(net)
    """)


def test_a_resumed_run_ends_like_an_uninterrupted_run(cells: ddip.Group) -> None:
    cells.run("""
        def make(*callbacks):
            return L.Trainer(max_epochs=3, callbacks=list(callbacks), **QUIET)
        nets = [Net(), Net(), Net()]
        for net in nets:
            net.layers[2] = nn.Identity()
        make().fit(nets[0], loader)
    """)
    with pytest.raises(CellError, match="planted"):
        cells.run("""
            last = ModelCheckpoint("at", save_last=True)
            make(last, Once("on_train_batch_start", fail_on_1, 50)).fit(nets[1], loader)
        """)
    cells.run("""
        make().fit(nets[2], loader, ckpt_path="at/last.ckpt", weights_only=False)
        assert torch.allclose(torch.tensor(nets[2].losses), torch.tensor(nets[0].losses[40:]), atol=1e-6)
    """)


def test_a_fault_in_lr_find_restores_the_model_without_files(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("""
        trainer, net = L.Trainer(max_epochs=1, callbacks=[counts := Once("on_train_end", fail, 0)], **QUIET), Net()
        before = {name: part.clone() for name, part in net.state_dict().items()}
    """)
    with pytest.raises(CellError, match="planted"):
        cells.run("""
            def step(batch, index, of=net.training_step):
                if len(net.losses) == 8: fail_on_1()
                return of(batch, index)
            net.training_step = step
            Tuner(trainer).lr_find(net)
        """)
    cells.run("""
        assert all(torch.equal(part, before[name]) for name, part in net.state_dict().items())
        del net.training_step
        Tuner(trainer).lr_find(net)
        assert counts in trainer.callbacks and len(trainer.callbacks) == 2
        trainer.fit(net, loader)
        assert same(net)
    """)
    assert not list(tmp_path.glob(".lr_find*"))


def test_a_failure_to_prepare_data_is_retried_next_time(cells: ddip.Group) -> None:
    cells.run("""
        class Data(L.LightningDataModule):
            fails = True
            def prepare_data(self):
                if self.fails: raise OSError("no room")
            def train_dataloader(self):
                return DataLoader(data, 4, num_workers=1)
        source, trainer, net = Data(), L.Trainer(max_epochs=1, **NOTHING), Net()
    """)
    with pytest.raises(CellError, match="rank 0: OSError"):
        cells.run("trainer.fit(net, datamodule=source)")
    cells.run("source.fails = False\ntrainer.fit(net, datamodule=source)\nassert len(net.losses) == 20 and same(net)")


def test_a_fabric_model_continues_after_faults_and_stops(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("""
        fabric = L.Fabric()
        fabric.launch()
        module, optimizer = fabric.setup(model := nn.Linear(8, 1), torch.optim.SGD(model.parameters(), 0.1))
        batches = fabric.setup_dataloaders(loader)
        def train(do, at=5):
            for step, (inputs, targets) in enumerate(batches):
                loss = nn.functional.mse_loss(module(inputs), targets)
                optimizer.zero_grad()
                fabric.backward(loss)
                if step == at: do()
                optimizer.step()
    """)
    with pytest.raises(CellError, match="planted"):
        cells.run("train(fail_on_1)")
    cells.run("train(lambda: None)\nassert same(model)")
    run_and_stop(cells, "train(lambda: rank == 1 and wait() or wait())", tmp_path)
    cells.run("assert same(model)\ntrain(lambda: None)\nassert same(model)")


def test_a_stop_between_unequal_steps_leaves_equal_models(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("""
        fabric = L.Fabric()
        fabric.launch()
        module, optimizer = fabric.setup(model := nn.Linear(8, 1), torch.optim.SGD(model.parameters(), 0.1))
    """)
    run_and_stop(
        cells,
        """
        fabric.backward(module(x).sum())
        if rank == 0: optimizer.step()
        wait()
    """,
        tmp_path,
    )
    cells.run("assert same(model)")


def test_a_trainer_of_another_number_of_ranks_says_so(warmed_up: None, capsys: pytest.CaptureFixture[str]) -> None:
    with ddip.Group(1, app="lightning") as group:
        group.run(SET_UP)
        group.run("""
            trainer, net, fabric = L.Trainer(max_epochs=1, **NOTHING), Net(), L.Fabric()
            trainer.fit(net, loader)
            assert len(net.losses) == 40
        """)
        group.change(ddip.Request(n=2))
        group.run(SET_UP, ranks=[1])
        with pytest.raises(CellError, match="1 rank, .* 2 now.*trainer = Trainer"):
            group.run("if rank == 0: trainer.fit(net, loader)")
        with pytest.raises(CellError, match="fabric.launch: .*1 rank"):
            group.run("if rank == 0: fabric.launch()")
        group.run(
            "L.Trainer(max_epochs=1, **NOTHING).fit(net := Net(), loader)\nassert len(net.losses) == 20 and same(net)"
        )


def test_training_keeps_the_signal_handler_of_a_rank(cells: ddip.Group) -> None:
    cells.run("""
        import signal
        before, during = signal.getsignal(signal.SIGTERM), []
        note = Once("on_train_batch_end", lambda: during.append(signal.getsignal(signal.SIGTERM)))
        L.Trainer(max_epochs=1, callbacks=[note], **NOTHING).fit(Net(), loader)
        assert during == [before] == [signal.getsignal(signal.SIGTERM)]
    """)


def test_a_lightning_environment_leaves_the_ranks_unchanged(cells: ddip.Group) -> None:
    cells.run("""
        from lightning.pytorch.plugins.environments import LightningEnvironment
        trainer = L.Trainer(max_epochs=1, plugins=[LightningEnvironment()], **NOTHING)
        trainer.fit(net := Net(), loader)
        assert os.environ["WORLD_SIZE"] == "2" and trainer.world_size == 2 and len(net.losses) == 20
        L.Trainer(max_epochs=1, **NOTHING).fit(net := Net(), loader)
        assert same(net)
    """)


# -- in this process


@pytest.fixture(scope="module")
def app() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own warnings
        from ddip.apps import lightning
    return lightning


def test_removing_the_patches_restores_lightning(app: Any) -> None:
    import lightning
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
    from lightning.pytorch.tuner import Tuner, lr_finder

    from ddip.apps import patches

    def patched_attributes() -> list[Any]:
        owners = [lightning.Trainer, lightning.Fabric, call, Tuner, lr_finder._LRCallback, _SignalConnector]
        return [dict(vars(owner)) for owner in owners]

    before = patched_attributes()
    for module in app.PATCHES:
        module.apply_patches()
    assert patched_attributes() != before
    patches.undo_all()
    assert patched_attributes() == before


def test_lightning_finds_the_gpu_of_a_rank_in_its_list(app: Any) -> None:
    from ddip.apps.lightning.trainer_placement import RankPosition, constructor_arguments

    for local_rank, gpu in ((0, 0), (1, 1), (0, 1), (1, 3)):
        position = RankPosition(
            rank=local_rank, size=2, local_rank=local_rank, local_size=2, device=gpu, is_everywhere=True
        )
        found = constructor_arguments("Trainer", {}, position)
        assert (
            found["accelerator"] == "cuda" and found["devices"][local_rank] == gpu and len(set(found["devices"])) == 2
        )
    nodes = RankPosition(rank=3, size=4, local_rank=1, local_size=2, device=1, is_everywhere=True)
    assert constructor_arguments("Trainer", {}, nodes) == {"accelerator": "cuda", "devices": [0, 1], "num_nodes": 2}
    alone = RankPosition(rank=3, size=4, local_rank=1, local_size=2, device=1, is_everywhere=False)
    assert constructor_arguments("Trainer", {}, alone) == {"accelerator": "cuda", "devices": [1], "num_nodes": 1}


def test_private_names_of_lightning_are_as_expected(app: Any) -> None:
    import inspect

    import lightning
    from lightning.pytorch.trainer import call
    from lightning.pytorch.tuner import lr_finder

    assert list(inspect.signature(call._interrupt).parameters) == ["trainer", "exception"]
    handler = inspect.getsource(call._call_and_handle_interrupt)
    assert handler.count("_interrupt(trainer, exception)") == 2 and handler.count("sys.exit(1)") == 1
    assert list(inspect.signature(lr_finder._try_loop_run).parameters) == ["trainer", "params"]
    assert "_try_loop_run(trainer, params)" in inspect.getsource(lr_finder._lr_find)
    assert "progress_bar_refresh_rate" in inspect.getsource(lr_finder._LRCallback.on_train_batch_start)
    assert callable(vars(lr_finder)["__lr_finder_restore_params"])
    assert "self._signal_connector.register_signal_handlers()" in inspect.getsource(lightning.Trainer._run)
