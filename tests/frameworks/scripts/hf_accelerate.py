# app: hf
"""accelerate, as in its tutorial: gradients accumulated over 2 batches, and the metric of all ranks."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(on_step):
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.randn(150, 8)  # the last batch of an epoch is padded; gather_for_metrics drops the padding
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=40)
    model, optimizer, scheduler, loader, test = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=16)
    )
    losses = []
    while len(losses) < 19:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            on_step(len(losses) - 1)
    losses = losses[:19]
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(inputs), targets)) for inputs, targets in test]
    predicted, wanted = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert len(predicted) == 150 and accelerator.num_processes == 2
    return [*losses, nn.functional.mse_loss(predicted, wanted).item()]
