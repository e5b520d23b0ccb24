"""ZeroRedundancyOptimizer: each rank keeps the optimizer's state of a part of the parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


def train(on_step):
    torch.manual_seed(0)
    x = torch.randn(20, 2, 4, 8)[:, dist.get_rank()]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    losses = []
    for step, inputs in enumerate(x):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        on_step(step)
    assert 0 < len(optimizer.optim.state) < len(list(model.parameters()))
    optimizer.consolidate_state_dict(to=0)
    return losses
