"""In a group without an app, ddip says so if a framework trains on each rank separately."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..cluster.conftest import new_notebook  # noqa: F401
from ..cluster.notebook import Notebook

pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytest.importorskip("fastai")

LIGHTNING = """%%dip
import torch, lightning as L

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 2)), batch_size=2)
settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
together = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", **settings)
together.fit(Net(), rows)
"""
HF = """%%dip
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ids = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 4))]
arguments = TrainingArguments("out", report_to="none", save_strategy="no", max_steps=2)
hf_alone = Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), arguments, train_dataset=ids)
"""
FASTAI = """%%dip
from fastai.vision.all import DataLoader, DataLoaders, Learner, MSELossFlat

inputs = torch.rand(16, 2)
items = list(zip(inputs, inputs.sum(1, keepdim=True)))
loaders = DataLoaders(*(DataLoader(items, bs=4, num_workers=0) for _ in range(2)))
learn = Learner(loaders, torch.nn.Linear(2, 1), loss_func=MSELossFlat())
"""


def test_ddip_says_that_a_framework_trains_alone(
    new_notebook: Callable[[], Notebook],  # noqa: F811
    tmp_path: Path,
) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 2")
    assert "separately" not in notebook.ok(LIGHTNING).text
    make = "alone = L.Trainer(accelerator='cpu', **settings)"
    assert "separately" not in notebook.ok(f"%%dip -r 0\n{make}\nalone.fit(Net(), rows)").text
    shown = notebook.ok(f"%%dip\n{make}\nalone.fit(Net(), rows)").text
    assert shown.count("alone (Trainer) trains on each rank separately") == 1
    assert "%makedip -a lightning and recreate it" in shown
    assert "separately" not in notebook.ok("%%dip\nalone.fit(Net(), rows)").text  # said once
    assert "separately" not in notebook.ok(HF).text  # it has not trained yet
    assert "type %makedip -a hf" in notebook.ok("%%dip\nhf_alone.train()").text
    assert "separately" not in notebook.ok(FASTAI).text
    assert "type %makedip -a fastai" in notebook.ok("%%dip\nlearn.fit(1)").text
    made = notebook.ok("%%dip\nalone = L.Trainer(accelerator='cpu', **settings)\nimport accelerate").text
    assert "separately" not in made
    advice = notebook.ok("%dipcheck")
    assert "trains on each rank separately" in advice.text + str(advice.data)
