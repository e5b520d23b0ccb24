"""DDP with ZeroRedundancyOptimizer, whose state is consolidated on rank 0 at the end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


def train(on_step):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.02)
    losses = []
    for step in range(20):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        on_step(step)
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 4
    return losses
