# app: lightning
"""Lightning's Trainer with FSDP2: ModelParallelStrategy and fully_shard. FSDPStrategy needs GPUs."""

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, on_step):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.on_step, self.losses = on_step, []

    def configure_model(self):
        for layer in (self.layers[0], self.layers[2], self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

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
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = L.Trainer(max_epochs=1, devices=2, accelerator="cpu", strategy=strategy, barebones=True)
    trainer.fit(net, loader)
    assert trainer.world_size == 2 and net.layers[0].weight.to_local().shape == (8, 8)
    return net.losses
