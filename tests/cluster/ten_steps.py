"""Ten steps of a DDP model, whose parameters are compared with those of an undisturbed run."""

TEN_STEPS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def train():
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.full((2, 4), 0.1 * (rank + step))).square().mean().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]
"""
