"""torch.distributed.pipelining: one stage of the model per rank, microbatches in the 1F1B schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")


def train(on_step):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stages = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 1)
    module = stages[rank]
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for step in range(20):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        of_microbatches = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.sum(1, keepdim=True).tanh(), losses=of_microbatches)
        optimizer.step()
        loss = torch.stack(of_microbatches).mean().detach() if of_microbatches else torch.zeros(())
        dist.broadcast(loss, src=size - 1)
        losses.append(loss.item())
        on_step(step)
    return losses
