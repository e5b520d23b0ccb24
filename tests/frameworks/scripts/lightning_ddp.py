# app: lightning
"""Lightning's Trainer with DDP, as in a script for torchrun: with its log and its own sampler."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, on_step):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.on_step, self.losses = on_step, []

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(outputs["loss"].item())
        self.on_step(index)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(on_step):
    L.seed_everything(0)
    x = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=4, shuffle=True)
    net = Net(on_step)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, devices=2, accelerator="cpu", strategy="ddp", **quiet)
    trainer.fit(net, loader)
    assert trainer.world_size == 2
    return net.losses
