"""torch.distributed.checkpoint: FSDP2 is saved after ten steps; a new model runs the other ten."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1))
    for part in (model[0], model[2]):
        fully_shard(part)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), 0.02)


def saved_and_loaded(model, optimizer, folder):
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder)
    model, optimizer = make(1)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    return model, optimizer


def train(on_step):
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        model, optimizer = make(0)
        losses = []
        for step in range(20):
            if step == 10:
                model, optimizer = saved_and_loaded(model, optimizer, folder[0])
            x = torch.randn(8, 7, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            on_step(step)
        dist.barrier()
    return losses
