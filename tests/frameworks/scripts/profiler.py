"""torch.profiler around steps of DistributedDataParallel: one trace per rank, with its collectives."""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")


def train(on_step):
    torch.manual_seed(0)
    x = torch.randn(20, 2, 4, 8)[:, dist.get_rank()]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        ) as profiler:
            for step, inputs in enumerate(x):
                loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                profiler.step()
                on_step(step)
        trace_data = json.loads(trace.read_text())
    assert trace_data["distributedInfo"]["rank"] == dist.get_rank()
    assert any("all" in name and "reduce" in name for name in (event["name"] for event in trace_data["traceEvents"]))
    return losses
