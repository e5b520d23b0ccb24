# app: deepspeed
"""DeepSpeed's engine with ZeRO 2, as in its tutorial; torch's optimizer needs no op to be built."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed()


def train(on_step):
    torch.manual_seed(0)
    x = torch.randn(160, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = list(zip(x, x.sum(1, keepdim=True).tanh(), strict=True))
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, training_data=data)
    losses = []
    for step, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        on_step(step)
    assert dist.get_world_size() == engine.world_size == 2
    return losses
