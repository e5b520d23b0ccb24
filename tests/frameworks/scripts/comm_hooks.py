"""DistributedDataParallel with a communication hook: gradients are sent in half precision."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


def train(on_step):
    torch.manual_seed(0)
    x = torch.randn(20, 2, 4, 8)[:, dist.get_rank()]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    model.register_comm_hook(state=None, hook=fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, inputs in enumerate(x):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        on_step(step)
    gradient = model.module[0].weight.grad
    assert torch.equal(gradient, gradient.half().float())  # gradients arrived in half precision
    return losses
