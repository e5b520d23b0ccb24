"""DistributedDataParallel, as in torch's tutorial."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")


def train(on_step):
    torch.manual_seed(0)
    x = torch.randn(160, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=0))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        on_step(step)
    assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size() == 2
    return losses
