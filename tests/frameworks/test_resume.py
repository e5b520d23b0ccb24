"""Each framework resumes a training that a killed rank has ended, as if it had not been disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddip
from ddip.errors import CellError

KILL = """
import os, signal
def kill_rank_1():
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (160, 12), generator=torch.Generator())]

class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step: kill_rank_1()

def make(folder, killed_at=-1):
    set_seed(3)
    arguments = TrainingArguments(
        folder, report_to="none", save_strategy="steps", save_steps=7, logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=4, num_train_epochs=2, learning_rate=0.01)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.2, **sizes))
    return Trainer(model, arguments, train_dataset=rows, callbacks=[KillAt(killed_at)])

def result(trainer):
    adam = [(state["exp_avg"].tolist(), state["exp_avg_sq"].tolist()) for state in trainer.optimizer.state.values()]
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return trainer.state.global_step, losses, [p.tolist() for p in trainer.model.parameters()], adam
"""
LIGHTNING = """
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), 4)

class Net(L.LightningModule):
    def __init__(self, killed_at=-1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.killed_at, self.losses = killed_at, []
    def training_step(self, batch, index):
        if self.trainer.global_step == self.killed_at: kill_rank_1()
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

def train(folder, killed_at=-1, **how):
    net, keep = Net(killed_at), ModelCheckpoint(folder, save_last=True)
    trainer = L.Trainer(
        max_epochs=3, callbacks=[keep], logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(net, loader, **how)
    adam = [(state["exp_avg"].tolist(), state["exp_avg_sq"].tolist()) for state in trainer.optimizers[0].state.values()]
    return trainer.global_step, net.losses[-20:], [p.tolist() for p in net.parameters()], adam
"""
FASTAI = """
from fastai.basics import *
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
items = [(x[i], x[i].sum(0, keepdim=True).tanh()) for i in range(64)]
torch.manual_seed(rank)
dls = DataLoaders(DataLoader(items[:48], bs=4, shuffle=True), DataLoader(items[48:], bs=4))
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
learn = Learner(dls, net, loss_func=nn.MSELoss(), opt_func=Adam)
losses = []
def fit():
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2, reset_opt=False)
    losses.append([float(loss) for loss in learn.recorder.losses])
def result():
    adam = [(state["grad_avg"].tolist(), state["sqr_avg"].tolist()) for state in learn.opt.state.values()]
    return losses, [p.tolist() for p in learn.model.parameters()], adam, torch.rand(2).tolist()
"""


def results(group: ddip.Group, code: str) -> list[object]:
    """Run `code`, which sets ``told``, and return it from every rank."""
    group.run(code)
    return [values["told"] for values in group.pull_all(["told"], range(2))[0]]


def test_the_trainer_resumes_in_the_middle_of_an_epoch(warmed_up: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with ddip.Group(2, app="hf") as group:
        group.run(KILL + TRAINER)
        train = "trainer.train({})\ntold = result(trainer)"
        undisturbed = results(group, f"trainer = make({str(tmp_path / 'whole')!r})\n" + train.format(""))
        killed = f"trainer = make({str(tmp_path / 'killed')!r}"
        with pytest.raises(CellError, match="RankEnded"):
            group.run(f"{killed}, killed_at=31)\n{train.format('')}")  # in the second epoch; saved after step 28
        assert group.repair() == [1]
        group.run(KILL + TRAINER)
        resumed = results(group, f"{killed})\n" + train.format("resume_from_checkpoint=True"))
    assert resumed == undisturbed


def test_lightning_resumes_at_the_epoch_of_its_last_checkpoint(warmed_up: None, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    with ddip.Group(2, app="lightning") as group:
        group.run(KILL + LIGHTNING)
        undisturbed = results(group, f"told = train({str(tmp_path / 'whole')!r})")
        killed = f"told = train({str(tmp_path / 'killed')!r}"
        with pytest.raises(CellError, match="RankEnded"):
            group.run(f"{killed}, killed_at=50)")  # in the third epoch; saved after step 40
        assert group.repair() == [1]
        group.run(KILL + LIGHTNING)
        resumed = results(group, f"{killed}, ckpt_path='last')")
    assert resumed == undisturbed


def test_fastai_resumes_at_an_epoch_that_ddip_saved(warmed_up: None, tmp_path: Path) -> None:
    pytest.importorskip("fastai")
    with ddip.Group(2, app="fastai") as group:
        group.run(KILL + FASTAI)
        group.run("fit(); fit()")
        group.save(str(tmp_path / "run1"))
        undisturbed = results(group, "fit(); fit()\ntold = result()")
        with pytest.raises(CellError, match="RankEnded"):
            group.run("kill_rank_1(); fit()")
        assert group.repair() == [1]
        group.load(str(tmp_path / "run1"))
        resumed = results(group, "fit(); fit()\ntold = result()")
    assert resumed == undisturbed
